"""Frames of video files, chosen by their integer number in the file, never by a time.

Decoder: PyAV, whose wheel brings its own FFmpeg, so nothing has to match the installed torch or a system library. One decoder
thread and one colour conversion a frame: loader workers are the parallelism (LeRobot converts every frame it passes and uses all
cores for one frame: 21 to 32 ms against 4 ms for 640x480 AV1 on the same machine).
"""

import collections
from pathlib import Path
from typing import Any

import numpy as np

from pi05.errors import DataError

MAX_OPEN_FILES = 8  # per process; each holds one decoder, a few MB


class VideoReader:
    """Reads single frames; keeps the files it used last open, in this process only (a pickled reader starts empty)."""

    def __init__(self) -> None:
        self._open: collections.OrderedDict[Path, tuple[Any, Any]] = collections.OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"_open": collections.OrderedDict()}

    def read(self, path: Path, number: int, fps: float) -> np.ndarray:
        """Frame `number` of the file (0 is its first), uint8[Y, X, 3] in RGB.

        A frame's number is its presentation time rounded to the grid of `fps`, the dataset's rate, so a time that is off by
        less than half a frame changes nothing and a frame that the file lacks is noticed.

        Raises:
            DataError: the file cannot be decoded, its rate is not `fps`, or it has no such frame.
        """
        import av

        try:
            container, stream = self._stream(path, fps)
            start = stream.start_time or 0
            container.seek(start + round(number / (fps * stream.time_base)), stream=stream, backward=True, any_frame=False)
            for frame in container.decode(stream):
                found = round((frame.pts - start) * stream.time_base * fps)
                if found == number:
                    return frame.to_ndarray(format="rgb24")
                if found > number:
                    break
        except av.FFmpegError as error:
            self._open.pop(path, None)
            raise DataError(f"{path} cannot be decoded at frame {number}: {error}. Copy or record the file again, or exclude the episode.") from error
        raise DataError(f"{path} has no frame {number}: the file is shorter than its episodes or lacks a frame. Exclude the episode or re-encode the file.")

    def count(self, path: Path, fps: float) -> int:
        """The number of frames that the file promises, on the grid of `fps`; decodes nothing.

        Raises:
            DataError: the file cannot be opened, or its rate is not `fps`.
        """
        import av

        try:
            _, stream = self._stream(path, fps)
        except av.FFmpegError as error:
            raise DataError(f"{path} cannot be opened: {error}. Copy or record the file again, or exclude its episodes.") from error
        return _slots(stream, fps)

    def close(self) -> None:
        """Closes every file."""
        while self._open:
            self._open.popitem()[1][0].close()

    def _stream(self, path: Path, fps: float) -> tuple[Any, Any]:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        import av

        container = av.open(str(path))
        if not container.streams.video:
            raise DataError(f"{path} holds no video.")
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        _check_rate(path, stream, fps)
        self._open[path] = container, stream
        if len(self._open) > MAX_OPEN_FILES:
            self._open.popitem(last=False)[1][0].close()
        return container, stream


def _check_rate(path: Path, stream: Any, fps: float) -> None:
    """Refuses a file whose frames do not lie on the grid of `fps`: later frames would be taken for their neighbours."""
    slots = _slots(stream, fps)
    rate = stream.average_rate or fps
    if abs(rate - fps) > 0.01 * fps or stream.frames and abs(slots - stream.frames) > 1:
        raise DataError(
            f"{path} runs at {float(rate):.4g} frames/s ({stream.frames} frames in the time of {slots} at the dataset's {fps:g}). "
            "Re-encode it at the dataset's rate, or correct fps in meta/info.json."
        )


def _slots(stream: Any, fps: float) -> int:
    """Places for frames in the time of `stream`."""
    return round(stream.duration * stream.time_base * fps) if stream.duration else stream.frames
