"""LeRobot datasets as rows: one frame's images and state, the action chunk that starts there, the task.

Numbers come from memory-mapped tables, which all loader workers share; frames are chosen by integer index (folder.py, video.py): no time
stamp takes part, no image of a later frame is decoded, and a local folder is read without any network. LeRobot itself is not
imported: it costs seconds and loads transformers. It is the independent oracle instead: tests/data/test_dataset.py compares with it.

Axes: A, Y, X (spec.py); S, D: dims of the robot's state and action.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pi05.data.folder import INDEX_COLUMNS, Episodes, Folder, number_matrix, read_folder
from pi05.data.video import VideoReader
from pi05.errors import DataError
from pi05.robots.base import Robot

TASK_COLUMN = "task"

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns a robot reads: cameras (maybe none), state, action, and the prompt (TASK_COLUMN is LeRobot's own, by task_index)."""

    cameras: tuple[str, ...]
    state: str
    action: str
    prompt: str

    @property
    def numbers(self) -> tuple[str, str]:
        return self.state, self.action

    @property
    def texts(self) -> tuple[str, ...]:
        return () if self.prompt == TASK_COLUMN else (self.prompt,)


class Source:
    """The chosen episodes of one dataset folder; made by open_dataset."""

    def __init__(self, folder: Folder, columns: Columns, episodes: Episodes, table: Any) -> None:
        self.name, self.fps, self.tasks = folder.name, folder.fps, folder.tasks
        self.columns, self.episodes = columns, episodes
        self.dims = tuple(folder.features[column]["shape"][0] for column in columns.numbers)
        self._table, self._reader, self._ends = table, VideoReader(), np.cumsum(episodes.lengths)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """Position of the episode that holds row `index` of this source, and the frame within the episode."""
        episode = int(np.searchsorted(self._ends, index, side="right"))
        return episode, index - int(self._ends[episode] - self.episodes.lengths[episode])

    def read(self, index: int, action_horizon: int) -> Row:
        """Row `index` of this source; see Dataset."""
        episode, frame = self.locate(index)
        first = int(self.episodes.first_rows[episode]) + frame
        steps = min(action_horizon, int(self.episodes.lengths[episode]) - frame)
        table = self._table[first : first + steps]
        states, actions = (number_matrix(table, column, dims) for column, dims in zip(self.columns.numbers, self.dims, strict=True))
        state = states[0]
        for column, values in zip(self.columns.numbers, (state, actions), strict=True):
            if not np.isfinite(values).all():
                raise DataError(f"{column} is not finite here or in the action chunk. Repair the dataset or exclude the episode.")
        ids = {column: table[column][0].as_py() for column in INDEX_COLUMNS}
        texts = {column: table[column][0].as_py() for column in self.columns.texts}
        images = {column: self._image(table, column, episode, frame) for column in self.columns.cameras}
        return (
            images
            | texts
            | {
                self.columns.state: state,
                self.columns.action: np.concatenate([actions, np.repeat(actions[-1:], action_horizon - steps, axis=0)]),
                "action_is_pad": np.arange(action_horizon) >= steps,
                TASK_COLUMN: self.tasks[ids["task_index"]],
                "index": ids["index"],
                "episode_index": ids["episode_index"],
            }
        )

    def read_episode(self, position: int) -> Row:
        """All frames of the episode at `position`, without images: state float32[n, S], action float32[n, D], task list[str], index."""
        first, length = int(self.episodes.first_rows[position]), int(self.episodes.lengths[position])
        table = self._table[first : first + length]
        return {column: number_matrix(table, column, dims) for column, dims in zip(self.columns.numbers, self.dims, strict=True)} | {
            "task": [self.tasks[task] for task in table["task_index"].to_pylist()],
            "index": table["index"].to_numpy(),
            "episode_index": int(self.episodes.numbers[position]),
        }

    def _image(self, table: Any, column: str, episode: int, frame: int) -> np.ndarray:
        if column in self.episodes.videos:
            number = int(self.episodes.first_frames[column][episode]) + frame
            return self._reader.read(self.episodes.videos[column][episode], number, self.fps)
        return decode_image(table[column][0].as_py(), column)


class Dataset:
    """Rows of one or several datasets: `dataset[i]` for i in [0, len).

    A row holds, under the dataset's column names (the robot's description says which): cameras uint8[Y, X, 3]; state float32[S];
    action float32[A, D], the chunk that starts at this frame, its last action repeated behind the episode's end; prompt. And: action_is_pad
    bool[A], the repeated steps; task str; index int, LeRobot's frame index in its dataset; episode_index int; dataset_index int.

    weights: share of the samples that each source gets, or None: every row once an epoch.
    """

    def __init__(self, sources: Sequence[Source], *, action_horizon: int, weights: tuple[float, ...] | None = None) -> None:
        self.sources, self.action_horizon, self.weights = tuple(sources), action_horizon, weights
        self.lengths = tuple(len(source) for source in self.sources)
        self._ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Row:
        position, local = self._locate(index)
        try:
            return self.sources[position].read(local, self.action_horizon) | {"dataset_index": position}
        except DataError as error:
            raise DataError(f"{self.describe(index)}: {error}") from error

    def episodes(self) -> Iterator[Row]:
        """Source.read_episode of every episode, with its dataset_index; opens no video, decodes no image."""
        for position, source in enumerate(self.sources):
            for episode in range(len(source.episodes.numbers)):
                yield source.read_episode(episode) | {"dataset_index": position}

    def describe(self, index: int) -> str:
        """Where row `index` comes from, for messages."""
        position, local = self._locate(index)
        source = self.sources[position]
        episode, frame = source.locate(local)
        return f"{source.name}, episode {source.episodes.numbers[episode]}, frame {frame}"

    @property
    def fps(self) -> tuple[float, ...]:
        """Frames per second of each source."""
        return tuple(source.fps for source in self.sources)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The distinct prompts, sorted."""
        return tuple(sorted({task for source in self.sources for task in source.tasks.values()}))

    @property
    def fingerprint(self) -> str:
        """Hash of what is read: columns, dims, rates, chosen episodes and their lengths, weights. Not of paths, format or pixels."""
        facts = [
            [dataclasses.astuple(source.columns), source.dims, source.fps, source.episodes.numbers.tolist(), source.episodes.lengths.tolist()]
            for source in self.sources
        ]
        return hashlib.sha256(json.dumps([facts, self.weights]).encode()).hexdigest()[:16]

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a dataset with {len(self)} rows")
        position = int(np.searchsorted(self._ends, index, side="right"))
        return position, index - int(self._ends[position] - self.lengths[position])


def open_dataset(
    source: str | Path,
    *,
    robot: Robot,
    action_horizon: int,
    episodes: Sequence[int] | None = None,
    exclude: Sequence[int] = (),
    images: bool = True,
    accept_fps: Sequence[float] = (),
    revision: str | None = None,
    cache_dir: Path | None = None,
) -> Dataset:
    """Opens a LeRobot dataset (v3.0, v2.1, v2.0; video or image columns) with the columns that `robot` reads.

    source: a folder, read without any network, or a Hub id such as "lerobot/aloha_sim", downloaded at `revision`.
    episodes, exclude: episode numbers to keep (default: all) and to leave out, for held-out or damaged ones.
    images: False reads state and action only; the videos need not exist.
    accept_fps: rates, besides the robot's control rate, at which an action of the dataset may be taken for an action of the robot.
    cache_dir: where the `datasets` library keeps the memory-mapped tables (default: its own).

    Raises:
        DataError: the folder, a column, a file, an episode or the rate is not what is asked for; says what there is and what to do.
    """
    folder = find_dataset(source, revision=revision, images=images)
    columns = Columns(tuple(robot.cameras.values()) if images else (), robot.state_column, robot.action_column, robot.prompt_column)
    _check_columns(folder, columns, robot.name)
    check_rates([(folder.name, folder.fps)], robot.fps, accept_fps)
    chosen = folder.episodes.select(_choose(folder, episodes, exclude))
    _check_files(folder, chosen, columns)
    return Dataset([Source(folder, columns, chosen, _open_table(folder, columns, cache_dir))], action_horizon=action_horizon)


def find_dataset(source: str | Path, *, revision: str | None = None, images: bool = True) -> Folder:
    """What open_dataset knows of a dataset before it looks at columns: see there for the arguments.

    Raises:
        DataError: there is no such dataset, or its metadata cannot be used.
    """
    local = isinstance(source, Path) or source.startswith((".", "/", "~")) or Path(source).is_dir()
    root = Path(source).expanduser() if local else _download(str(source), revision, images)
    return read_folder(root, root.resolve().name if local else str(source))


def mix(datasets: Sequence[Dataset], weights: Sequence[float] | None = None, *, accept_fps: Sequence[float] = ()) -> Dataset:
    """One dataset out of several of the same robot.

    weights: share of the samples each gets (normalised); None: every row once an epoch.
    accept_fps: the rates that may occur together.

    Raises:
        DataError: columns, dims, horizons or rates differ, or a weight is not positive.
    """
    sources = [source for dataset in datasets for source in dataset.sources]
    if len(sources) != len(datasets) or not datasets:
        raise DataError("mix takes one or more datasets that are not mixtures themselves.")
    first = sources[0]
    for dataset, source in zip(datasets, sources, strict=True):
        for what, ours, theirs in (
            ("columns", source.columns, first.columns),
            ("state and action dims", source.dims, first.dims),
            ("action_horizon", dataset.action_horizon, datasets[0].action_horizon),
        ):
            if ours != theirs:
                raise DataError(f"{source.name} and {first.name} cannot be mixed: {what} are {ours} and {theirs}.")
    check_rates([(source.name, source.fps) for source in sources], first.fps, accept_fps)
    if weights is None:
        return Dataset(sources, action_horizon=datasets[0].action_horizon)
    if len(weights) != len(sources) or not all(weight > 0 for weight in weights):
        raise DataError(f"weights is {list(weights)}; it must hold one positive number for each of the {len(sources)} datasets.")
    shares = tuple(float(weight) / sum(weights) for weight in weights)
    return Dataset(sources, action_horizon=datasets[0].action_horizon, weights=shares)


def _download(repo_id: str, revision: str | None, images: bool) -> Path:
    """The folder of a Hub dataset in the Hub's cache, completed if needed."""
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(huggingface_hub.snapshot_download(repo_id, repo_type="dataset", revision=revision, ignore_patterns=None if images else "videos/*"))
    except (OSError, httpx.HTTPError, HFValidationError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{repo_id!r} is neither a folder nor a dataset that the Hub gives out now ({type(error).__name__}: {reason}).") from error


def _check_columns(folder: Folder, columns: Columns, robot: str) -> None:
    for kind, names in (("camera", columns.cameras), ("number", columns.numbers), ("text", columns.texts)):
        for column in names:
            folder.check_column(column, kind, robot)


def check_rates(rates: Sequence[tuple[str, float]], control: float | None, accepted: Sequence[float] = ()) -> None:
    """Raises unless all `rates`, (dataset's name, frames/s), are the control rate or accepted; a control rate of None takes any.

    Raises:
        DataError: names the dataset and both rates.
    """
    for name, fps in rates:
        if control is not None and fps != control and fps not in accepted:
            raise DataError(
                f"{name} has {fps:g} frames/s, expected {control:g}: an action chunk would span another time. "
                f"Resample the dataset, or say accept_fps=[{fps:g}] if this is what you want."
            )


def _choose(folder: Folder, episodes: Sequence[int] | None, exclude: Sequence[int]) -> np.ndarray:
    """Positions of the chosen episodes, in the order of the rows."""
    numbers = folder.episodes.numbers
    wanted = set(numbers.tolist()) if episodes is None else set(episodes)
    folder.check_episodes(wanted | set(exclude))
    chosen = np.flatnonzero(np.isin(numbers, sorted(wanted - set(exclude))))
    if not len(chosen):
        raise DataError(f"{folder.name}: no episode is left; episodes={episodes}, exclude={list(exclude)}.")
    return chosen


def _check_files(folder: Folder, episodes: Episodes, columns: Columns) -> None:
    for path in folder.tables:
        if not path.is_file():
            raise DataError(f"{path} is missing. Copy the dataset again.")
    for column in columns.cameras:
        for path, number in zip(episodes.videos.get(column, ()), episodes.numbers, strict=False):
            if not path.is_file():
                raise DataError(f"{path} is missing; episode {number} needs it. Copy the dataset again, or exclude the episodes of that file.")


def _open_table(folder: Folder, columns: Columns, cache_dir: Path | None) -> Any:
    """The wanted columns of all Parquet files, memory-mapped; slices are pyarrow tables."""
    import datasets

    images = [column for column in columns.cameras if column not in folder.episodes.videos]
    wanted = [*INDEX_COLUMNS, *columns.numbers, *columns.texts, *images]
    try:
        with _quiet(datasets):
            table = datasets.Dataset.from_parquet([str(path) for path in folder.tables], columns=wanted, cache_dir=cache_dir).with_format("arrow")
    except datasets.exceptions.DatasetGenerationError as error:
        raise DataError(f"{folder.root}: a Parquet file under data/ cannot be read ({error.__cause__}). Copy the dataset again.") from error
    episodes = folder.episodes
    first, last = episodes.first_rows, episodes.first_rows + episodes.lengths - 1
    index, number = (table.data.column(column).to_numpy() for column in ("index", "episode_index"))
    if len(table) != last[-1] + 1 or not (number[first] == episodes.numbers).all() or not (number[last] == episodes.numbers).all():
        raise DataError(f"{folder.name}: meta and data disagree on where episodes begin. Copy or convert the dataset again.")
    if not (index[last] - index[first] == episodes.lengths - 1).all():
        raise DataError(f"{folder.name}: the column 'index' does not count the frames of an episode. Copy or convert the dataset again.")
    return table


def decode_image(cell: dict[str, Any], column: str) -> np.ndarray:
    """The image of an image column's cell, uint8[Y, X, 3].

    Raises:
        DataError: the cell holds no image, or none that can be decoded.
    """
    import PIL.Image

    if cell["bytes"] is None:
        raise DataError(f"{column} names an image file instead of holding the image. Write the dataset again with LeRobot's save_episode.")
    try:
        with PIL.Image.open(io.BytesIO(cell["bytes"])) as image:
            return np.asarray(image.convert("RGB"))
    except OSError as error:
        raise DataError(f"{column} holds an image that cannot be decoded ({error}). Record it again, or exclude the episode.") from error


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Hides the progress bars of the `datasets` library."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
