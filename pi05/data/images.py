"""Camera images: what counts as one, resizing onto black, a contact sheet to look at.

Axes: Y, X (spec.py). Dtypes: an image is uint8[Y, X, 3], RGB, 0..255; the model scales it.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import PIL.Image
import PIL.ImageDraw

from pi05.errors import DataError
from pi05.spec import IMAGE_CHANNELS

Layout = Literal["HWC", "CHW"]

_TEXT, _PAPER, _ABSENT = (20, 20, 20), (255, 255, 255), (205, 205, 205)
_LINE, _GAP = 14, 4  # pixels: height of a line of text, space around a tile


def as_rgb(image: np.ndarray, *, name: str = "image", layout: Layout = "HWC") -> np.ndarray:
    """Returns a camera image as uint8[Y, X, 3]; a uint8 image that already is one is returned itself.

    Accepts uint8, and floats in [0, 1], which become trunc(255 x) as in openpi; channels last or first. The shape tells where the
    channels are; only where both ends have size 3 does `layout` decide, so an image 3 pixels high or wide is not flipped.
    `name` is the camera, for messages.

    Raises:
        DataError: another shape, another dtype, or floats outside [0, 1].
    """
    image = np.asarray(image)
    channels = IMAGE_CHANNELS
    if image.ndim != 3 or channels not in (image.shape[0], image.shape[-1]) or not image.size:
        raise DataError(f"{name} has shape {image.shape}; an image is [height, width, {channels}] or [{channels}, height, width].")
    if image.shape[-1] != channels or (image.shape[0] == channels and layout == "CHW"):
        image = np.ascontiguousarray(image.transpose(1, 2, 0))
    if image.dtype == np.uint8:
        return image
    if not np.issubdtype(image.dtype, np.floating):
        raise DataError(f"{name} has dtype {image.dtype}; an image is uint8 in 0..255, or float in [0, 1].")
    low, high = float(image.min()), float(image.max())
    if not (low >= 0 and high <= 1):  # so written, NaN is refused too
        cure = "map it with (x + 1) / 2" if -1 <= low < 0 and high <= 1 else "convert it to uint8"
        raise DataError(f"{name} is float and runs from {low:g} to {high:g}; a float image lies in [0, 1]: {cure} where it is made.")
    return (255 * image).astype(np.uint8)


def resize_with_pad(image: np.ndarray, size: int) -> np.ndarray:
    """Returns uint8[Y, X, 3] scaled to fit into `size` x `size`, centred on black; an image of that size is returned itself.

    Bilinear with antialiasing (Pillow), sizes truncated: the pixels that openpi's data pipeline and its serving client make.
    """
    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return image
    ratio = max(width / size, height / size)
    new_height, new_width = max(1, int(height / ratio)), max(1, int(width / ratio))
    resized = PIL.Image.fromarray(image).resize((new_width, new_height), PIL.Image.Resampling.BILINEAR)
    top, left = (size - new_height) // 2, (size - new_width) // 2
    out = np.zeros((size, size, IMAGE_CHANNELS), np.uint8)
    out[top : top + new_height, left : left + new_width] = np.asarray(resized)
    return out


def contact_sheet(rows: Sequence[tuple[str, Mapping[str, np.ndarray | None]]], path: Path, *, tile: int = 224) -> Path:
    """Writes a PNG with one row a sample: its caption, then its cameras, each below its name. Returns `path`.

    rows: (caption, camera -> uint8[Y, X, 3], or None where the sample lacks the camera, drawn as an empty gray tile).
    tile: edge of a tile in pixels; images are resized as for the model, so what is shown is what is trained on.
    """
    cameras = list(dict.fromkeys(camera for _, images in rows for camera in images))
    columns = max(1, len(cameras))
    width = columns * (tile + _GAP) + _GAP
    captions = [textwrap.wrap(caption, max(10, width // 7)) for caption, _ in rows]
    heights = [_LINE * (len(lines) + 1) + tile + 3 * _GAP for lines in captions]
    sheet = PIL.Image.new("RGB", (width, max(1, sum(heights))), _PAPER)
    draw = PIL.ImageDraw.Draw(sheet)
    top = 0
    for (_, images), lines, height in zip(rows, captions, heights, strict=True):
        for i, line in enumerate(lines):
            draw.text((_GAP, top + _GAP + i * _LINE), line, fill=_TEXT)
        for column, camera in enumerate(cameras):
            left, below = _GAP + column * (tile + _GAP), top + 2 * _GAP + len(lines) * _LINE
            draw.text((left, below), camera, fill=_TEXT)
            image = images.get(camera)
            if image is None:
                draw.rectangle((left, below + _LINE, left + tile - 1, below + _LINE + tile - 1), fill=_ABSENT)
            else:
                sheet.paste(PIL.Image.fromarray(resize_with_pad(as_rgb(image, name=camera), tile)), (left, below + _LINE))
        top += height
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, format="PNG")
    return path
