"""How often a checkpoint solves tasks of Meta-World: closed loop, in the simulator as scripts/record_metaworld.py records it.

    python scripts/eval_metaworld.py CHECKPOINT --task reach-v3
    python scripts/eval_metaworld.py CHECKPOINT --task reach-v3 drawer-open-v3 --backend torch --untrained --video reach.mp4

Needs what the recorder needs: the extra `sim` (uv sync --extra sim) and OSMesa (apt-get install libosmesa6), or MUJOCO_GL=egl.
Episode k starts from goal k of --seed. The bundled dataset was recorded with seed 0, so its goals are the ones trained on; take another seed.
An action chunk is executed for --replan steps without looking, then the next one is computed. An episode is a success at the first step at which
Meta-World counts its task as solved. Prints one JSON line for each task and policy; progress goes to stderr.
"""

import argparse
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import PIL.Image
from record_metaworld import ACTION_NAMES, CAMERAS, GOALS, MAX_SIZE, STATE_NAMES, TASKS, Stage, prepare_renderer

from pi05.backend import BACKENDS
from pi05.checkpoint import load_description, locate_checkpoint
from pi05.data.transforms import suggest
from pi05.errors import DataError, Pi05Error
from pi05.initial import initial_params
from pi05.policy import Policy, load_policy

LONGEST = 500  # steps of an episode; Meta-World ends it then
CALLS = LONGEST  # indices of noise that an episode may use up
Z95 = 1.959963984540054  # standard deviations that hold 95 % of a normal distribution
VIDEO_SCALE = 2  # of the rendered pixels
GIF_EVERY = 4  # frames of a GIF, which viewers slow down beyond 50 frames/s

# An action chunk, float32[A, 4], for an observation as a client sends it (Robot.from_client) and the index of its noise.
Infer = Callable[[Mapping[str, Any], int], np.ndarray]


class Simulator(Protocol):
    """What an episode needs of record_metaworld.Stage."""

    def start(self, number: int) -> np.ndarray: ...

    def step(self, action: np.ndarray) -> tuple[np.ndarray, bool]: ...

    def render(self, camera: str) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Result:
    """The episodes of one task. steps: of each episode, until it was solved; None where it was not."""

    steps: tuple[int | None, ...]

    @property
    def successes(self) -> int:
        return sum(steps is not None for steps in self.steps)

    def describe(self) -> dict[str, Any]:
        """For the JSON line."""
        episodes = len(self.steps)
        interval = [round(bound, 4) for bound in wilson(self.successes, episodes)]
        rate = round(self.successes / episodes, 4)
        return {"episodes": episodes, "successes": self.successes, "success_rate": rate, "wilson_95": interval, "steps_until_solved": list(self.steps)}


def wilson(successes: int, episodes: int, z: float = Z95) -> tuple[float, float]:
    """The interval that holds the true success rate, at 95 % by default (Wilson 1927): unlike the normal one, honest near 0 and 1."""
    rate, shrink = successes / episodes, 1 + z * z / episodes
    centre = rate + z * z / (2 * episodes)
    half = z * math.sqrt(rate * (1 - rate) / episodes + z * z / (4 * episodes * episodes))
    return max(0.0, (centre - half) / shrink), min(1.0, (centre + half) / shrink)


def run_episode(stage: Simulator, infer: Infer, prompt: str, number: int, *, replan: int, max_steps: int, film: list[np.ndarray] | None = None) -> int | None:
    """Steps until the task was solved, None if it was not within `max_steps`. `number` chooses the goal and the noise.

    film: receives what the cameras see before each step and at the end, side by side, uint8[Y, 2 X, 3].
    """
    observation, chunk = stage.start(number), np.empty((0, len(ACTION_NAMES)), np.float32)
    for step in range(max_steps):
        call, place = divmod(step, replan)
        images = look(stage) if place == 0 or film is not None else {}
        if film is not None:
            film.append(np.hstack(list(images.values())))
        if place == 0:
            state = observation[: len(STATE_NAMES)].astype(np.float32)
            chunk = infer({"images": images, "state": state, "prompt": prompt}, number * CALLS + call)
        observation, solved = stage.step(np.clip(chunk[place], -1, 1).astype(np.float32))
        if solved:
            if film is not None:
                film.append(np.hstack(list(look(stage).values())))
            return step + 1
    return None


def look(stage: Simulator) -> dict[str, np.ndarray]:
    """Camera -> uint8[Y, X, 3]."""
    return {camera: stage.render(camera) for camera in CAMERAS}


def evaluate(
    stage: Simulator,
    infer: Infer,
    prompt: str,
    *,
    episodes: int,
    replan: int,
    max_steps: int,
    film: list[np.ndarray] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Result:
    """Episodes 0, 1, ... of a task; `film` receives the first one."""
    steps: list[int | None] = []
    for number in range(episodes):
        steps.append(run_episode(stage, infer, prompt, number, replan=replan, max_steps=max_steps, film=film if number == 0 else None))
        say(f"episode {number}: {'not solved' if steps[-1] is None else f'solved after {steps[-1]} steps'}")
    return Result(tuple(steps))


class Comparison:
    """Infers with one policy and, from the same observation and noise, with another; remembers how far they were apart.

    largest: absolute difference of an action in the robot's units. chunks: compared so far.
    """

    def __init__(self, policy: Infer, other: Infer) -> None:
        self._policy, self._other = policy, other
        self.largest, self.chunks = 0.0, 0

    def __call__(self, observation: Mapping[str, Any], index: int) -> np.ndarray:
        chunk = self._policy(observation, index)
        self.largest = max(self.largest, float(np.abs(chunk - self._other(observation, index)).max()))
        self.chunks += 1
        return chunk

    def describe(self) -> dict[str, Any]:
        """For the JSON line."""
        return {"chunks_compared": self.chunks, "largest_difference": self.largest}


def as_infer(policy: Policy) -> Infer:
    """A policy as the loop calls it."""
    return lambda observation, index: policy.infer(observation, index=index)


def untrained(policy: Policy) -> Policy:
    """The policy with the random weights that its run would begin with if it began with random ones."""
    tensors = initial_params(policy.config.spec(), policy.config.seed)
    return dataclasses.replace(policy, state=policy.backend.init_policy(tensors))


def check_policy(policy: Policy, replan: int) -> None:
    """Raises DataError if the checkpoint is not of the recorder's robot, or its chunks are shorter than `replan` steps."""
    robot, horizon = policy.pipeline.robot, policy.config.spec().action_horizon
    if (robot.state_names, robot.action_names) != (STATE_NAMES, ACTION_NAMES):
        raise DataError(f"The checkpoint is of the robot {robot.name!r} with the actions {', '.join(robot.action_names)}; evaluate one of robot: metaworld.")
    if not 1 <= replan <= horizon:
        raise DataError(f"--replan is {replan}; the checkpoint's action chunks have {horizon} steps. Give 1 to {horizon}.")


def write_video(path: Path, frames: list[np.ndarray], fps: int) -> None:
    """Writes uint8[Y, X, 3] frames as H.264 (.mp4), or as a GIF that leaves frames out."""
    large = [frame.repeat(VIDEO_SCALE, 0).repeat(VIDEO_SCALE, 1) for frame in frames]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gif":
        first, *rest = [PIL.Image.fromarray(frame) for frame in large[::GIF_EVERY]]
        first.save(path, save_all=True, append_images=rest, duration=round(1000 * GIF_EVERY / fps), loop=0)
        return
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("h264", rate=fps)
        stream.height, stream.width = large[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for frame in large:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raises DataError for what can be known before a checkpoint is read."""
    for task in arguments.task:
        if task not in TASKS:
            raise DataError(f"{task!r} has no prompt. {suggest(task, tuple(TASKS))} For another task of Meta-World see TASKS in scripts/record_metaworld.py.")
    if not 1 <= arguments.episodes <= GOALS:
        raise DataError(f"--episodes is {arguments.episodes}; Meta-World draws {GOALS} goals a seed. Evaluate several seeds for more.")
    if not 1 <= arguments.max_steps <= LONGEST:
        raise DataError(f"--max-steps is {arguments.max_steps}; Meta-World ends an episode after {LONGEST}.")
    if not 32 <= arguments.size <= MAX_SIZE:
        raise DataError(f"--size is {arguments.size}; give the pixels of the dataset, from 32 to {MAX_SIZE}.")
    if arguments.seed < 0:
        raise DataError(f"--seed is {arguments.seed}; give 0 or more.")
    if arguments.video and arguments.video.suffix not in (".mp4", ".gif"):
        raise DataError(f"--video is {arguments.video}; its name must end in .mp4 or .gif.")


def load_policies(arguments: argparse.Namespace, backend: str | None) -> dict[str, Policy]:
    """The policies to evaluate: "trained" and, if asked for, "untrained"."""
    policy = load_policy(arguments.checkpoint, backend=backend, device=arguments.device, seed=arguments.seed)
    check_policy(policy, arguments.replan)
    return {"trained": policy} | ({"untrained": untrained(policy)} if arguments.untrained else {})


def report(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Evaluates; yields what to print as JSON for each task and policy. The video is the first episode of the first of them."""
    checkpoint = locate_checkpoint(arguments.checkpoint)
    policies, others = load_policies(arguments, arguments.backend), {}
    backend = policies["trained"].backend.name
    if arguments.compare:
        (other,) = set(BACKENDS) - {backend}
        others = load_policies(arguments, other)
    limits = {name: getattr(arguments, name) for name in ("replan", "max_steps")}
    about = {"checkpoint": str(checkpoint), "step": load_description(checkpoint)["step"], "backend": backend, "seed": arguments.seed} | limits
    video = arguments.video
    for task in arguments.task:
        with Stage(task, arguments.seed, arguments.size) as stage:
            for weights, policy in policies.items():
                started, film = time.perf_counter(), [] if video else None
                infer = Comparison(as_infer(policy), as_infer(others[weights])) if others else as_infer(policy)
                say = functools.partial(print, f"{task}, {weights},", file=sys.stderr, flush=True)
                result = evaluate(stage, infer, TASKS[task], episodes=arguments.episodes, **limits, film=film, say=say)
                if video:
                    write_video(video, film, stage.fps)
                    video = None
                compared = infer.describe() if isinstance(infer, Comparison) else {}
                yield {"task": task, "weights": weights} | about | result.describe() | compared | {"seconds": round(time.perf_counter() - started, 1)}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a run, for its newest checkpoint, or one of its checkpoints")
    parser.add_argument("--backend", choices=BACKENDS, help="the one that trained it unless given")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--task", nargs="+", default=list(TASKS), metavar="TASK", help="of Meta-World")
    parser.add_argument("--episodes", type=int, default=20, help="of each task")
    parser.add_argument("--seed", type=int, default=1000, help="of goals, object positions and the noise that actions are sampled from")
    parser.add_argument("--replan", type=int, default=4, metavar="STEPS", help="of a chunk that are executed before the next one is computed")
    parser.add_argument("--max-steps", type=int, default=200, help="after which an episode has failed; the experts need 30 to 120")
    parser.add_argument("--size", type=int, default=128, help="pixels, height and width of both cameras, as the dataset was recorded with")
    parser.add_argument("--video", type=Path, metavar="FILE", help="of the first episode, .mp4 or .gif")
    parser.add_argument("--untrained", action="store_true", help="evaluate random weights of the same config as well")
    parser.add_argument("--compare", action="store_true", help="compute every chunk in the other backend too and report the largest difference")
    return parser.parse_args()


def main() -> None:
    """Prints the JSON lines."""
    arguments = parse_arguments()
    try:
        check_arguments(arguments)
        prepare_renderer()
        for line in report(arguments):
            print(json.dumps(line), flush=True)
    except Pi05Error as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
