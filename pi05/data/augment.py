"""Augmentation of training images, decided here as data; the backends' augment.py applies it on the device.

Presets:
    none      no augmentation
    openpi    what openpi's JAX path really does (openpi 15a9616 with augmax 0.4.1), its slips included:
              - cameras without "wrist" in their name: a crop of int(0.95 size) pixels at a random sub-pixel place, scaled back, turned by
                up to 5 degrees around the centre; what lies outside is black;
              - with probability 1/2, all cameras: brightness 0.3 and contrast 0.4 of the HSV value, and a turn of the hue by up to 0.1, which
                nobody asked for; the saturation of 0.5 that was asked for is computed and thrown away;
              - all wrist cameras of a sample get the same numbers, and so do all others: one key serves every camera.
    standard  the same intentions, done plainly, each camera on its own:
              - cameras without "wrist" in their name: a turn by up to 5 degrees, and a crop of 95 % at a random place inside the image. Where
                the turned crop would not fit (beyond 3.1 degrees) it shrinks until it does, to 92 % at 5 degrees: no pixel is ever invented;
              - all cameras: brightness within 30 %, contrast around mid-grey within 40 %, saturation within 50 %.

Axes: B, C (spec.py); K: random numbers of one image. Dtypes: arithmetic is float64, float32 goes out.
"""

import dataclasses
from typing import Literal, get_args

import numpy as np

from pi05.batch import AugmentDraws, uniforms
from pi05.errors import ConfigError

Augmentation = Literal["none", "openpi", "standard"]

CROP = 0.95  # of the image's edge
ANGLE = np.deg2rad(5.0)
BRIGHTNESS, CONTRAST, SATURATION, HUE = 0.3, 0.4, 0.5, 0.1
JITTER_SHARE = 0.5  # of openpi's images whose colours change

_NUMBERS = 7  # K


def check_preset(preset: str) -> None:
    """Refuses what is not the name of a preset.

    Raises:
        ConfigError: there is no such preset.
    """
    if preset not in get_args(Augmentation):
        raise ConfigError(f"augmentation is {preset!r}; it can be {', '.join(get_args(Augmentation))}.")


def draw_augmentation(preset: Augmentation, cameras: tuple[str, ...], image_size: int, *, seed: int, epoch: int, positions: np.ndarray) -> AugmentDraws | None:
    """Draws for the samples at `positions` (int[B]) of the order of `epoch`; None for the preset "none".

    cameras: slots of the batch's images. image_size: pixels along one edge.
    Each image has its own Philox key, apart from that of noise and time: its numbers depend neither on its batch nor on other cameras.

    Raises:
        ConfigError: there is no such preset.
    """
    check_preset(preset)
    if preset == "none":
        return None
    moves = np.array(["wrist" not in camera for camera in cameras], bool)
    shared = preset == "openpi"
    keys = [("others" if moves else "wrists") if shared else camera for camera, moves in zip(cameras, moves, strict=True)]
    uniform = [[uniforms(_NUMBERS, seed, f"augment {key}", epoch, int(position)) for key in keys] for position in positions]
    draw = {"openpi": _draw_openpi, "standard": _draw_standard}[preset]
    drawn = draw(np.reshape(uniform, (len(positions), len(cameras), _NUMBERS)), image_size)
    neutral = AugmentDraws.identity(len(positions), len(cameras))
    drawn = {name: array.astype(np.float32) for name, array in drawn.items()}
    affine = np.where(moves[:, None, None], drawn.pop("affine"), neutral.affine)
    return dataclasses.replace(neutral, affine=affine, **drawn)


def _draw_openpi(uniform: np.ndarray, image_size: int) -> dict[str, np.ndarray]:
    signed = 2 * uniform - 1
    crop = int(CROP * image_size)
    shift = (image_size - crop) / 2 * signed[..., 1:3]
    changes = uniform[..., 3:4] < JITTER_SHARE
    brightness, contrast, turn = BRIGHTNESS * signed[..., 4], CONTRAST * signed[..., 5], HUE * signed[..., 6]
    hsv = np.stack([brightness, np.tan((contrast + 1) * np.pi / 4), turn], -1)
    return {
        "affine": _affine(crop / image_size, ANGLE * signed[..., 0], shift, image_size),
        "hsv": np.where(changes, hsv, [0, 1, 0]),
    }


def _draw_standard(uniform: np.ndarray, image_size: int) -> dict[str, np.ndarray]:
    signed = 2 * uniform - 1
    angle = ANGLE * signed[..., 0]
    width = np.cos(angle) + np.abs(np.sin(angle))  # of a turned square of edge 1, from its leftmost to its rightmost corner
    scale = np.minimum(CROP, 1 / width)
    room = (image_size - 1) / 2 * (1 - scale * width)  # the outermost pixels' centres stay between those of the image
    return {
        "affine": _affine(scale, angle, room[..., None] * signed[..., 1:3], image_size),
        "colour": 1 + np.array([BRIGHTNESS, CONTRAST, SATURATION]) * signed[..., 3:6],
    }


def _affine(scale: np.ndarray | float, angle: np.ndarray, shift: np.ndarray, image_size: int) -> np.ndarray:
    """float64[B, C, 2, 3]: a window `scale` times as large as the image, its centre moved by `shift` (down, right), turned by
    `angle` so that the picture turns counter-clockwise."""
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    matrix = np.stack([np.stack([cos, sin], -1), np.stack([-sin, cos], -1)], -2)
    centre = (image_size - 1) / 2
    offset = shift + centre - matrix.sum(-1) * centre
    return np.concatenate([matrix, offset[..., None]], -1)
