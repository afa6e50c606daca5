"""All numbers of a dataset as they were recorded, faults included: what the doctor looks at (training reads through dataset.py, which refuses).

Axes: S, D: dims of the robot's state and action; n: frames.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pi05.data.dataset import TASK_COLUMN
from pi05.data.folder import Folder, number_matrix
from pi05.data.measure import check_numbers
from pi05.errors import DataError
from pi05.robots.base import Robot

UNKNOWN = -1  # a frame whose task the dataset does not list


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """The frames of one dataset in the order of its tables, excluded episodes left out.

    state: float32[n, S]. actions: float32[n, D]. episode: int64[n], its number. time: float64[n], s, or None where the dataset has no such column.
    prompts: the distinct prompts; those of frames first. prompt: int64[n], position of each frame's, or UNKNOWN.
    """

    folder: Folder
    state: np.ndarray
    actions: np.ndarray
    episode: np.ndarray
    time: np.ndarray | None
    prompts: tuple[str, ...]
    prompt: np.ndarray

    def __len__(self) -> int:
        return len(self.episode)

    def episodes(self) -> Iterator[tuple[int, slice]]:
        """Number and rows of each unbroken run of an episode."""
        starts = np.flatnonzero(np.diff(self.episode, prepend=self.episode[:1] - 1))
        for first, end in zip(starts, [*starts[1:], len(self)], strict=True):
            yield int(self.episode[first]), slice(int(first), int(end))

    def first_prompts(self) -> dict[int, str]:
        """The prompt that each episode, by its number, begins with; unknown ones are left out."""
        return {number: self.prompts[self.prompt[rows.start]] for number, rows in self.episodes() if self.prompt[rows.start] != UNKNOWN}

    @property
    def finite(self) -> np.ndarray:
        """bool[n], the frames whose numbers are all finite."""
        return np.isfinite(self.state).all(1) & np.isfinite(self.actions).all(1)

    def pairs(self, lag: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions int64[m] of finite frames of one episode, `lag` frames apart: the earlier, the later."""
        first = np.arange(max(0, len(self) - lag))
        keep = (self.episode[first] == self.episode[first + lag]) & self.finite[first] & self.finite[first + lag]
        return first[keep], first[keep] + lag


def read_recording(folder: Folder, robot: Robot, exclude: Sequence[int] = ()) -> Recording:
    """Reads the numbers, times and prompts of every frame; no image. They stay in memory: 4 bytes a number.

    Raises:
        DataError: a table cannot be read, or a column is missing or has another number of dims.
    """
    check_numbers(folder, robot)
    folder.check_episodes(exclude)
    own_text = robot.prompt_column != TASK_COLUMN
    if own_text:
        folder.check_column(robot.prompt_column, "text", robot.name)
    optional = [robot.prompt_column if own_text else "task_index", "timestamp"]
    parts = [_read_table(path, folder, robot, optional) for path in folder.tables]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in set.intersection(*map(set, parts))}
    keep = ~np.isin(columns["episode_index"], list(exclude))
    columns = {name: values[keep] for name, values in columns.items()}
    prompts, prompt = _prompts(folder, columns.get(optional[0]), own_text, int(keep.sum()))
    time = columns.get("timestamp")
    return Recording(folder, columns["state"], columns["actions"], columns["episode_index"], time, prompts, prompt)


def _read_table(path: Path, folder: Folder, robot: Robot, optional: Sequence[str]) -> dict[str, np.ndarray]:
    import pyarrow
    import pyarrow.parquet

    try:
        have = pyarrow.parquet.read_schema(path).names
        wanted = [robot.state_column, robot.action_column, "episode_index", *(name for name in optional if name in have)]
        table = pyarrow.parquet.read_table(path, columns=wanted)
        out: dict[str, Any] = {
            key: number_matrix(table, column, len(dims))
            for key, column, dims in (("state", robot.state_column, robot.state), ("actions", robot.action_column, robot.actions))
        }
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read ({error}). Copy or convert {folder.name} again.") from error
    for name in table.column_names:
        if name not in (robot.state_column, robot.action_column):
            out[name] = table[name].to_numpy()
    if "timestamp" in out:
        out["timestamp"] = out["timestamp"].astype(np.float64)
    return out


def _prompts(folder: Folder, values: np.ndarray | None, own_text: bool, frames: int) -> tuple[tuple[str, ...], np.ndarray]:
    """The distinct prompts, and the position of each frame's."""
    if values is None:
        return (), np.full(frames, UNKNOWN)
    distinct, position = np.unique(values.astype(str) if own_text else values, return_inverse=True)
    if own_text:
        return tuple(map(str, distinct)), position
    known = [int(task) for task in distinct if int(task) in folder.tasks]
    places = np.array([known.index(int(task)) if int(task) in folder.tasks else UNKNOWN for task in distinct], np.int64)
    return tuple(folder.tasks[task] for task in known), places[position]
