"""scripts/eval_metaworld.py without the simulator: which episodes it runs, what it executes, what it counts and what it prints."""

import dataclasses
import importlib.util
import inspect
import json
import sys
import types
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import av
import numpy as np
import PIL.Image
import pytest

from pi05.checkpoint import Checkpointer
from pi05.config import get_config
from pi05.data.run_data import open_run_data
from pi05.initial import initial_params
from pi05.policy import load_policy
from pi05.run_folder import open_run
from pi05.train_state import TrainState

ROOT = Path(__file__).resolve().parents[1]
CONFIG = get_config("tiny")
SPEC = CONFIG.spec()
TASK = "reach-v3"
SIZE = 32


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    found = importlib.util.spec_from_file_location("eval_metaworld", ROOT / "scripts" / "eval_metaworld.py")
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "eval_metaworld", module)  # dataclasses look their module up
    found.loader.exec_module(module)
    return module


class FakeStage:
    """A hand on a line: goal k is at 0.1 (k + 1), an action moves by a tenth of its dx, and it is solved where the hand reaches the goal."""

    opened: list["FakeStage"] = []
    fps = 80

    def __init__(self, task: str = TASK, seed: int = 0, size: int = SIZE) -> None:
        self.task, self.seed, self.size = task, seed, size
        self.starts: list[int] = []
        self.actions: list[np.ndarray] = []
        self.rendered: list[str] = []
        FakeStage.opened.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, number: int) -> np.ndarray:
        self.starts.append(number)
        self.x = 0.0
        return self._observe()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, bool]:
        assert action.dtype == np.float32 and action.shape == (4,) and np.abs(action).max() <= 1
        self.actions.append(action)
        self.x += 0.1 * float(action[0])
        return self._observe(), self.x >= 0.1 * (self.starts[-1] + 1) - 1e-6

    def render(self, camera: str) -> np.ndarray:
        self.rendered.append(camera)
        shade = {"corner2": 50, "gripperPOV": 200}[camera] + round(100 * self.x) % 50
        return np.full((self.size, self.size, 3), shade, np.uint8)

    def _observe(self) -> np.ndarray:
        return np.concatenate([[self.x, 0.6, 0.2, 1.0], np.full(35, 1e6)])  # goals and objects, which no policy may see


class FakeInfer:
    """Chunks whose dx is `dx`, whose dy counts the calls, and whose dz counts the steps within the chunk, in hundredths."""

    def __init__(self, dx: float, horizon: int = 8) -> None:
        self.dx, self.horizon, self.seen = dx, horizon, []

    def __call__(self, observation: dict[str, Any], index: int) -> np.ndarray:
        self.seen.append((observation, index))
        steps = np.arange(self.horizon)
        return np.stack([np.full(len(steps), self.dx), np.full(len(steps), len(self.seen) / 100), steps / 100, np.ones(len(steps))], 1).astype(np.float32)


def test_the_simulator_is_called_as_here(script: ModuleType) -> None:
    for name in ("__init__", "start", "step", "render"):
        real, fake = (list(inspect.signature(getattr(stage, name)).parameters) for stage in (script.Stage, FakeStage))
        assert real == fake


def test_an_episode_counts_as_solved_at_the_step_that_solves_it_and_not_beyond_max_steps(script: ModuleType) -> None:
    stage = FakeStage()
    result = script.evaluate(stage, FakeInfer(dx=1.0), "go", episodes=6, replan=3, max_steps=4)
    assert result.steps == (1, 2, 3, 4, None, None) and result.successes == 4
    assert stage.starts == [0, 1, 2, 3, 4, 5] and len(stage.actions) == 1 + 2 + 3 + 4 + 4 + 4
    told = result.describe()
    assert told["success_rate"] == 0.6667 and told["steps_until_solved"] == [1, 2, 3, 4, None, None]
    assert script.evaluate(FakeStage(), FakeInfer(dx=-1.0), "go", episodes=3, replan=3, max_steps=4).successes == 0


@pytest.mark.parametrize("replan", [1, 3, 8])
def test_a_chunk_is_executed_for_replan_steps_and_the_next_one_sees_what_came_of_it(script: ModuleType, replan: int) -> None:
    stage, infer = FakeStage(), FakeInfer(dx=0.5)
    assert script.run_episode(stage, infer, "go", 99, replan=replan, max_steps=16) is None
    calls, places = np.divmod(np.arange(16), replan)
    np.testing.assert_allclose(np.array(stage.actions)[:, 1], (calls + 1) / 100, atol=1e-7)
    np.testing.assert_allclose(np.array(stage.actions)[:, 2], places / 100, atol=1e-7)
    assert len(infer.seen) == calls[-1] + 1 and stage.rendered == ["corner2", "gripperPOV"] * len(infer.seen)  # pictures cost the time
    for call, (observation, _) in enumerate(infer.seen):
        assert observation["prompt"] == "go" and observation["state"].dtype == np.float32
        np.testing.assert_allclose(observation["state"], [0.05 * call * replan, 0.6, 0.2, 1.0], atol=1e-6)
        shades = {camera: int(image[0, 0, 0]) for camera, image in observation["images"].items()}
        assert shades == {"corner2": 50 + round(5 * call * replan) % 50, "gripperPOV": 200 + round(5 * call * replan) % 50}


def test_every_call_has_its_own_noise_and_the_same_in_every_evaluation(script: ModuleType) -> None:
    indices = []
    for dx in (0.1, -0.3):
        infer = FakeInfer(dx)
        script.evaluate(FakeStage(), infer, "go", episodes=2, replan=1, max_steps=script.LONGEST)
        indices.append([index for _, index in infer.seen])
    assert len(set(indices[1])) == len(indices[1]) == 2 * script.LONGEST
    assert set(indices[0]) <= set(indices[1]) and indices[0][:10] == indices[1][:10]


def test_actions_beyond_the_limits_are_clipped(script: ModuleType) -> None:
    stage = FakeStage()  # which asserts them
    assert script.run_episode(stage, FakeInfer(dx=7.0), "go", 4, replan=2, max_steps=9) == 5
    assert {float(action[0]) for action in stage.actions} == {1.0}


@pytest.mark.parametrize(
    ("successes", "episodes", "interval"),
    [(0, 20, (0.0, 0.1611)), (20, 20, (0.8389, 1.0)), (10, 20, (0.2993, 0.7007)), (1, 10, (0.0179, 0.4042)), (81, 263, (0.2553, 0.3662))],
)
def test_the_interval_is_wilsons(script: ModuleType, successes: int, episodes: int, interval: tuple[float, float]) -> None:
    np.testing.assert_allclose(script.wilson(successes, episodes), interval, atol=6e-5)


def test_the_film_is_of_the_first_episode_and_shows_both_cameras_from_start_to_success(script: ModuleType, tmp_path: Path) -> None:
    film: list[np.ndarray] = []
    script.evaluate(FakeStage(), FakeInfer(dx=0.125), "go", episodes=2, replan=4, max_steps=20, film=film)
    assert len(film) == 9 and film[0].shape == (SIZE, 2 * SIZE, 3)
    assert film[0][0, 0, 0] == 50 and film[0][0, -1, 0] == 200 and film[-1][0, 0, 0] == 60
    script.write_video(tmp_path / "new" / "film.mp4", film, 80)
    with av.open(str(tmp_path / "new" / "film.mp4")) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert len(frames) == 9 and container.streams.video[0].average_rate == 80
    assert frames[0].shape == (2 * SIZE, 4 * SIZE, 3) and abs(int(frames[0][5, 5, 0]) - 50) < 8 and abs(int(frames[0][5, -5, 0]) - 200) < 8
    script.write_video(tmp_path / "film.gif", film, 80)
    with PIL.Image.open(tmp_path / "film.gif") as picture:
        assert picture.n_frames == 3 and picture.info["duration"] == 50


def test_the_comparison_acts_with_the_first_and_reports_the_largest_difference(script: ModuleType) -> None:
    first, second = FakeInfer(dx=1.0), FakeInfer(dx=0.75)
    compared = script.Comparison(first, second)
    assert script.evaluate(FakeStage(), compared, "go", episodes=3, replan=2, max_steps=9).steps == (1, 2, 3)
    assert compared.describe() == {"chunks_compared": 4, "largest_difference": 0.25}
    assert [index for _, index in first.seen] == [index for _, index in second.seen]


def save_run(folder: Path, seed: int) -> Path:
    """A run of the tiny config whose newest checkpoint has freshly drawn weights."""
    params = dict(initial_params(SPEC, seed))
    moments = {name: np.zeros_like(array) for name, array in params.items()}
    data = open_run_data(CONFIG, images=False)
    files = {
        "config.yaml": CONFIG.to_yaml(),
        "norm_stats.json": json.dumps(data.pipeline.stats.to_dict()),
        "tokenizer.model": data.pipeline.tokenizer.model,
    }
    with open_run(folder, "new") as run, Checkpointer(run, SPEC) as checkpointer:
        checkpointer.save(TrainState(7, 7, params, moments, moments, None), files)
    return folder


def call(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *arguments: str) -> tuple[list[dict], list[FakeStage]]:
    """The JSON lines of a command, and the stages that it opened."""
    FakeStage.opened = []
    monkeypatch.setattr(script, "Stage", FakeStage)
    monkeypatch.setattr(script, "prepare_renderer", lambda: None)
    monkeypatch.setattr(script.sys, "argv", ["eval_metaworld.py", *arguments])
    script.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()], FakeStage.opened


def test_both_backends_act_alike_and_untrained_weights_are_those_that_a_run_begins_with(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    options = ("--device", "cpu", "--episodes", "2", "--max-steps", "6", "--size", str(SIZE), "--seed", "5", "--untrained")
    run = save_run(tmp_path / "run", seed=1)
    lines, (stage,) = call(script, monkeypatch, capsys, str(run), "--backend", "torch", "--task", TASK, *options, "--compare")
    assert [(line["task"], line["weights"], line["backend"], line["step"], line["seed"]) for line in lines] == [
        (TASK, weights, "torch", 7, 5) for weights in ("trained", "untrained")
    ]
    assert (stage.task, stage.seed, stage.size, stage.starts) == (TASK, 5, SIZE, [0, 1, 0, 1])
    for line in lines:
        assert line["chunks_compared"] >= 2 and 0 < line["largest_difference"] < 1e-4, "two frameworks differ by rounding, and by no more"
    trained, untrained = stage.actions[0], stage.actions[[0, *np.cumsum([steps or 6 for line in lines for steps in line["steps_until_solved"]])][2]]
    assert np.abs(trained - untrained).max() > 1e-3
    fresh = save_run(tmp_path / "fresh", seed=CONFIG.seed)  # what was called untrained above is the policy of this one
    policy = load_policy(fresh, backend="torch", device="cpu", seed=5)
    stage.start(0)
    chunk = policy.infer({"images": script.look(stage), "state": np.float32([0, 0.6, 0.2, 1]), "prompt": script.TASKS[TASK]}, index=0)
    np.testing.assert_allclose(untrained, np.clip(chunk[0], -1, 1), atol=1e-6)


def test_the_video_is_of_the_first_task_only(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    run, written = save_run(tmp_path / "run", seed=1), []
    monkeypatch.setattr(script, "write_video", lambda path, frames, fps: written.append((path.name, len(frames), fps)))
    tasks = ("reach-v3", "door-open-v3")
    options = ("--backend", "torch", "--device", "cpu", "--episodes", "1", "--max-steps", "3", "--size", "32", "--video", "first.gif")
    lines, stages = call(script, monkeypatch, capsys, str(run), "--task", *tasks, *options)
    assert [line["task"] for line in lines] == [stage.task for stage in stages] == list(tasks)
    assert len(written) == 1 and written[0][0] == "first.gif" and written[0][2] == FakeStage.fps
    assert len(stages[0].rendered) > len(stages[1].rendered) == 2


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--task", "pick-place"], "Did you mean 'pick-place-v3'"),
        (["--episodes", "51"], "50 goals a seed"),
        (["--episodes", "0"], "50 goals a seed"),
        (["--max-steps", "501"], "ends an episode after 500"),
        (["--size", "16"], "from 32 to"),
        (["--seed", "-1"], "0 or more"),
        (["--video", "film.avi"], "must end in .mp4 or .gif"),
        (["--replan", "9"], "--replan is 9; the checkpoint's action chunks have 8 steps"),
        (["--replan", "0"], "Give 1 to 8"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_is_simulated(
    script: ModuleType, arguments: list[str], answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run = save_run(tmp_path / "run", seed=1) if "--replan" in arguments else tmp_path
    with pytest.raises(SystemExit, match=answer):
        call(script, monkeypatch, capsys, str(run), "--backend", "torch", "--device", "cpu", *arguments)
    assert not FakeStage.opened


def test_a_checkpoint_of_another_robot_is_refused(script: ModuleType) -> None:
    arm = CONFIG.data.load_robot()
    renamed = arm.replace(name="my_arm", actions=tuple(dataclasses.replace(dim, name=f"my_{dim.name}") for dim in arm.actions))
    for robot, answer in ((arm, None), (renamed, r"robot 'my_arm' with the actions my_dx.*evaluate one of robot: metaworld")):
        policy = types.SimpleNamespace(pipeline=types.SimpleNamespace(robot=robot), config=CONFIG)
        if answer is None:
            script.check_policy(policy, 4)
        else:
            with pytest.raises(script.DataError, match=answer):
                script.check_policy(policy, 4)
