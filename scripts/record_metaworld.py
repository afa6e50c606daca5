"""Records demonstrations in Meta-World (a Sawyer arm simulated by MuJoCo) as a LeRobot v3.0 dataset; made data/metaworld_mini.

    python scripts/record_metaworld.py --out DIR
    python scripts/record_metaworld.py --out DIR --tasks push-v3 pick-place-v3 --episodes-per-task 20 --seed 1 --size 224

Needs the extra `sim` (uv sync --extra sim) and a renderer without a screen: OSMesa (apt-get install libosmesa6), or set MUJOCO_GL=egl.
Meta-World's scripted experts act, with a little seeded noise; what is recorded is what was executed. Only episodes whose task is solved
and still solved at their end are kept. The same seed gives the same files on the same machine, software renderer and library versions.
"""

import argparse
import ctypes.util
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pi05.data.transforms import suggest
from pi05.errors import DataError

TASKS = {  # Meta-World's name -> prompt
    "reach-v3": "move the gripper to the red ball",
    "push-v3": "push the puck to the green ball",
    "pick-place-v3": "pick up the puck and hold it at the blue ball",
    "drawer-open-v3": "open the drawer",
    "button-press-topdown-v3": "press the red button from above",
    "door-open-v3": "open the door",
    "window-open-v3": "slide the window open",
    "plate-slide-v3": "slide the plate to the goal",
}
CAMERAS = ("corner2", "gripperPOV")
CORNER2_POSITION = (0.75, 0.075, 0.7)  # m; nearer than Meta-World's own, and where LeRobot's Meta-World environment puts it
SHADOW_MAP = 1024  # texels a side; Meta-World's 4096 takes two thirds of the time of a software renderer and shows no difference at 128 pixels
STATE_NAMES = ("x", "y", "z", "gripper")
ACTION_NAMES = ("dx", "dy", "dz", "gripper")
NOISE = 0.05  # standard deviation added to dx, dy, dz of the expert; the commands span [-1, 1]
SETTLE_STEPS = 8  # recorded after the task counts as solved
MAX_STEPS = 200  # the experts need 30 to 120
GOALS = 50  # that Meta-World draws for a task and seed
KEY_FRAME_EVERY = 12  # frames; one read at random costs half as many more to decode, 0.1 ms each
MAX_SIZE = 480  # height of the frame buffer in Meta-World's models


@dataclasses.dataclass(frozen=True)
class Episode:
    """T steps at the control rate. Images, state and action of a step belong together: seen, then done.

    images: camera -> T of uint8[Y, X, 3]. states: float32[T, 4], m and the share of the gripper's opening. actions: float32[T, 4] in [-1, 1].
    """

    images: dict[str, list[np.ndarray]]
    states: np.ndarray
    actions: np.ndarray


class Stage:
    """One task's simulator, expert and renderer; a context manager that frees the renderer.

    Raises:
        DataError: Meta-World does not know the task.
    """

    def __init__(self, task: str, seed: int, size: int) -> None:
        import metaworld
        import mujoco
        from metaworld.policies import ENV_POLICY_MAP

        benchmark = metaworld.MT1(task, seed=seed)
        self._goals, self._seed = benchmark.train_tasks, seed
        self._env, self._expert = benchmark.train_classes[task](), ENV_POLICY_MAP[task]()
        self._env.model.cam("corner2").pos = CORNER2_POSITION
        self._env.model.vis.quality.shadowsize = SHADOW_MAP
        self._renderer = mujoco.Renderer(self._env.model, size, size)
        self._salt = list(task.encode())

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *error: object) -> None:
        self._renderer.close()
        self._env.close()

    @property
    def fps(self) -> int:
        """Control steps a second of simulated time: each step is one action, held for `frame_skip` steps of the physics."""
        return round(1 / self._env.dt)

    def start(self, number: int) -> np.ndarray:
        """Begins an episode with goal `number` of the seed; returns the observation, float64[39], whose first four are the state."""
        self._env.set_task(self._goals[number])
        return self._env.reset()[0]

    def step(self, action: np.ndarray) -> tuple[np.ndarray, bool]:
        """Executes float32[4] in [-1, 1]; returns the next observation and whether the task is solved now."""
        observation, _, _, _, info = self._env.step(action)
        return observation, bool(info["success"])

    def attempts(self) -> Iterator[Episode | None]:
        """One attempt a goal; None where the expert failed. Each depends on task, seed and its number only."""
        for number in range(len(self._goals)):
            yield self._attempt(self.start(number), np.random.default_rng([self._seed, number, *self._salt]))

    def _attempt(self, observation: np.ndarray, rng: np.random.Generator) -> Episode | None:
        images: dict[str, list[np.ndarray]] = {camera: [] for camera in CAMERAS}
        states, actions, end, solved = [], [], MAX_STEPS, False
        while len(actions) < end:
            for camera in CAMERAS:
                images[camera].append(self.render(camera))
            noise = np.append(rng.normal(0, NOISE, 3), 0)
            # Clipped here, although the environment clips as well: the file must hold what was executed.
            action = np.clip(self._expert.get_action(observation) + noise, -1, 1).astype(np.float32)
            states.append(observation[:4].astype(np.float32))
            actions.append(action)
            observation, solved = self.step(action)
            if solved and end == MAX_STEPS:
                end = len(actions) + SETTLE_STEPS
        return Episode(images, np.stack(states), np.stack(actions)) if solved else None

    def render(self, camera: str) -> np.ndarray:
        """What a camera sees now, uint8[size, size, 3], upright."""
        self._renderer.update_scene(self._env.data, camera=camera)
        image = self._renderer.render()
        # Meta-World mounts this camera upside down: turned by half a turn, not mirrored.
        return np.ascontiguousarray(image[::-1, ::-1]) if camera == "corner2" else image.copy()


def prepare_renderer() -> None:
    """Chooses OSMesa unless MUJOCO_GL is set; must run before mujoco is imported.

    Raises:
        DataError: Meta-World or OSMesa is not installed.
    """
    backend = os.environ.setdefault("MUJOCO_GL", "osmesa")
    if backend == "osmesa" and ctypes.util.find_library("OSMesa") is None:
        raise DataError("OSMesa, the renderer without a screen, is not installed. Run `apt-get install libosmesa6`, or set MUJOCO_GL=egl where there is a GPU.")
    try:
        import metaworld  # noqa: F401
    except ModuleNotFoundError as error:
        raise DataError(f"Recording needs Meta-World, but the module {error.name!r} is not installed. Run `uv sync --extra sim`.") from error
    warnings.filterwarnings("ignore", message=r"Constant\(s\) may be too high")  # the experts count on clipping


def record(root: Path, tasks: list[str], episodes: int, seed: int, size: int) -> Iterator[str]:
    """Writes the dataset to `root`, which must not exist; yields a line of the report for each task.

    Raises:
        DataError: an expert does not reach the number of episodes with the goals there are.
    """
    dataset, total = None, [0, 0]
    for task in tasks:
        started, tried, steps = time.perf_counter(), 0, []
        with Stage(task, seed, size) as stage:
            if dataset is None:
                dataset = create_dataset(root, stage.fps, size)
            for episode in stage.attempts():
                tried += 1
                if episode is not None:
                    add_episode(dataset, episode, TASKS[task])
                    steps.append(len(episode.actions))
                if len(steps) == episodes:
                    break
        if len(steps) < episodes:
            raise DataError(f"The expert of {task} solved {len(steps)} of {tried} goals. Ask for fewer episodes, or take another seed.")
        total = [total[0] + episodes, total[1] + sum(steps)]
        yield f"{task:26}{episodes:9}{sum(steps):8}{min(steps):6}{max(steps):6}{episodes / tried:9.0%}{time.perf_counter() - started:9.1f}"
    finish_dataset(dataset, root)
    yield f"{'all':26}{total[0]:9}{total[1]:8}"


def create_dataset(root: Path, fps: int, size: int) -> Any:
    """An empty LeRobotDataset at `root`; silences what its encoders print for each episode."""
    import av
    import datasets
    from lerobot.configs.video import RGBEncoderConfig
    from lerobot.datasets import LeRobotDataset

    av.logging.set_libav_level(av.logging.ERROR)
    datasets.disable_progress_bars()
    image = {"dtype": "video", "shape": (size, size, 3), "names": ["height", "width", "channels"]}
    features = {f"observation.images.{camera}": image for camera in CAMERAS} | {
        "observation.state": {"dtype": "float32", "shape": (len(STATE_NAMES),), "names": list(STATE_NAMES)},
        "action": {"dtype": "float32", "shape": (len(ACTION_NAMES),), "names": list(ACTION_NAMES)},
    }
    return LeRobotDataset.create(
        f"local/{root.name}",  # never looked up
        fps,
        features,
        root=root,
        robot_type="metaworld",
        video_backend="pyav",
        rgb_encoder=RGBEncoderConfig(vcodec="h264", g=KEY_FRAME_EVERY, crf=20, preset="veryslow"),
        encoder_threads=1,  # the output of x264 depends on the number of threads; it should not depend on the machine's cores
    )


def add_episode(dataset: Any, episode: Episode, prompt: str) -> None:
    """Appends the episode to the LeRobotDataset."""
    for step, (state, action) in enumerate(zip(episode.states, episode.actions, strict=True)):
        images = {f"observation.images.{camera}": frames[step] for camera, frames in episode.images.items()}
        dataset.add_frame(images | {"observation.state": state, "action": action, "task": prompt})
    dataset.save_episode(parallel_encoding=False)


def finish_dataset(dataset: Any, root: Path) -> None:
    """Closes the LeRobotDataset and removes what would differ from run to run, or is of no use."""
    dataset.finalize()  # writes the footers of the parquet files
    stats = root / "meta/stats.json"
    stats.write_text(json.dumps(json.loads(stats.read_text()), indent=4, sort_keys=True))  # LeRobot writes the features in the order of a set
    shutil.rmtree(root / "images")  # empty: LeRobot's frames on their way to the encoder


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raises DataError for what can be known before anything is simulated."""
    if arguments.out.exists():
        raise DataError(f"{arguments.out} exists. Give a new folder, or remove that one.")
    for task in arguments.tasks:
        if task not in TASKS:
            raise DataError(f"{task!r} has no prompt here. {suggest(task, tuple(TASKS))} For another task of Meta-World add it and its prompt to TASKS.")
    if len(set(arguments.tasks)) < len(arguments.tasks):
        raise DataError(f"--tasks names a task twice: {arguments.tasks}. Use --episodes-per-task for more episodes.")
    if not 1 <= arguments.episodes_per_task <= GOALS:
        raise DataError(f"--episodes-per-task is {arguments.episodes_per_task}; Meta-World draws {GOALS} goals a seed. Record several seeds for more.")
    if arguments.size % 2 or not 32 <= arguments.size <= MAX_SIZE:
        raise DataError(f"--size is {arguments.size}; give an even number of pixels from 32 to {MAX_SIZE}.")
    if arguments.seed < 0:
        raise DataError(f"--seed is {arguments.seed}; give 0 or more.")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="new folder of the dataset")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="TASK", help="of Meta-World")
    parser.add_argument("--episodes-per-task", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="of goals, object positions and noise")
    parser.add_argument("--size", type=int, default=128, help="pixels, height and width of both cameras")
    return parser.parse_args()


def main() -> None:
    """Records into a temporary folder beside `--out` and renames it when it is complete."""
    arguments = parse_arguments()
    try:
        check_arguments(arguments)
        prepare_renderer()
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{arguments.out.name}-", dir=arguments.out.parent) as folder:
            root = Path(folder) / arguments.out.name
            print(f"{'task':26}{'episodes':>9}{'steps':>8}{'min':>6}{'max':>6}{'success':>9}{'seconds':>9}", flush=True)
            for line in record(root, arguments.tasks, arguments.episodes_per_task, arguments.seed, arguments.size):
                print(line, flush=True)
            root.rename(arguments.out)
    except DataError as error:
        sys.exit(f"error: {error}")
    size = sum(path.stat().st_size for path in arguments.out.rglob("*") if path.is_file())
    print(f"{arguments.out}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
