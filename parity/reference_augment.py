"""The truth for augmentation: plain NumPy in float64, written from the definitions and unlike the backends.

Resampling is a product with tent functions (nobody rounds a place down or gathers a pixel), colours go through the standard library's
colorsys one pixel at a time, and a factor of saturation moves along the line from the pixel's own grey.
"""

import colorsys

import numpy as np

GREY = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601


def augment(images: np.ndarray, affine: np.ndarray, hsv: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """float64[B, C, Y, X, 3] in [-1, 1] of uint8 or [-1, 1] images; the other arguments as in pi05.batch.AugmentDraws."""
    pixels = images / 255.0 if images.dtype == np.uint8 else (images.astype(np.float64) + 1) / 2
    out = np.empty_like(pixels)
    for b, c in np.ndindex(images.shape[:2]):
        picture = resample(pixels[b, c], affine[b, c].astype(np.float64))
        picture = change_value_and_hue(picture, *hsv[b, c].tolist())
        out[b, c] = np.clip(change_colour(picture, *colour[b, c].tolist()), 0, 1)
    return 2 * out - 1


def resample(picture: np.ndarray, affine: np.ndarray) -> np.ndarray:
    """Each pixel is a mean of all pixels, weighted by how far they are from its place; a picture is black where it has no pixel."""
    height, width = picture.shape[:2]
    places = np.stack([*np.indices((height, width)).reshape(2, -1), np.ones(height * width)])
    y, x = affine @ places
    down = np.maximum(0, 1 - np.abs(y[:, None] - np.arange(height)))
    right = np.maximum(0, 1 - np.abs(x[:, None] - np.arange(width)))
    return np.stack([((down @ picture[..., i]) * right).sum(1) for i in range(3)], -1).reshape(picture.shape)


def change_value_and_hue(picture: np.ndarray, brightness: float, slope: float, turn: float) -> np.ndarray:
    """Brightness, then a tone curve of three straight pieces, then a turn of the hue."""
    ends = slope / (2 * (1 + slope))  # where the middle piece, through (1/2, 1/2), meets those through (0, 0) and (1, 1)
    out = np.empty_like(picture)
    for place in np.ndindex(picture.shape[:2]):
        h, s, v = colorsys.rgb_to_hsv(*picture[place])
        v = v * (1 + brightness) if brightness < 0 else v + brightness * (1 - v)
        v = float(np.interp(v, [0, ends, 1 - ends, 1], [0, ends / slope, 1 - ends / slope, 1]))
        out[place] = colorsys.hsv_to_rgb((h + turn) % 1.0, s, v)
    return out


def change_colour(picture: np.ndarray, brightness: float, contrast: float, saturation: float) -> np.ndarray:
    """Saturation, contrast and brightness, not clipped."""
    grey = (picture @ GREY)[..., None]
    vivid = grey + saturation * (picture - grey)
    return brightness * (0.5 + contrast * (vivid - 0.5))
