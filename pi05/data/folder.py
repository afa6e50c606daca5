"""What a LeRobot dataset folder says about itself: rate, columns, tasks, and where each episode's rows and frames lie.

Formats v3.0 (many episodes a file) and v2.0/v2.1 (one a file). Only numbers that count are used: an episode's first frame in its video
file is a sum of whole frames, so the running float sums in `from_timestamp` cannot drift onto a neighbour.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pi05.data.transforms import suggest
from pi05.errors import DataError

Kind = Literal["camera", "number", "text"]

VERSIONS = ("v2.0", "v2.1", "v3.0")
INDEX_COLUMNS = ("index", "episode_index", "task_index")
BOOKKEEPING = (*INDEX_COLUMNS, "frame_index", "timestamp")
DTYPES: dict[Kind, tuple[str, ...]] = {"camera": ("video", "image"), "number": ("float32", "float64", "int32", "int64"), "text": ("string",)}


@dataclasses.dataclass(frozen=True)
class Episodes:
    """Episodes in the order of their rows.

    numbers, lengths, first_rows: int64[E]: LeRobot's episode_index, frames, and first row in the table.
    videos: column -> the file of each episode. first_frames: column -> int64[E], number of the episode's first frame in that file.
    """

    numbers: np.ndarray
    lengths: np.ndarray
    first_rows: np.ndarray
    videos: dict[str, tuple[Path, ...]]
    first_frames: dict[str, np.ndarray]

    def select(self, chosen: np.ndarray) -> "Episodes":
        """The episodes at positions `chosen` (int64)."""
        return Episodes(
            numbers=self.numbers[chosen],
            lengths=self.lengths[chosen],
            first_rows=self.first_rows[chosen],
            videos={column: tuple(files[i] for i in chosen) for column, files in self.videos.items()},
            first_frames={column: first[chosen] for column, first in self.first_frames.items()},
        )


@dataclasses.dataclass(frozen=True)
class Folder:
    """A dataset folder.

    name: for messages. fps: frames per second. features: LeRobot's description of each column (dtype, shape, names).
    tasks: prompt by task_index. tables: the Parquet files in row order.
    """

    root: Path
    name: str
    fps: float
    features: dict[str, dict[str, Any]]
    tasks: dict[int, str]
    tables: tuple[Path, ...]
    episodes: Episodes

    def columns(self, kind: Kind) -> list[str]:
        """The columns of a kind, LeRobot's own bookkeeping left out."""
        return [name for name, feature in self.features.items() if feature["dtype"] in DTYPES[kind] and name not in BOOKKEEPING]

    def check_column(self, column: str, kind: Kind, robot: str) -> None:
        """Raises unless `column`, which the robot called `robot` reads, can be used as that kind.

        Raises:
            DataError: there is none, with those there are and the nearest of them; a number that is no vector; a camera of depths.
        """
        have = self.columns(kind)
        if column not in have:
            cure = "Name the right column in the robot's description."
            raise DataError(f"{self.name} has no {kind} column {column!r} that robot {robot!r} reads. {suggest(column, have)} {cure}")
        feature = self.features[column]
        if kind == "number" and len(feature["shape"]) != 1:
            raise DataError(f"{self.name}: column {column!r} has shape {feature['shape']}; state and action must be vectors.")
        info = feature.get("info") or {}
        if info.get("is_depth_map") or info.get("video.is_depth_map"):
            raise DataError(f"{self.name}: column {column!r} is a depth map; the model's cameras are colour images.")

    def check_episodes(self, wanted: Iterable[int]) -> None:
        """Raises unless there is an episode of every number in `wanted`.

        Raises:
            DataError: names the first there is not.
        """
        numbers = self.episodes.numbers
        if unknown := sorted(set(wanted) - set(numbers.tolist())):
            raise DataError(f"{self.name} has no episode {unknown[0]}; it has {len(numbers)}, numbered {numbers.min()} to {numbers.max()}.")


def read_folder(root: Path, name: str) -> Folder:
    """Reads the metadata of the dataset at `root`, called `name` in messages; opens neither tables nor videos.

    Raises:
        DataError: not a dataset, a format this release does not read, or metadata that contradicts itself.
    """
    path = root / "meta/info.json"
    if not path.is_file():
        raise DataError(f"{root} is not a LeRobot dataset: it has no meta/info.json. Give the folder that holds meta/, data/ and videos/.")
    info = json.loads(path.read_text())
    version = info.get("codebase_version")
    if version not in VERSIONS:
        raise DataError(
            f"{root} has the format {version!r}; this release reads {', '.join(VERSIONS)}. LeRobot converts step by step, for example: "
            f"python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=local/{root.name} --root={root} --push-to-hub=false"
        )
    try:
        folder = _read_v3(root, name, info) if version == "v3.0" else _read_v2(root, name, info)
    except (KeyError, FileNotFoundError) as error:
        raise DataError(f"{root}: the metadata of this {version} dataset lacks {error}. Copy the meta folder again.") from error
    if int(folder.episodes.lengths.sum()) != info["total_frames"]:
        raise DataError(f"{root}: meta/info.json promises {info['total_frames']} frames, its episodes have {folder.episodes.lengths.sum()}.")
    return folder


def number_matrix(table: Any, column: str, dims: int) -> np.ndarray:
    """A number column of a pyarrow table as float32[rows, dims]."""
    values = table[column].combine_chunks()
    if values.type.num_fields:  # a list a row, not a number a row
        values = values.flatten()
    return values.to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(table), dims)


def _read_v3(root: Path, name: str, info: dict[str, Any]) -> Folder:
    import pyarrow.parquet

    videos = _video_columns(info)
    wanted = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    wanted += [f"videos/{column}/{field}" for column in videos for field in ("chunk_index", "file_index", "from_timestamp")]
    rows: list[dict[str, Any]] = []
    for path in sorted((root / "meta/episodes").glob("*/*.parquet")):
        rows += pyarrow.parquet.read_table(path, columns=wanted).to_pylist()
    if not rows:
        raise FileNotFoundError("meta/episodes")
    rows.sort(key=lambda row: row["episode_index"])
    lengths = _integers(rows, "length")
    files: dict[str, tuple[Path, ...]] = {}
    first_frames: dict[str, np.ndarray] = {}
    for column in videos:
        prefix = f"videos/{column}/"
        files[column] = tuple(
            root / info["video_path"].format(video_key=column, chunk_index=row[prefix + "chunk_index"], file_index=row[prefix + "file_index"]) for row in rows
        )
        starts = np.array([row[prefix + "from_timestamp"] for row in rows], np.float64) * info["fps"]
        first_frames[column] = _first_frames(files[column], starts, lengths)
    tables = (root / info["data_path"].format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"]) for row in rows)
    tasks = pyarrow.parquet.read_table(root / "meta/tasks.parquet").to_pydict()
    names = tasks.get("task") or tasks["__index_level_0__"]
    return Folder(
        root=root,
        name=name,
        fps=float(info["fps"]),
        features=info["features"],
        tasks=dict(zip(tasks["task_index"], names, strict=True)),
        tables=tuple(dict.fromkeys(tables)),
        episodes=_episodes(rows, lengths, files, first_frames),
    )


def _read_v2(root: Path, name: str, info: dict[str, Any]) -> Folder:
    rows = sorted(_json_lines(root / "meta/episodes.jsonl"), key=lambda row: row["episode_index"])
    lengths = _integers(rows, "length")

    def paths(pattern: str, **parts: str) -> tuple[Path, ...]:
        numbers = [row["episode_index"] for row in rows]
        return tuple(root / pattern.format(episode_chunk=number // info["chunks_size"], episode_index=number, **parts) for number in numbers)

    files = {column: paths(info["video_path"], video_key=column) for column in _video_columns(info)}
    return Folder(
        root=root,
        name=name,
        fps=float(info["fps"]),
        features=info["features"],
        tasks={row["task_index"]: row["task"] for row in _json_lines(root / "meta/tasks.jsonl")},
        tables=paths(info["data_path"]),
        episodes=_episodes(rows, lengths, files, {column: np.zeros(len(rows), np.int64) for column in files}),
    )


def _first_frames(files: tuple[Path, ...], starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """First frame of each episode in its file, int64[E], from `starts`, float64[E] in frames, which may carry a growing error.

    Each file's episodes are walked in order and only the distance between neighbours is rounded, so errors do not add up; a distance
    larger than the episode (one was deleted) is kept, a smaller one is an error.
    """
    first = np.zeros(len(files), np.int64)
    last: dict[Path, int] = {}
    for i in np.argsort(starts, kind="stable"):
        before = last.get(files[i])
        if before is None:
            first[i] = round(starts[i])
        else:
            distance = round(starts[i] - starts[before])
            if distance < lengths[before]:
                raise DataError(
                    f"{files[i]}: the episode before frame {first[before] + distance} has {lengths[before]} frames but only {distance} in the video. "
                    "The videos and meta/episodes do not belong together; convert or copy the dataset again."
                )
            first[i] = first[before] + distance
        last[files[i]] = i
    return first


def _episodes(rows: list[dict[str, Any]], lengths: np.ndarray, videos: dict[str, tuple[Path, ...]], first_frames: dict[str, np.ndarray]) -> Episodes:
    return Episodes(
        numbers=_integers(rows, "episode_index"), lengths=lengths, first_rows=np.cumsum(lengths) - lengths, videos=videos, first_frames=first_frames
    )


def _video_columns(info: dict[str, Any]) -> list[str]:
    return [column for column, feature in info["features"].items() if feature["dtype"] == "video"]


def _integers(rows: list[dict[str, Any]], key: str) -> np.ndarray:
    return np.array([row[key] for row in rows], np.int64)


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
