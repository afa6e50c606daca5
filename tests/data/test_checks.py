"""Every finding of the doctor by a planted fault, and nothing else with it."""

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from pi05.data import checks
from pi05.data.dataset import find_dataset
from pi05.data.examination import examine
from pi05.data.measure import measure
from pi05.data.recording import Recording, read_recording
from pi05.robots import Robot, load_robot
from tests.data.recordings import CAMERAS, encode, picture
from tests.data.sick_arm import JOINTS, REPOSITORY, ROBOT, STEPS, both, everywhere, images, put, said, shift_time, subject, tasks, texts, write


def stand_still(old: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """From the fourth frame on."""
    held = old["observation.state"][np.minimum(np.arange(len(old["action"])), 3)]
    return {"observation.state": held, "action": held[:, :4]}


FAULTS: dict[str, tuple[Callable[[Path], None], dict[str, Any], set[tuple[str, str]], str]] = {
    "a short horizon fits": (lambda root: None, {"action_horizon": 14}, set(), "^$"),
    "an episode shorter than the horizon": (
        lambda root: None,
        {"action_horizon": 15},
        {("warning", "episodes")},
        "episode 2: shorter than the horizon of 15 steps: no chunk of theirs is whole, 50% of their steps",
    ),
    "a frame lost": (
        shift_time(0, 5, 0.1),
        {},
        {("warning", "time")},
        "1 time stamps jump, in episode 0; first in episode 0 at frame 5, 0.2 s after the one before instead of 0.1 s",
    ),
    "another rate": (everywhere(lambda old: {"timestamp": 1.5 * old["timestamp"]}), {}, {("error", "time")}, "0.15 s apart, the rate of 10 frames/s .* 0.1 s"),
    "a number that is none": (
        put("observation.state", 3, 2, np.nan, (1,)),
        {},
        {("error", "finite")},
        r"observation.state dim 'joint_2': 1 values are not finite, in episode 1 \(first: nan\)",
    ),
    "infinity": (put("action", slice(2, 4), 0, np.inf, (2,)), {}, {("error", "finite")}, r"action dim 'joint_0': 2 values .* episode 2 \(first: inf\)"),
    "an idle episode": (put("observation.state", slice(None), slice(None), 0.5, (1,)), {}, {("warning", "idle")}, "arm: episode 1: idle, no dim"),
    "pauses": (
        everywhere(stand_still),
        {},
        {("warning", "idle")},
        r"\d\d% of the frames belong to pauses",
    ),
    "a dim that does not move": (
        put("observation.state", slice(None), 4, 0.25),
        {},
        {("warning", "motion")},
        "state dim 4 'joint_4': is constant: q99 - q01 is 0 rad",
    ),
    "a dim that hardly moves": (
        everywhere(lambda old: {"observation.state": old["observation.state"] * [1, 1, 1, 1, 1e-3]}),
        {},
        {("warning", "motion")},
        "'joint_4': hardly moves",
    ),
    "a dim that moves little": (
        everywhere(lambda old: {"observation.state": old["observation.state"] * [1, 1, 1, 1, 0.02]}),
        {},
        {("note", "motion")},
        "state dims 4 'joint_4': move within 1% of their range",
    ),
    "degrees": (
        everywhere(lambda old: {name: np.degrees(old[name]) for name in ("observation.state", "action")}),
        {},
        {("warning", "units")},
        "state dim 'joint_0'.* They look like degrees.",
    ),
    "steps for targets": (
        everywhere(lambda old: {"action": old["action"] - old["observation.state"][:, :4]}),
        {},
        {("warning", "actions")},
        "action dim 'joint_3': looks relative to the state already: it would be subtracted twice",
    ),
    "targets for steps": (lambda root: None, {"robot": STEPS}, {("warning", "actions")}, "looks like an absolute target, but .* 'displacement'"),
    "one prompt": (tasks("go", "go"), {}, {("warning", "prompts")}, "one prompt for all, 'go'"),
    "an empty prompt": (tasks("push the dot", " \n"), {}, {("error", "prompts")}, "episode 1: an empty prompt"),
    "an unknown task": (tasks("push the dot"), {}, {("error", "prompts"), ("warning", "prompts")}, "episode 1: a task that the dataset does not list"),
    "long prompts": (
        lambda root: None,
        {"max_token_len": 20},
        {("error", "tokens")},
        r"a prompt has \d+ tokens, max_token_len is 20. Set max_token_len to \d+",
    ),
    "a camera misnamed": (
        lambda root: None,
        {"robot": ROBOT.replace(cameras={"base_0_rgb": "observation.images.fronte", "left_wrist_0_rgb": CAMERAS[1]})},
        {("error", "cameras"), ("note", "cameras")},
        "Did you mean 'observation.images.front'.* cameras: {base_0_rgb: null}",
    ),
    "a camera unused": (
        lambda root: None,
        {"robot": ROBOT.replace(cameras={"base_0_rgb": CAMERAS[0]})},
        {("note", "cameras")},
        "observation.images.wrist: cameras of the dataset that robot 'arm' does not read",
    ),
    "no camera": (lambda root: None, {"robot": ROBOT.replace(cameras={})}, {("warning", "cameras"), ("note", "cameras")}, "has no camera"),
    "a black camera": (images(np.zeros_like), {}, {("error", "cameras")}, "9 of 9 images that were looked at are black, in episodes 0, 1, 2"),
    "black at times": (images(np.zeros_like, episodes=(1,)), {}, {("warning", "cameras")}, "3 of 9 images that were looked at are black, in episode 1"),
    "a covered camera": (images(lambda image: np.full_like(image, 90)), {}, {("error", "cameras")}, "show one colour"),
    "a frozen camera": (
        images(lambda image: picture(0, 3, 0), episodes=(2,)),
        {},
        {("warning", "cameras")},
        "1 of 3 episodes that were looked at show one still picture, in episode 2",
    ),
    "another size": (images(lambda image: image[:32]), {}, {("warning", "cameras")}, r"32 x 64 pixels .* promises \(64, 64, 3\)"),
    "one camera twice": (
        both(images(lambda image: image // 2), images(lambda image: np.where(image == 255, 127, (image - 10) // 2).astype(np.uint8), camera=1)),
        {},
        {("warning", "cameras")},
        "front and observation.images.wrist: show the same pictures",
    ),
    "another control rate": (lambda root: None, {"robot": ROBOT.replace(fps=15)}, {("error", "rate")}, "arm has 10 frames/s, expected 15"),
    "another number of dims": (
        lambda root: None,
        {"robot": ROBOT.replace(actions=JOINTS)},
        {("error", "columns")},
        r"action has shape \[4\]; robot 'arm' has the 5 dims",
    ),
    "tables and metadata apart": (
        lambda root: pyarrow.parquet.write_table(
            pyarrow.parquet.read_table(root / "data/chunk-000/episode_000001.parquet").slice(1), root / "data/chunk-000/episode_000001.parquet"
        ),
        {},
        {("error", "statistics"), ("error", "cameras")},
        "episode 1 has 15 frames in a row here, but not in the metadata",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_nothing_else(fault: str, copy: Path, tmp_path: Path) -> None:
    plant, changes, expected, pattern = FAULTS[fault]
    plant(copy)
    report = examine(subject(copy, **changes), tmp_path / "out")
    assert said(report) == expected, texts(report)
    assert re.search(pattern, texts(report), re.MULTILINE), texts(report)
    levels = {level for level, _ in expected}
    assert (report.exit_code(), report.exit_code(strict=True)) == (int("error" in levels), int(bool(levels & {"error", "warning"})))
    assert (tmp_path / "out/norm_stats.json").exists() == ("error" not in levels)


def test_a_spike_that_training_would_stop_at_is_an_error() -> None:
    rows = np.sin(np.arange(300, dtype=np.float32))[:, None].repeat(4, 1)
    rows[7, 1] = 500
    (found,) = checks.check_motion("actions", measure(lambda: [{"actions": rows}])["actions"], ROBOT.actions)
    assert (found.level, found.check) == ("error", "motion")
    assert re.fullmatch(r"has outliers: -1 to 500 rad, but 98 % lie in -0.999 to 1. Normalised that is \d+; training stops beyond 50. .*", found.text)


def test_an_aborted_recording_is_named(tmp_path: Path) -> None:
    report = examine(subject(write(tmp_path / "arm", lengths=(15, 2, 14)), action_horizon=2), tmp_path / "out")
    assert "episode 1: less than 20% of the median length (14 frames)" in texts(report)


def _missing(root: Path) -> None:
    (root / f"videos/chunk-000/{CAMERAS[0]}/episode_000001.mp4").unlink()


def _short(root: Path) -> None:
    encode(root / f"videos/chunk-000/{CAMERAS[0]}/episode_000001.mp4", [picture(1, frame, 0) for frame in range(9)], 10)


def _slow(root: Path) -> None:
    encode(root / f"videos/chunk-000/{CAMERAS[0]}/episode_000001.mp4", [picture(1, frame, 0) for frame in range(16)], 5)


def _damaged(root: Path) -> None:
    path = root / f"videos/chunk-000/{CAMERAS[0]}/episode_000001.mp4"
    path.write_bytes(path.read_bytes()[:300])


@pytest.mark.parametrize(
    ("plant", "words"),
    [(_missing, "is missing"), (_short, "has 9 frames, its last episodes need more"), (_slow, "runs at 5 frames/s"), (_damaged, "cannot be opened")],
)
def test_a_video_that_is_not_what_its_episode_needs_is_one_finding(plant: Callable[[Path], None], words: str, filmed: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(filmed, tmp_path / "arm"))
    plant(root)
    report = examine(subject(root), tmp_path / "out")
    assert said(report) == {("error", "cameras")} and len(report.findings) == 1, texts(report)
    assert f"arm, {CAMERAS[0]}: episode 1: " in texts(report) and words in texts(report)


def test_an_image_that_cannot_be_decoded_is_named(copy: Path, tmp_path: Path) -> None:
    path = copy / "data/chunk-000/episode_000002.parquet"
    table = pyarrow.parquet.read_table(path)
    broken = pa.array([{"bytes": b"no image", "path": None}] * len(table))
    pyarrow.parquet.write_table(table.set_column(table.column_names.index(CAMERAS[1]), CAMERAS[1], broken), path)
    report = examine(subject(copy), tmp_path / "out")
    assert said(report) == {("error", "cameras")} and "episode 2 cannot be shown: observation.images.wrist holds an image" in texts(report)


def recording(state: np.ndarray, actions: np.ndarray, healthy: Path) -> Recording:
    count = len(state)
    zeros = np.zeros(count, np.int64)
    return Recording(find_dataset(healthy), state.astype(np.float32), actions.astype(np.float32), zeros, None, ("go",), zeros)


def test_the_guess_tells_targets_from_steps(healthy: Path) -> None:
    """user_reports 9.3."""
    rng = np.random.default_rng(0)
    steps = rng.normal(0, 0.02, (300, 4))
    path = np.cumsum(np.concatenate([np.zeros((1, 4)), steps]), 0)[:-1]
    far, near = np.c_[path + 2, np.zeros(300)], np.c_[path, np.zeros(300)]

    def guess(state: np.ndarray, actions: np.ndarray, robot: Robot = ROBOT) -> set[str]:
        return set(checks.guess_recorded(recording(state, actions, healthy), robot))

    assert guess(far, steps) == guess(near, steps) == {"relative"}
    assert guess(far, far[:, :4] + steps) == guess(near, near[:, :4] + steps) == {"absolute"}
    spoilt = far[:, :4] + steps
    spoilt[100] = 1e6
    assert guess(far, spoilt) == {"absolute"}, "one spike is no sign"
    assert guess(near, 57.3 * (path + steps)) == {"absolute"}, "in other units"
    assert guess(near, np.ones((300, 4))) == {"still"}
    assert guess(near, rng.normal(0, 0.5, (300, 4))) == {"unclear"}
    renamed = ROBOT.replace(actions=tuple(dataclasses.replace(dim, name=f"{dim.name}.pos") for dim in JOINTS[:4]), delta_kinds=())
    assert guess(near, steps, renamed) == {"unclear"}, "no state of that name, and not as many"


def test_the_guess_is_right_about_the_bundled_dataset() -> None:
    """Its actions are steps of the hand, followed with a lag, and an absolute command to the gripper that runs against the state."""
    robot = load_robot("metaworld")
    bundled = read_recording(find_dataset(REPOSITORY / "data/metaworld_mini"), robot)
    assert checks.guess_recorded(bundled, robot) == ("relative", "relative", "relative", "absolute")
