"""Writes parity/augmax.npz: what augmax 0.4.1, driven as openpi 15a9616 drives it, makes of a picture, and which numbers it drew.

    uv pip install --no-deps --target /tmp/augmax augmax==0.4.1
    PYTHONPATH=/tmp/augmax python scripts/make_augmax_golden.py

Run once; parity/level_0_augment.py compares both backends with the file. augmax itself is no dependency of pi05.
"""

from pathlib import Path

import augmax
import jax
import numpy as np

OUT = Path(__file__).resolve().parents[1] / "parity" / "augmax.npz"
SIZE, SAMPLES = 24, 5
CROP = int(SIZE * 0.95)
CROP_LIMIT, ANGLE_LIMIT = (SIZE - CROP) / 2, np.deg2rad(5)  # uniform within +- these
BRIGHTNESS, CONTRAST, HUE = 0.3, 0.4, 0.1  # openpi asks for the first two; the third is augmax's default


def picture() -> np.ndarray:
    """uint8[SIZE, SIZE, 3]: smooth colours and noise, with patches of black, white and grey."""
    rows, columns = np.mgrid[:SIZE, :SIZE] / (SIZE - 1)
    image = 255 * np.stack([rows, columns, 1 - rows * columns], -1)
    image[SIZE // 2 :, : SIZE // 2] = np.random.default_rng(0).integers(0, 256, (SIZE // 2, SIZE // 2, 3))
    for corner, grey in ((2, 0), (9, 255), (16, 128)):
        image[corner : corner + 4, corner : corner + 4] = grey
    return image.round().astype(np.uint8)


def signed(key: jax.Array, shape: tuple[int, ...] = ()) -> np.ndarray:
    """The number in [-1, 1] that a transformation draws from its key, before it multiplies by its limit."""
    return np.asarray(jax.random.uniform(key, shape, minval=-1.0, maxval=1.0))


def numbers(key: jax.Array, *, moves: bool) -> list[float]:
    """[angle, shift down, shift right, brightness, contrast, hue] in units of their limits, and 1 if the colours change, by augmax's own use of keys."""
    angle, shift = 0.0, np.zeros(2)
    colour_key = jax.random.split(key, 2 if moves else 1)[-1]
    if moves:
        crop_key, _, turn_key = jax.random.split(jax.random.split(key, 2)[0], 3)
        angle, shift = signed(turn_key), signed(crop_key, (2,))
    (jitter_key,) = jax.random.split(colour_key, 1)
    brightness, contrast, hue = (signed(part) for part in jax.random.split(jitter_key, 5)[:3])
    return [float(x) for x in (angle, *shift, brightness, contrast, hue, jax.random.bernoulli(jitter_key, 0.5))]


def main() -> None:
    colours = augmax.ColorJitter(brightness=BRIGHTNESS, contrast=CONTRAST, saturation=0.5)
    moved = augmax.Chain(augmax.RandomCrop(CROP, CROP), augmax.Resize(SIZE, SIZE), augmax.Rotate((-5, 5)), colours)
    image, keys = picture(), jax.random.split(jax.random.key(3), SAMPLES)
    out = {"image": image}
    for name, chain in (("moved", moved), ("still", augmax.Chain(colours))):
        out[name] = np.asarray(jax.jit(jax.vmap(chain))(keys, np.stack([image.astype(np.float32) / 255] * SAMPLES)))
        out[f"{name}_numbers"] = np.array([numbers(key, moves=name == "moved") for key in keys])
    np.savez_compressed(OUT, **out)


if __name__ == "__main__":
    main()
