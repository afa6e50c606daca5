"""Statistics of a dataset: its numbers as the model sees them, read from the tables and measured exactly.

Quantiles are found by the bits of float32, which sort like integers (radix selection): a first pass counts the upper 16 bits of every value, a
second one the lower 16 of those that share them with the wanted rank. So they are exact for data of any size, in any order and any blocks; memory
is 65536 counters a dim and pass. The statistics of a mixture are those of its parts read one after the other; finished ones cannot be merged,
since quantiles of quantiles are none.

Axes: A (spec.py); S, D: dims of the robot's state and action; n: any number of rows.
Dtypes: the values are the float32 numbers that the model sees; moments are summed in float64.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from pi05.batch import PaddedSteps
from pi05.data.folder import Folder, number_matrix, read_folder
from pi05.data.norm_stats import FieldStats, NormStats
from pi05.data.transforms import check_finite
from pi05.errors import DataError
from pi05.robots.base import Robot

Blocks = Callable[[], Iterable[Mapping[str, np.ndarray]]]

PERCENTS = (1, 99)
HALF = 1 << 16  # counters for 16 of the 32 bits
BLOCK_VALUES = 1 << 16  # of each dim in a block of action chunks: small enough for a cache, large enough to outweigh adding HALF counters

Excluded = Sequence[int] | Sequence[Sequence[int]]


def measure(blocks: Blocks) -> dict[str, FieldStats]:
    """Returns the statistics of each field over all rows of all blocks; every dim for itself.

    blocks: called twice; yields mappings from field to float32[n, D], finite, in the same order or another.

    Raises:
        DataError: there is no row, or the second call yielded other values than the first.
    """
    counts: dict[str, _Counts] = {}
    for key, columns in _columns(blocks):
        counts.setdefault(key, _Counts(len(columns))).add(columns)
    if not counts:
        raise DataError("There are no numbers to take statistics of. Check the dataset and the excluded episodes.")
    ranks = {key: _Ranks(count) for key, count in counts.items()}
    for key, columns in _columns(blocks):
        ranks[key].add(columns)
    return {key: counts[key].finish(ranks[key].finish()) for key in counts}


def compute_norm_stats(
    dataset_root: Path | Sequence[Path],
    robot: Robot,
    *,
    action_horizon: int,
    padded_steps: PaddedSteps = "ignore",
    exclude: Excluded = (),
) -> NormStats:
    """Computes the statistics of a LeRobot dataset, or of several as one, as `robot` shows it to the model.

    Reads only the state, action and episode columns of the tables: no image, no video, no accelerator.
    State counts once a frame; actions as the chunk of `action_horizon` steps of each frame, deltas applied.
    padded_steps: of chunks, behind the episode's end. "ignore", as the loss does, or "count" (the repeated last action, as openpi does).
    exclude: episode numbers to leave out of every dataset, or for each dataset its own.

    Raises:
        DataError: a folder, a table or a column is not what the robot reads, or holds a number that is not finite.
    """
    if padded_steps not in get_args(PaddedSteps):
        raise DataError(f"padded_steps is {padded_steps!r}; it is one of {', '.join(get_args(PaddedSteps))}.")
    if action_horizon < 1:
        raise DataError(f"action_horizon is {action_horizon}; a chunk has at least one step.")
    options = {"action_horizon": action_horizon, "padded_steps": padded_steps, "exclude": exclude}
    fields = measure(functools.partial(_chunks, _roots(dataset_root), robot, **options))
    return NormStats(fields, make_fingerprint(dataset_root, robot, **options))


def make_fingerprint(
    dataset_root: Path | Sequence[Path],
    robot: Robot,
    *,
    action_horizon: int,
    padded_steps: PaddedSteps = "ignore",
    exclude: Excluded = (),
) -> dict[str, str]:
    """Returns everything that decides what compute_norm_stats gives, as text.

    The dataset counts by its numbers, not by its files: a copy, v2.1 or v3.0, new videos or prompts change nothing, one changed value does.

    Raises:
        DataError: as compute_norm_stats.
    """
    frames, episodes = 0, 0
    digests = [hashlib.sha256() for _ in range(3)]  # one a kind of number, so that it does not matter where one file ends and the next begins
    for root, left_out in _each(_roots(dataset_root), exclude):
        for table in _tables(root, robot, left_out):
            lengths = np.diff(table.starts, append=len(table.state))
            frames, episodes = frames + len(table.state), episodes + len(lengths)
            for digest, array in zip(digests, (lengths, table.state, table.actions), strict=True):
                digest.update(np.ascontiguousarray(array).data)
    numbers = hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()[:16]
    return {
        "dataset": f"{frames} frames, {episodes} episodes, numbers {numbers}",
        "robot": robot.name,
        **{f"robot {key}": value for key, value in robot.fingerprint.items()},
        "action_horizon": str(action_horizon),
        "padded_steps": padded_steps,
    }


class _Counts:
    """The first pass over one field: moments (Chan et al. 1979), extremes, and how many values have which upper 16 bits."""

    def __init__(self, dims: int) -> None:
        self.count, self.upper = 0, np.zeros((dims, HALF), np.int64)
        self.mean, self.squares = np.zeros(dims), np.zeros(dims)  # squares: sum of squared distances from the mean
        self.min, self.max = np.full(dims, np.inf), np.full(dims, -np.inf)

    def add(self, columns: np.ndarray) -> None:
        """Counts float32[D, n], n > 0."""
        wide = columns.astype(np.float64)
        mean = wide.mean(1)
        wide -= mean[:, None]
        rows, apart = columns.shape[1], mean - self.mean
        total = self.count + rows
        self.mean = self.mean + apart * (rows / total)
        self.squares = self.squares + np.einsum("dn,dn->d", wide, wide) + apart**2 * (self.count * rows / total)
        self.count = total
        self.min, self.max = np.minimum(self.min, columns.min(1)), np.maximum(self.max, columns.max(1))
        for counters, keys in zip(self.upper, _sort_keys(columns), strict=True):
            counters += np.bincount(keys >> 16, minlength=HALF)

    def finish(self, quantiles: np.ndarray) -> FieldStats:
        return FieldStats(self.mean, np.sqrt(self.squares / self.count), *quantiles, self.min, self.max, self.count)


class _Ranks:
    """The second pass over one field: among the values with the upper 16 bits of each quantile, how many have which lower 16 bits."""

    def __init__(self, counts: _Counts) -> None:
        below = counts.upper.cumsum(1)
        ranks = [-(-counts.count * percent // 100) for percent in PERCENTS]  # exact: from 1 up to count
        self.bins = np.array([[np.searchsorted(row, rank) for row in below] for rank in ranks])
        dims = np.arange(len(below))
        self.expected = counts.upper[dims, self.bins]
        self.ranks = np.array(ranks)[:, None] - (below[dims, self.bins] - self.expected)
        self.lower = np.zeros((*self.bins.shape, HALF), np.int64)

    def add(self, columns: np.ndarray) -> None:
        """Counts float32[D, n]."""
        for dim, keys in enumerate(_sort_keys(columns)):
            upper = keys >> 16
            for quantile, wanted in enumerate(self.bins[:, dim]):
                self.lower[quantile, dim] += np.bincount(keys[upper == wanted] & (HALF - 1), minlength=HALF)

    def finish(self) -> np.ndarray:
        """Returns float64[quantile, D]."""
        if not np.array_equal(self.lower.sum(-1), self.expected):
            raise DataError("The data changed while its statistics were computed. Compute them again when nothing writes to it.")
        below = self.lower.cumsum(-1)
        lower = [[np.searchsorted(row, rank) for row, rank in zip(rows, ranks, strict=True)] for rows, ranks in zip(below, self.ranks, strict=True)]
        return _from_sort_keys((self.bins.astype(np.uint32) << np.uint32(16)) | np.array(lower, np.uint32)).astype(np.float64)


def _sort_keys(values: np.ndarray) -> np.ndarray:
    """uint32 that sort as the float32 `values` do: negative ones with all bits turned, others with the sign bit set; -0 next to 0."""
    bits = values.view(np.int32)
    return bits.view(np.uint32) ^ ((bits >> 31).view(np.uint32) | np.uint32(1 << 31))


def _from_sort_keys(keys: np.ndarray) -> np.ndarray:
    """Inverse of _sort_keys."""
    return np.where(keys >> 31, keys ^ np.uint32(1 << 31), ~keys).view(np.float32)


def _columns(blocks: Blocks) -> Iterator[tuple[str, np.ndarray]]:
    """Each field of each block that has rows, as contiguous float32[D, n]."""
    for block in blocks():
        for key, rows in block.items():
            if len(rows):
                yield key, np.ascontiguousarray(rows.T, np.float32)


@dataclasses.dataclass(frozen=True)
class _Table:
    """The frames of one Parquet file: state float32[n, S], actions float32[n, D], starts int64: first row of each episode."""

    state: np.ndarray
    actions: np.ndarray
    starts: np.ndarray


def _chunks(roots: Sequence[Path], robot: Robot, *, action_horizon: int, padded_steps: PaddedSteps, exclude: Excluded) -> Iterator[dict[str, np.ndarray]]:
    """The numbers that the model sees, block by block."""
    block = max(1, BLOCK_VALUES // action_horizon)
    for root, left_out in _each(roots, exclude):
        for table in _tables(root, robot, left_out):
            total = len(table.state)
            ends = np.repeat(np.append(table.starts[1:], total), np.diff(table.starts, append=total))
            for first in range(0, total, block):
                rows = np.arange(first, min(first + block, total))
                steps, last = rows[:, None] + np.arange(action_horizon), ends[rows, None] - 1
                actions = robot.actions_to_model(table.actions[np.minimum(steps, last)], table.state[rows])
                counted = actions[steps <= last] if padded_steps == "ignore" else actions.reshape(-1, actions.shape[-1])
                yield {"state": robot.state_to_model(table.state[rows]), "actions": counted}


def _tables(root: Path, robot: Robot, exclude: Sequence[int]) -> Iterator[_Table]:
    """The tables of a dataset with the excluded episodes left out, each checked."""
    folder = read_folder(root, root.name)
    check_numbers(folder, robot)
    folder.check_episodes(exclude)
    lengths = dict(zip(folder.episodes.numbers.tolist(), folder.episodes.lengths.tolist(), strict=True))
    for path in folder.tables:
        state, actions, numbers = _read_table(path, robot)
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        for number, length in zip(numbers[starts].tolist(), np.diff(starts, append=len(numbers)).tolist(), strict=True):
            if lengths.pop(number, None) != length:
                raise DataError(f"{path}: episode {number} has {length} frames in a row here, but not in the metadata. Copy or convert the dataset again.")
        keep = ~np.isin(numbers, exclude)
        state, actions, numbers = state[keep], actions[keep], numbers[keep]
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        for column, dims, values in ((robot.state_column, robot.state, state), (robot.action_column, robot.actions, actions)):
            if not np.isfinite(values).all():
                row = int(np.argmin(np.isfinite(values).all(1)))
                frame = row - starts[starts <= row][-1]
                where = f" of {folder.name}, episode {numbers[row]}, frame {frame} (repair it, or exclude the episode),"
                check_finite(column, values[row], tuple(dim.name for dim in dims), where)
        if len(state):
            yield _Table(state, actions, starts)
    if lengths:
        raise DataError(f"{folder.name}: episode {min(lengths)} is in the metadata, but in no table. Copy or convert the dataset again.")


def check_numbers(folder: Folder, robot: Robot) -> None:
    """Raises unless the dataset has the robot's state and action, with as many dims.

    Raises:
        DataError: names the column, what there is, and the robot's dims.
    """
    for column, dims in ((robot.state_column, robot.state), (robot.action_column, robot.actions)):
        folder.check_column(column, "number", robot.name)
        if (shape := list(folder.features[column]["shape"])) != [len(dims)]:
            raise DataError(f"{folder.name}: {column} has shape {shape}; robot {robot.name!r} has the {len(dims)} dims {', '.join(dim.name for dim in dims)}.")


def _read_table(path: Path, robot: Robot) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """State float32[n, S], action float32[n, D] and episode number int64[n] of each frame."""
    import pyarrow
    import pyarrow.parquet

    columns = [robot.state_column, robot.action_column, "episode_index"]
    try:
        table = pyarrow.parquet.read_table(path, columns=columns)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read ({error}). Copy the dataset again.") from error

    state, actions = (number_matrix(table, column, len(dims)) for column, dims in zip(columns[:2], (robot.state, robot.actions), strict=True))
    return state, actions, table["episode_index"].to_numpy()


def _roots(dataset_root: Path | Sequence[Path]) -> list[Path]:
    return [Path(dataset_root)] if isinstance(dataset_root, (str, Path)) else [Path(root) for root in dataset_root]


def _each(roots: list[Path], exclude: Excluded) -> list[tuple[Path, Sequence[int]]]:
    """Each dataset and what is left out of it."""
    own = list(exclude) if exclude and not isinstance(exclude[0], int) else [exclude] * len(roots)
    return list(zip(roots, own, strict=True))
