"""Augmentation of images by numbers that came with the batch (AugmentDraws in batch.py): one resampling, then colours.

Axes: B C Y X (see spec.py).
Dtypes: pixels lie in [0, 1] inside, where black is an exact 0, in at least float32.
"""

from typing import Any

import torch
from torch import Tensor as Array

from pi05.batch import LUMA, AugmentDraws
from pi05.torch_backend.layers import cast


def augment(images_BCYX3: Array, draws: AugmentDraws, dtype: Any) -> Array:
    """Returns the images in [-1, 1], in `dtype` (at least float32), each changed by its own draws.

    images_BCYX3: uint8 in 0..255 or float in [-1, 1]. Draws that change nothing leave every bit of the pixels in [0, 1]; scaled to [-1, 1]
        they are what the model makes of uint8, up to the one rounding that a compiler saves by fusing.
    """
    pixels_BCYX3 = cast(images_BCYX3, dtype)
    pixels_BCYX3 = pixels_BCYX3 / 255 if images_BCYX3.dtype == torch.uint8 else (pixels_BCYX3 + 1) / 2
    pixels_BCYX3 = resample(pixels_BCYX3, cast(draws.affine, dtype))
    pixels_BCYX3 = shift_hsv(pixels_BCYX3, cast(draws.hsv, dtype))
    pixels_BCYX3 = adjust_colour(pixels_BCYX3, cast(draws.colour, dtype))
    return pixels_BCYX3.clip(0, 1) * 2 - 1


def resample(pixels_BCYX3: Array, affine_BC23: Array) -> Array:
    """Reads each pixel where the affine map says, bilinearly; beyond the image lie black pixels."""
    row_Y1 = torch.arange(pixels_BCYX3.shape[2], dtype=affine_BC23.dtype, device=affine_BC23.device)[:, None]
    column_X = torch.arange(pixels_BCYX3.shape[3], dtype=affine_BC23.dtype, device=affine_BC23.device)
    affine_BC2311 = affine_BC23[..., None, None]
    y_BCYX, x_BCYX = (affine_BC2311[:, :, i, 0] * row_Y1 + affine_BC2311[:, :, i, 1] * column_X + affine_BC2311[:, :, i, 2] for i in range(2))
    top_BCYX, left_BCYX = torch.floor(y_BCYX), torch.floor(x_BCYX)
    down_BCYX1, right_BCYX1 = (y_BCYX - top_BCYX)[..., None], (x_BCYX - left_BCYX)[..., None]
    upper_BCYX3, lower_BCYX3 = (
        (1 - right_BCYX1) * _read(pixels_BCYX3, y_BCYX, left_BCYX) + right_BCYX1 * _read(pixels_BCYX3, y_BCYX, left_BCYX + 1)
        for y_BCYX in (top_BCYX, top_BCYX + 1)
    )
    return (1 - down_BCYX1) * upper_BCYX3 + down_BCYX1 * lower_BCYX3


def shift_hsv(pixels_BCYX3: Array, hsv_BC3: Array) -> Array:
    """Brightness, a tone curve and a turn of the hue in HSV (Smith 1978), as augmax's ColorJitter applies them; saturation stays.

    Brightness b takes the value v to v (1 + b), or for b > 0 to v (1 - b) + b; the tone curve has the given slope in the middle and
    1 / slope at both ends. Both keep [0, 1]. An image whose numbers change nothing stays as it is, to the bit.
    """
    brightness_BC11, slope_BC11, turn_BC11 = (hsv_BC3[..., i, None, None] for i in range(3))
    red_BCYX, green_BCYX, blue_BCYX = (pixels_BCYX3[..., i] for i in range(3))
    value_BCYX = pixels_BCYX3.amax(-1)
    chroma_BCYX = value_BCYX - pixels_BCYX3.amin(-1)
    saturation_BCYX = chroma_BCYX / torch.where(value_BCYX == 0, 1, value_BCYX)
    divisor_BCYX = torch.where(chroma_BCYX == 0, 1, chroma_BCYX)
    hue_BCYX = torch.where(value_BCYX == green_BCYX, 2 + (blue_BCYX - red_BCYX) / divisor_BCYX, 4 + (red_BCYX - green_BCYX) / divisor_BCYX)
    hue_BCYX = torch.where(value_BCYX == red_BCYX, (green_BCYX - blue_BCYX) / divisor_BCYX, hue_BCYX)  # in sixths of a turn
    value_BCYX = value_BCYX * (1 - torch.abs(brightness_BC11)) + brightness_BC11.clip(0)
    knee_BC11 = slope_BC11 / (2 * (1 + slope_BC11))
    bright_BCYX = torch.where(value_BCYX > 1 - knee_BC11, (value_BCYX - 1) / slope_BC11 + 1, slope_BC11 * (value_BCYX - 0.5) + 0.5)
    value_BCYX = torch.where(value_BCYX < knee_BC11, value_BCYX / slope_BC11, bright_BCYX)
    place_BCYX3 = torch.stack([(hue_BCYX + 6 * turn_BC11 + start) % 6 for start in (5, 3, 1)], -1)
    missing_BCYX3 = torch.minimum(place_BCYX3, 4 - place_BCYX3).clip(0, 1)  # of red, green and blue, as a share of the chroma
    shifted_BCYX3 = value_BCYX[..., None] * (1 - saturation_BCYX[..., None] * missing_BCYX3)
    changed_BC11 = (brightness_BC11 != 0) | (slope_BC11 != 1) | (turn_BC11 != 0)
    return torch.where(changed_BC11[..., None], shifted_BCYX3, pixels_BCYX3)


def adjust_colour(pixels_BCYX3: Array, colour_BC3: Array) -> Array:
    """Saturation (distance from the pixel's own grey), contrast (distance from mid-grey) and brightness, times their factors; not clipped."""
    brightness_BC111, contrast_BC111, saturation_BC111 = (colour_BC3[..., i, None, None, None] for i in range(3))
    grey_BCYX1 = sum(weight * pixels_BCYX3[..., i, None] for i, weight in enumerate(LUMA))
    mixed_BCYX3 = saturation_BC111 * pixels_BCYX3 + (1 - saturation_BC111) * grey_BCYX1
    return brightness_BC111 * (contrast_BC111 * mixed_BCYX3 + (1 - contrast_BC111) / 2)


def _read(pixels_BCYX3: Array, y_BCYX: Array, x_BCYX: Array) -> Array:
    """The pixels at whole places, black beyond the image."""
    height, width = pixels_BCYX3.shape[2:4]
    inside_BCYX = (y_BCYX >= 0) & (y_BCYX < height) & (x_BCYX >= 0) & (x_BCYX < width)
    y_BCYX, x_BCYX = cast(y_BCYX.clip(0, height - 1), torch.int64), cast(x_BCYX.clip(0, width - 1), torch.int64)
    samples, cameras = (torch.arange(size, device=pixels_BCYX3.device) for size in pixels_BCYX3.shape[:2])
    read_BCYX3 = pixels_BCYX3[samples[:, None, None, None], cameras[:, None, None], y_BCYX, x_BCYX]
    return torch.where(inside_BCYX[..., None], read_BCYX3, 0)
