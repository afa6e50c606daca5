"""Camera images: what is accepted, how they are resized, the contact sheet."""

from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from pi05.data.images import as_rgb, contact_sheet, resize_with_pad
from pi05.errors import DataError

RNG = np.random.default_rng(0)


def noise(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, np.uint8)


def triangle_weights(size: int, new: int) -> np.ndarray:
    """float64[new, size]: bilinear interpolation, widened when shrinking; written from the definition."""
    scale = size / new
    support = max(scale, 1.0)
    centres = (np.arange(new) + 0.5) * scale
    weights = np.maximum(0, 1 - np.abs(np.arange(size) + 0.5 - centres[:, None]) / support)
    return weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize(("height", "width"), [(480, 640), (720, 1280), (100, 300), (300, 100), (50, 60), (224, 225)])
def test_resizing_is_antialiased_bilinear_onto_centred_black(height: int, width: int) -> None:
    image = noise(height, width, 3)
    ratio = max(width / 224, height / 224)
    new_height, new_width = int(height / ratio), int(width / ratio)
    rows = np.tensordot(triangle_weights(height, new_height), image.astype(float), 1)
    inner = np.moveaxis(np.tensordot(rows, triangle_weights(width, new_width), (1, 1)), -1, 1)
    top, left = (224 - new_height) // 2, (224 - new_width) // 2
    out = resize_with_pad(image, 224)
    assert out.dtype == np.uint8 and out.shape == (224, 224, 3)
    assert np.abs(out[top : top + new_height, left : left + new_width] - inner).max() <= 1
    black = np.ones((224, 224), bool)
    black[top : top + new_height, left : left + new_width] = False
    assert not out[black].any()


def test_an_image_of_the_right_size_is_left_alone() -> None:
    image = noise(224, 224, 3)
    assert resize_with_pad(image, 224) is image


def test_a_very_thin_image_still_becomes_an_image() -> None:
    assert resize_with_pad(np.full((1, 1000, 3), 9, np.uint8), 56).max() == 9


@pytest.mark.parametrize("shape", [(3, 10, 3), (10, 3, 3), (3, 3, 3)])
def test_images_three_pixels_high_or_wide_do_not_flip(shape: tuple[int, int, int]) -> None:
    image = noise(*shape)
    assert np.array_equal(as_rgb(image), image)
    assert np.array_equal(as_rgb(image.transpose(2, 0, 1), layout="CHW"), image)


def test_channels_first_is_seen_by_the_shape() -> None:
    image = noise(8, 6, 3)
    for layout in ("HWC", "CHW"):
        assert np.array_equal(as_rgb(image, layout=layout), image)
        assert np.array_equal(as_rgb(image.transpose(2, 0, 1), layout=layout), image)


def test_float_images_are_truncated_as_openpi_does_and_every_level_survives() -> None:
    levels = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    assert np.array_equal(as_rgb(levels.astype(np.float32) / 255), levels)
    assert (as_rgb(np.full((2, 2, 3), 0.9999)) == 254).all()


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (np.linspace(-1, 1, 48).reshape(4, 4, 3), r"front is float and runs from -1 to 1; .*\(x \+ 1\) / 2"),
        (np.linspace(0, 255, 48).reshape(4, 4, 3), "front is float and runs from 0 to 255; .*uint8"),
        (np.full((4, 4, 3), np.nan), "front is float and runs from nan"),
        (np.zeros((4, 4, 3), np.int64), "front has dtype int64"),
        (np.zeros((4, 4), np.uint8), r"front has shape \(4, 4\)"),
        (np.zeros((4, 4, 4), np.uint8), r"front has shape \(4, 4, 4\)"),
        (np.zeros((0, 4, 3), np.uint8), r"front has shape \(0, 4, 3\)"),
    ],
)
def test_what_is_no_image_is_refused_with_the_reason(image: np.ndarray, words: str) -> None:
    with pytest.raises(DataError, match=words):
        as_rgb(image, name="front")


def test_a_contact_sheet_shows_every_camera_of_every_sample_and_where_one_is_absent(tmp_path: Path) -> None:
    red, green = np.full((30, 40, 3), (250, 0, 0), np.uint8), np.full((40, 30, 3), (0, 250, 0), np.uint8)
    rows = [("push the dot, state 0.1 0.2", {"base_0_rgb": red, "left_wrist_0_rgb": green}), ("pull " * 40, {"base_0_rgb": green, "left_wrist_0_rgb": None})]
    path = contact_sheet(rows, tmp_path / "new" / "sheet.png", tile=64)
    with PIL.Image.open(path) as sheet:
        assert sheet.format == "PNG"
        pixels = np.asarray(sheet.convert("RGB")).astype(int)
    assert (pixels == (250, 0, 0)).all(-1).sum() == 48 * 64
    assert (pixels == (0, 250, 0)).all(-1).sum() == 2 * 48 * 64
    absent = np.argwhere((pixels == 205).all(-1))
    assert len(absent) >= 64 * 64, "the missing camera has no tile"
    assert (pixels[:18] < 100).all(-1).any(), "the caption is not written"
    assert (pixels[18:32] < 100).all(-1).any(), "the cameras are not named"


def test_an_empty_contact_sheet_is_a_file(tmp_path: Path) -> None:
    assert contact_sheet([], tmp_path / "sheet.png").is_file()
