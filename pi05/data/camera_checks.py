"""What the doctor finds in cameras: a few frames of a few episodes, decoded as for training, and every video's length.

Axes: Y, X (spec.py). Dtypes: an image is uint8[Y, X, 3].
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pi05.data.checks import Finding, name_episodes
from pi05.data.dataset import decode_image
from pi05.data.folder import Folder
from pi05.data.video import VideoReader
from pi05.errors import DataError
from pi05.robots.base import Robot

EPISODES = 6  # that are looked at, spread over the dataset
MOMENTS = ("first", "middle", "last")  # frames of each
BLACK = 8.0  # mean brightness, of 255
FLAT = 2.0  # standard deviation over the pixels: one colour
FROZEN = 0.1  # mean difference between two frames of an episode: the same picture, but for coding
SAME = 1.0  # mean difference between two cameras at the same moment


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """What one camera showed. images: (position of the episode, moment) -> image; sizes: (height, width) of them."""

    slot: str
    column: str
    images: Mapping[tuple[int, str], np.ndarray]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return sorted({image.shape[:2] for image in self.images.values()})

    @property
    def brightness(self) -> float:
        """Mean over pixels and images, 0 to 255."""
        return float(np.mean([image.mean() for image in self.images.values()])) if self.images else 0.0


def look(folder: Folder, robot: Robot, exclude: Sequence[int] = ()) -> tuple[list[View], list[Finding]]:
    """Returns what the robot's cameras show, and what is wrong with them; a camera that cannot be used has no images."""
    kept = np.flatnonzero(~np.isin(folder.episodes.numbers, list(exclude)))
    chosen = kept[np.unique(np.linspace(0, len(kept) - 1, EPISODES).round().astype(int))].tolist() if len(kept) else []
    views, out = [], []
    if not robot.cameras:
        out.append(Finding("warning", "cameras", folder.name, f"robot {robot.name!r} has no camera: the model would see nothing. Name its cameras."))
    if unused := [column for column in folder.columns("camera") if column not in robot.cameras.values()]:
        text = f"{', '.join(unused)}: cameras of the dataset that robot {robot.name!r} does not read. Map them to a slot if the task needs them."
        out.append(Finding("note", "cameras", folder.name, text))
    for slot, column in robot.cameras.items():
        try:
            folder.check_column(column, "camera", robot.name)
        except DataError as error:
            cure = f"Without this camera: cameras: {{{slot}: null}}."
            views, out = [*views, View(slot, column, {})], [*out, Finding("error", "cameras", f"{folder.name}, {column}", f"{error} {cure}")]
            continue
        view, unseen = _look_through(folder, slot, column, chosen)
        views.append(view)
        out += (check_videos(folder, column, kept) or unseen) + check_view(folder, view)
    return views, out + check_doubles(folder, views)


def check_videos(folder: Folder, column: str, kept: np.ndarray) -> list[Finding]:
    """Video files that are missing, of another rate, or shorter than the episodes at the positions `kept` need; decodes nothing."""
    episodes, reader = folder.episodes, VideoReader()
    if column not in episodes.videos:
        return []
    found: dict[str, list[int]] = {}
    counts: dict[Path, int | str] = {}
    for position in kept:
        path = episodes.videos[column][position]
        if path not in counts:
            try:
                counts[path] = reader.count(path, folder.fps) if path.is_file() else f"{path} is missing. Copy the dataset again."
            except DataError as error:
                counts[path] = str(error)
        count, needed = counts[path], int(episodes.first_frames[column][position] + episodes.lengths[position])
        if isinstance(count, int) and count < needed:
            count = f"{path} has {count} frames, its last episodes need more. Record or copy it again, or exclude the episodes."
        if isinstance(count, str):
            found.setdefault(count, []).append(int(episodes.numbers[position]))
    reader.close()
    return [Finding("error", "cameras", f"{folder.name}, {column}", f"{name_episodes(numbers)}: {text}") for text, numbers in found.items()]


def check_view(folder: Folder, view: View) -> list[Finding]:
    """Images that are black, of one colour, frozen, or of another size than promised."""
    numbers, where = folder.episodes.numbers, f"{folder.name}, {view.column}"
    black = [key for key, image in view.images.items() if float(image.mean()) < BLACK]
    flat = [key for key, image in view.images.items() if float(image.std()) < FLAT and key not in black]
    seen = list(dict.fromkeys(position for position, _ in view.images))
    frozen = [(position, "") for position in seen if _is_frozen([image for (other, _), image in view.images.items() if other == position])]
    out = []
    for bad, total, what in (
        (black, len(view.images), "images that were looked at are black"),
        (flat, len(view.images), "images that were looked at show one colour"),
        (frozen, len(seen), "episodes that were looked at show one still picture"),
    ):
        if bad:
            text = f"{len(bad)} of {total} {what}, in {name_episodes(numbers[position] for position, _ in bad)}. Look at the contact sheet."
            out.append(Finding("error" if len(bad) == total else "warning", "cameras", where, text))
    promised = tuple(folder.features[view.column]["shape"])
    if wrong := [size for size in view.sizes if size not in (promised[:2], promised[1:])]:  # [Y, X, 3] or [3, Y, X]
        sizes = " and ".join(f"{height} x {width}" for height, width in wrong)
        text = f"images are {sizes} pixels (height x width), but meta/info.json promises {promised}. Convert the dataset again."
        out.append(Finding("warning", "cameras", where, text))
    return out


def check_doubles(folder: Folder, views: Sequence[View]) -> list[Finding]:
    """Two cameras that show the same pictures."""
    out = []
    for i, one in enumerate(views):
        for other in views[i + 1 :]:
            keys = [key for key in one.images if key in other.images and one.images[key].shape == other.images[key].shape]
            if keys and all(np.abs(one.images[key].astype(np.int16) - other.images[key]).mean() < SAME for key in keys):
                where = f"{folder.name}, {one.column} and {other.column}"
                out.append(Finding("warning", "cameras", where, f"show the same pictures. One recorder for two cameras? Set {other.slot} to null."))
    return out


def sheet_rows(folder: Folder, views: Sequence[View], prompts: Mapping[int, str]) -> list[tuple[str, dict[str, np.ndarray | None]]]:
    """Rows for images.contact_sheet: an episode each, every camera at its moments. prompts: by number of the episode, as far as known."""
    positions = sorted({position for view in views for position, _ in view.images})
    rows = []
    for position in positions:
        shown = {f"{view.slot} {moment}": view.images.get((position, moment)) for view in views for moment in MOMENTS}
        episode, length = int(folder.episodes.numbers[position]), folder.episodes.lengths[position]
        rows.append((f"{folder.name}, episode {episode}, {length} frames. {prompts.get(episode, '')}", shown))
    return rows


def _look_through(folder: Folder, slot: str, column: str, chosen: Sequence[int]) -> tuple[View, list[Finding]]:
    """The camera's images of the episodes at positions `chosen`, and those that cannot be had."""
    reader = _Reader(folder, column)
    images, failed = {}, []
    for position in chosen:
        last = int(folder.episodes.lengths[position]) - 1
        for moment, frame in zip(MOMENTS, (0, last // 2, last), strict=True):
            try:
                images[position, moment] = reader.read(position, frame)
            except (DataError, OSError) as error:
                failed.append((int(folder.episodes.numbers[position]), str(error)))
    reader.close()
    if not failed:
        return View(slot, column, images), []
    text = f"{name_episodes(number for number, _ in failed)} cannot be shown: {failed[0][1]}"
    return View(slot, column, images), [Finding("error", "cameras", f"{folder.name}, {column}", text)]


def _is_frozen(shots: Sequence[np.ndarray]) -> bool:
    """Whether an episode's images are one picture."""
    first = shots[0].astype(np.int16)
    return len(shots) > 1 and all(shot.shape == first.shape and float(np.abs(shot - first).mean()) < FROZEN for shot in shots[1:])


class _Reader:
    """Single images of one camera, from videos or tables."""

    def __init__(self, folder: Folder, column: str) -> None:
        self._folder, self._column, self._videos = folder, column, VideoReader()
        self._ends: np.ndarray | None = None

    def read(self, position: int, frame: int) -> np.ndarray:
        """Frame `frame` of the episode at `position`."""
        episodes = self._folder.episodes
        if self._column in episodes.videos:
            first = int(episodes.first_frames[self._column][position])
            return self._videos.read(episodes.videos[self._column][position], first + frame, self._folder.fps)
        return decode_image(self._cell(int(episodes.first_rows[position]) + frame), self._column)

    def close(self) -> None:
        self._videos.close()

    def _cell(self, row: int) -> dict[str, bytes]:
        """The cell of a row of the dataset; reads one row group."""
        import pyarrow.parquet

        tables = self._folder.tables
        if self._ends is None:
            self._ends = np.cumsum([pyarrow.parquet.read_metadata(path).num_rows for path in tables])
        number = int(np.searchsorted(self._ends, row, side="right"))
        if number == len(tables):
            raise DataError(f"{self._folder.name} has no row {row}: its tables are shorter than its episodes. Copy the dataset again.")
        file, row = pyarrow.parquet.ParquetFile(tables[number]), row - int(self._ends[number - 1] if number else 0)
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if row < rows:
                return file.read_row_group(group, columns=[self._column])[self._column][row].as_py()
            row -= rows
        raise AssertionError("the row groups of a file hold all its rows")
