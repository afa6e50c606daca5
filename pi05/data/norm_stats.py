"""Statistics that numbers are normalised with: what they are, how they are kept, and what they may be used for (measure.py computes them).

Axes: D: dims of the robot's state or action.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pi05.data.transforms import FLOOR, normalise, range_floors, suggest
from pi05.errors import DataError

if TYPE_CHECKING:
    from pi05.robots.base import Dim, Robot

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True, eq=False)
class FieldStats:
    """Statistics of one field, each float64[D]; NaN where a foreign file does not have them.

    std: of the population. q01, q99: the smallest value that at least 1 % (99 %) of all values do not exceed. count: rows, 0 if unknown.
    """

    mean: np.ndarray
    std: np.ndarray
    q01: np.ndarray
    q99: np.ndarray
    min: np.ndarray
    max: np.ndarray
    count: int

    def near_constant(self, dims: Sequence["Dim"], share: float = FLOOR) -> np.ndarray:
        """Returns bool[D], the dims whose q99 - q01 is below `share` of the range that their Dim declares: normalising would blow up noise."""
        return (self.q99 - self.q01)[: len(dims)] < range_floors(dims, "quantile", share)

    def farthest(self, dims: Sequence["Dim"]) -> np.ndarray:
        """Returns float64[D], the largest |value| of each dim after quantile normalisation with the default floor; a Pipeline refuses those beyond LIMIT."""
        floors = range_floors(dims, "quantile")
        return np.max([np.abs(normalise(values[: len(dims)], self, "quantile", floors)) for values in (self.min, self.max)], axis=0)


ARRAYS = tuple(field.name for field in dataclasses.fields(FieldStats) if field.name != "count")


@dataclasses.dataclass(frozen=True, eq=False)
class NormStats:
    """Statistics of "state" and "actions", and what they are statistics of (measure.make_fingerprint)."""

    fields: dict[str, FieldStats]
    fingerprint: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which openpi reads too."""
        fields = {key: {name: _to_json(getattr(stats, name)) for name in ARRAYS} | {"count": stats.count} for key, stats in self.fields.items()}
        return {"format_version": FORMAT_VERSION, "fingerprint": self.fingerprint, "norm_stats": fields}

    def save(self, path: Path) -> None:
        """Writes `to_dict` as JSON (save_json)."""
        save_json(path, self.to_dict())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads what `save` wrote.

        Raises:
            DataError: the file is missing, of a later release, or not ours.
        """
        content = read_json(path, "Compute it: python scripts/compute_norm_stats.py")
        if content.get("format_version") != FORMAT_VERSION:
            raise DataError(
                f"{path} has the format version {content.get('format_version')}, this release reads {FORMAT_VERSION}. "
                "Compute the statistics again, or read a file of openpi's with load_openpi."
            )
        return cls(_fields(content, path), content["fingerprint"])

    def check_fingerprint(self, expected: Mapping[str, str]) -> None:
        """Raises unless the statistics are what `expected` (measure.make_fingerprint) says.

        Raises:
            DataError: lists the differing entries with both values.
        """
        check_fingerprint("The statistics", self.fingerprint, expected, "Compute them again: python scripts/compute_norm_stats.py")


def check_fingerprint(what: str, saved: Mapping[str, str], expected: Mapping[str, str], cure: str) -> None:
    """Raises unless `saved`, the fingerprint of `what` (a plural, as in "The statistics"), is the one `expected`.

    Raises:
        DataError: lists the differing entries with both values, then the `cure`.
    """
    differing = [
        f"  {key}: {what[0].lower()}{what[1:]} have {saved.get(key, 'nothing')!r}, this run has {expected.get(key, 'nothing')!r}"
        for key in dict.fromkeys([*expected, *saved])
        if expected.get(key) != saved.get(key)
    ]
    if differing:
        raise DataError("\n".join([f"{what} were made for something else:", *differing, cure]))


def asset_folder(dataset_roots: Sequence[Path], robot: str) -> Path:
    """Where statistics and token lengths of a dataset, or of several as one, are kept: assets/<dataset>-<robot> beside the (first) dataset."""
    roots = [Path(root).resolve() for root in dataset_roots]
    return roots[0].parent / "assets" / f"{'+'.join(root.name for root in roots)}-{robot}"


def save_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON under another name first: a reader never sees half a file."""
    text = json.dumps(content, indent=2, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_openpi(path: Path) -> NormStats:
    """Reads a norm_stats.json of openpi's; its fingerprint says only where it is from.

    Raises:
        DataError: the file is missing or not openpi's.
    """
    return NormStats(_fields(read_json(path, "openpi keeps it in the checkpoint's folder, under assets/<asset id>."), path), {"source": "openpi"})


def from_lerobot_stats(path: Path, robot: "Robot") -> NormStats:
    """Reads LeRobot's meta/stats.json: per frame, of the dataset's own numbers; quantiles are NaN where an older LeRobot left them out.

    Raises:
        DataError: the file is missing or lacks a column, or the model sees other numbers of this robot than the dataset has.
    """
    if robot.delta_mask.any() or robot.fingerprint["conversion"] != "Robot":
        raise DataError(
            f"{path} is about the dataset's own numbers, but the model sees those of robot {robot.name!r} converted or relative to the state. "
            "Compute statistics of what it sees: python scripts/compute_norm_stats.py"
        )
    content = read_json(path, "Compute statistics instead: python scripts/compute_norm_stats.py")
    columns = {"state": robot.state_column, "actions": robot.action_column}
    if missing := [column for column in columns.values() if column not in content]:
        raise DataError(f"{path} has no statistics of {missing[0]!r}. {suggest(missing[0], content)}")
    fields = {key: content[column] | {"count": int(np.max(content[column].get("count", 0)))} for key, column in columns.items()}
    return NormStats(_fields({"norm_stats": fields}, path), {"source": "LeRobot, per frame"})


def read_json(path: Path, cure: str) -> dict[str, Any]:
    """Returns what a file that pi05 or another library made holds.

    Raises:
        DataError: it is missing or no JSON; ends in the `cure`.
    """
    if not Path(path).is_file():
        raise DataError(f"There is no file {path}. {cure}")
    try:
        return json.loads(Path(path).read_text())
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error}). {cure}") from error


def _fields(content: Mapping[str, Any], path: Path) -> dict[str, FieldStats]:
    """The fields of a file's "norm_stats"; what it lacks is NaN, except mean and std."""
    fields = {}
    for key, values in content.get("norm_stats", {}).items():
        try:
            size = len(values["mean"])
            arrays = {name: np.array(values[name] if name in ("mean", "std") else values.get(name) or [None] * size, np.float64) for name in ARRAYS}
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: the statistics of {key!r} are damaged ({type(error).__name__}: {error}). Compute them again.") from error
        if wrong := [name for name, array in arrays.items() if array.shape != (size,)]:
            raise DataError(f"{path}: {wrong[0]} of {key!r} has shape {arrays[wrong[0]].shape}, its mean ({size},). Compute the statistics again.")
        fields[key] = FieldStats(**arrays, count=int(values.get("count", 0)))
    if not fields:
        raise DataError(f'{path} holds no statistics: it has no "norm_stats". Compute them: python scripts/compute_norm_stats.py')
    return fields


def _to_json(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
