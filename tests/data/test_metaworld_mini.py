"""The bundled dataset is what data/README.md says, and what a policy can learn from; its recorder says no in time. Files only, without LeRobot."""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import av
import numpy as np
import pyarrow.parquet
import pytest

from pi05.robots.metaworld import ROBOT

ROOT = Path(__file__).resolve().parents[2]
DATASET = ROOT / "data/metaworld_mini"
RECORDER = ROOT / "scripts/record_metaworld.py"
CAMERAS = ("observation.images.corner2", "observation.images.gripperPOV")
EPISODES_PER_TASK = 6
FPS = 80
EDGE = 128
MAX_BYTES = 4_000_000

Row = dict[str, object]


@pytest.fixture(scope="module")
def episodes() -> list[Row]:
    return pyarrow.parquet.read_table(DATASET / "meta/episodes").to_pylist()


@pytest.fixture(scope="module")
def rows() -> dict[str, np.ndarray]:
    table = pyarrow.parquet.read_table(DATASET / "data")
    return {name: np.array(table[name].to_pylist()) for name in table.column_names}


@pytest.fixture(scope="module")
def frames() -> dict[str, np.ndarray]:
    """All frames of each camera in the order of the rows, uint8[T, Y, X, 3]."""
    return {camera: np.stack([frame.to_ndarray(format="rgb24") for frame in decode(camera)]) for camera in CAMERAS}


@pytest.fixture
def recorder() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("record_metaworld", RECORDER)
    module = importlib.util.module_from_spec(spec)
    sys.modules["record_metaworld"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["record_metaworld"]


def decode(camera: str) -> Iterator[av.VideoFrame]:
    (path,) = (DATASET / "videos" / camera).rglob("*.mp4")
    with av.open(str(path)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        yield from container.decode(video=0)


def info() -> dict:
    return json.loads((DATASET / "meta/info.json").read_text())


def spans(episodes: list[Row]) -> list[slice]:
    return [slice(episode["dataset_from_index"], episode["dataset_to_index"]) for episode in episodes]


def test_every_task_has_its_own_prompt_and_six_episodes(episodes: list[Row], rows: dict[str, np.ndarray]) -> None:
    prompts = pyarrow.parquet.read_table(DATASET / "meta/tasks.parquet").to_pydict()
    assert len(set(prompts["task"])) == len(prompts["task"]) == info()["total_tasks"] == 8
    assert [episode["tasks"] for episode in episodes] == [[prompt] for prompt in prompts["task"] for _ in range(EPISODES_PER_TASK)]
    for episode, span in zip(episodes, spans(episodes), strict=True):
        assert {prompts["task"][task] for task in rows["task_index"][span]} == set(episode["tasks"])


def test_an_episode_is_an_unbroken_run_of_rows_at_the_control_rate(episodes: list[Row], rows: dict[str, np.ndarray]) -> None:
    assert info()["fps"] == FPS
    np.testing.assert_array_equal(rows["index"], np.arange(info()["total_frames"]))
    for number, (episode, span) in enumerate(zip(episodes, spans(episodes), strict=True)):
        steps = np.arange(episode["length"])
        assert set(rows["episode_index"][span]) == {number}
        np.testing.assert_array_equal(rows["frame_index"][span], steps)
        np.testing.assert_allclose(rows["timestamp"][span], steps / FPS, atol=1e-6)


def test_every_number_is_finite_and_within_the_limits_of_the_robot(rows: dict[str, np.ndarray]) -> None:
    for column, dims in ((ROBOT.state_column, ROBOT.state), (ROBOT.action_column, ROBOT.actions)):
        assert info()["features"][column]["names"] == [dim.name for dim in dims]
        assert np.isfinite(rows[column]).all()
        assert (rows[column] >= [dim.low for dim in dims]).all() and (rows[column] <= [dim.high for dim in dims]).all()


def test_the_hand_goes_where_the_action_of_its_row_sends_it(episodes: list[Row], rows: dict[str, np.ndarray]) -> None:
    """It lags a few steps behind the command, so an action explains the motion that follows it better than the motion before."""
    lag = 3
    before, after, commands = [], [], []
    for span in spans(episodes):
        velocity = np.diff(rows["observation.state"][span, :3], axis=0)
        before.append(velocity[: -2 * lag])
        commands.append(rows["action"][span, :3][lag:-1][:-lag])
        after.append(velocity[2 * lag :])
    before, after, commands = (np.concatenate(parts) for parts in (before, after, commands))
    for axis in range(3):
        follows, precedes = (np.corrcoef(commands[:, axis], motion[:, axis])[0, 1] for motion in (after, before))
        assert follows > 0.9 and follows > precedes + 0.05


def test_each_video_holds_one_frame_a_row_at_the_control_rate(episodes: list[Row], frames: dict[str, np.ndarray]) -> None:
    assert tuple(ROBOT.cameras.values()) == CAMERAS
    for camera in CAMERAS:
        assert frames[camera].shape == (sum(episode["length"] for episode in episodes), EDGE, EDGE, 3)
        numbers = [frame.time * FPS for frame in decode(camera)]
        np.testing.assert_allclose(np.array(numbers) - numbers[0], np.arange(len(numbers)), atol=1e-3)
        starts = [episode[f"videos/{camera}/from_timestamp"] * FPS for episode in episodes]
        np.testing.assert_allclose(starts, [span.start for span in spans(episodes)], atol=1e-3)


def test_both_cameras_show_something_that_moves_and_not_the_same(episodes: list[Row], frames: dict[str, np.ndarray]) -> None:
    for span in spans(episodes):
        for number in (span.start, span.stop - 1):
            corner, gripper = (frames[camera][number].astype(float) for camera in CAMERAS)
            assert min(corner.mean(), gripper.mean()) > 40 and min(corner.std(), gripper.std()) > 20
            assert np.abs(corner - gripper).mean() > 20
        for camera in CAMERAS:
            assert np.abs(frames[camera][span.start].astype(float) - frames[camera][span.stop - 1]).mean() > 5


def test_corner2_is_upright(episodes: list[Row], frames: dict[str, np.ndarray]) -> None:
    """At the start the right half shows the gray background above and the brown table below."""
    for span in spans(episodes):
        above, below = (frames[CAMERAS[0]][span.start, rows, EDGE // 2 :].astype(float) for rows in (slice(0, 8), slice(-8, None)))
        brown_above, brown_below = ((part[..., 0] - part[..., 2]).mean() for part in (above, below))
        assert brown_above < 15 and brown_below > 35


def test_the_dataset_stays_small() -> None:
    assert sum(path.stat().st_size for path in DATASET.rglob("*") if path.is_file()) < MAX_BYTES


def test_the_readme_counts_the_episodes_and_frames_that_are_there(episodes: list[Row]) -> None:
    told = re.findall(r"^\| `([\w-]+)` \| (.+?) \| (\d+) \| (\d+) \|$", (ROOT / "data/README.md").read_text(), re.MULTILINE)
    there: dict[str, list[int]] = {}
    for episode in episodes:
        there.setdefault(episode["tasks"][0], []).append(episode["length"])
    assert [(prompt, int(count), int(total)) for _, prompt, count, total in told] == [(prompt, len(steps), sum(steps)) for prompt, steps in there.items()]


def test_the_recorder_has_the_prompts_of_the_dataset(recorder: ModuleType) -> None:
    assert list(recorder.TASKS.values()) == pyarrow.parquet.read_table(DATASET / "meta/tasks.parquet")["task"].to_pylist()


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["--out", str(DATASET)], "metaworld_mini exists"),
        (["--tasks", "pick-place"], "Did you mean 'pick-place-v3'"),
        (["--tasks", "push-v3", "push-v3"], "names a task twice"),
        (["--episodes-per-task", "51"], "50 goals a seed"),
        (["--size", "129"], "even number of pixels"),
        (["--seed", "-1"], "0 or more"),
        ([], "uv sync --extra sim"),
    ],
)
def test_the_recorder_refuses_before_it_records(
    recorder: ModuleType, arguments: list[str], answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "metaworld", None)  # not installed, wherever this runs
    monkeypatch.setenv("MUJOCO_GL", "egl")  # no look for OSMesa
    monkeypatch.setattr(sys, "argv", ["record_metaworld.py", "--out", str(tmp_path / "new"), *arguments])
    with pytest.raises(SystemExit, match=answer):
        recorder.main()
    assert not list(tmp_path.iterdir())
