"""Small healthy recordings of an arm, and faults to plant into them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from pi05.data.dataset import find_dataset
from pi05.data.doctor import UNLIMITED
from pi05.data.examination import Part, Report, Subject
from pi05.data.tokenizer import load_tokenizer
from pi05.robots import Dim, Robot
from tests.data import recordings
from tests.data.recordings import CAMERAS, picture

REPOSITORY = Path(__file__).resolve().parents[2]
TOKENIZER = REPOSITORY / "data/tokenizer/tiny.model"
LENGTHS = (15, 16, 14)
JOINTS = tuple(Dim(f"joint_{i}", "rad", -3, 3, "joint") for i in range(5))
ROBOT = Robot(
    name="arm",
    cameras={"base_0_rgb": CAMERAS[0], "left_wrist_0_rgb": CAMERAS[1]},
    state=JOINTS,
    actions=JOINTS[:4],
    fps=10,
    delta_kinds=("joint",),
)
STEPS = ROBOT.replace(actions=tuple(dataclasses.replace(dim, kind="displacement") for dim in JOINTS[:4]), delta_kinds=())


def motion(episode: int, frames: int) -> tuple[np.ndarray, np.ndarray]:
    """State [n, 5] and the targets that lead to it, [n, 4]: what a healthy arm does."""
    time = np.arange(frames + 1)[:, None]
    path = np.sin(0.35 * time + episode + 1.7 * np.arange(5)).astype(np.float32)
    return path[:-1], path[1:, :4]


def write(root: Path, *, video: bool = False, lengths: tuple[int, ...] = LENGTHS) -> Path:
    """A healthy dataset."""
    recordings.write_by_hand(root, video=video, lengths=lengths)
    for episode, length in enumerate(lengths):
        state, actions = motion(episode, length)
        change(root, episode, lambda _, s=state, a=actions, n=length: {"observation.state": s, "action": a, "timestamp": np.arange(n) / 10})
    return root


def change(root: Path, episode: int, new: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> None:
    """Replaces columns of an episode by what `new` makes of its state, action and timestamp."""
    path = root / f"data/chunk-000/episode_{episode:06d}.parquet"
    table = pyarrow.parquet.read_table(path)
    old = {name: np.array(table[name].to_pylist()) for name in ("observation.state", "action", "timestamp") if name in table.column_names}
    for name, values in new(old).items():
        column = pa.array(list(values), pa.list_(pa.float32()) if values.ndim == 2 else pa.float32() if name == "timestamp" else None)
        table = table.set_column(table.column_names.index(name), name, column) if name in table.column_names else table.append_column(name, column)
    pyarrow.parquet.write_table(table, path)


def everywhere(new: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        for episode in range(len(LENGTHS)):
            change(root, episode, new)

    return plant


def put(column: str, rows: Any, dims: Any, value: Any, episodes: tuple[int, ...] = (0, 1, 2)) -> Callable[[Path], None]:
    """Plants `value` into column[rows, dims] of some episodes."""

    def new(old: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        values = old[column].copy()
        values[rows, dims] = value
        return {column: values}

    def plant(root: Path) -> None:
        for episode in episodes:
            change(root, episode, new)

    return plant


def shift_time(episode: int, frame: int, seconds: float) -> Callable[[Path], None]:
    """Plants time stamps that are late from a frame on."""

    def late(old: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"timestamp": old["timestamp"] + seconds * (np.arange(len(old["timestamp"])) >= frame)}

    return lambda root: change(root, episode, late)


def images(new: Callable[[np.ndarray], np.ndarray], *, camera: int = 0, episodes: tuple[int, ...] = (0, 1, 2)) -> Callable[[Path], None]:
    """Plants what `new` makes of the images of a camera."""

    def plant(root: Path) -> None:
        for episode in episodes:
            path = root / f"data/chunk-000/episode_{episode:06d}.parquet"
            table = pyarrow.parquet.read_table(path)
            shots = [recordings.png(new(picture(episode, frame, camera))) for frame in range(len(table))]
            pyarrow.parquet.write_table(table.set_column(table.column_names.index(CAMERAS[camera]), CAMERAS[camera], pa.array(shots)), path)

    return plant


def tasks(*texts: str) -> Callable[[Path], None]:
    return lambda root: recordings.write_lines(root / "meta/tasks.jsonl", [{"task_index": i, "task": text} for i, text in enumerate(texts)])


def both(*plants: Callable[[Path], None]) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        for one in plants:
            one(root)

    return plant


def subject(root: Path, **changes: Any) -> Subject:
    options: dict[str, Any] = {"robot": ROBOT, "action_horizon": 8, "tokenizer": load_tokenizer(TOKENIZER, max_token_len=UNLIMITED), "max_token_len": 72}
    return Subject(**{"parts": (Part(find_dataset(root)),)} | options | changes)


def said(report: Report) -> set[tuple[str, str]]:
    return {(finding.level, finding.check) for finding in report.findings}


def texts(report: Report) -> str:
    return "\n".join(f"{finding.where}: {finding.text}" for finding in report.findings)
