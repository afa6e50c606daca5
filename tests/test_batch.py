"""Batch and Draws: one clear error at the border, and randomness that belongs to a sample."""

import dataclasses

import numpy as np
import pytest

from pi05.batch import Batch, Draws, make_draws, synthetic_batch
from pi05.spec import ModelSpec

SPEC = ModelSpec.tiny()


def changed(**fields: np.ndarray) -> Batch:
    batch = synthetic_batch(SPEC, 4, token_len=9)
    inside = {name: fields.pop(name) for name in list(fields) if hasattr(batch.observation, name)}
    return dataclasses.replace(batch, observation=dataclasses.replace(batch.observation, **inside), **fields)


def float_images(value: float) -> np.ndarray:
    images = np.zeros((4, 3, 70, 70, 3), np.float32)
    images[2, 1, 5, 6, 0] = value
    return images


def test_a_synthetic_batch_is_valid_and_irregular() -> None:
    batch = synthetic_batch(SPEC, 4)
    batch.validate(SPEC)
    seen = batch.observation
    assert not seen.image_mask.all() and not seen.token_mask.all() and batch.action_is_pad.any() and batch.action_dim_is_pad.any()
    assert not seen.image_mask[0, 0], "the leading camera is missing somewhere: positions must not start at -1"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"images": np.zeros((4, 3, 64, 70, 3), np.uint8)}, r"images has shape \(4, 3, 64, 70, 3\); it must be \[B, C, Y, X, 3\] = \(4, 3, 70, 70, 3\)"),
        ({"images": np.zeros((4, 3, 3, 70, 70), np.uint8)}, r"images has shape \(4, 3, 3, 70, 70\)"),
        ({"images": np.zeros((4, 70, 70, 3), np.uint8)}, r"images has shape \(4, 70, 70, 3\)"),
        ({"images": np.zeros((4, 3, 70, 70, 3), np.float64)}, "images has dtype float64; it must be uint8 or float32"),
        ({"images": float_images(np.nan)}, r"images\[2, 1, 5, 6, 0\] is nan; 1 of 176400 values are not finite"),
        ({"images": float_images(255.0)}, r"images runs from 0 to 255; float images must lie in \[-1, 1\]"),
        ({"image_mask": np.ones((4, 2), bool)}, r"image_mask has shape \(4, 2\); it must be \[B, C\] = \(4, 3\)"),
        ({"image_mask": np.ones((4, 3), np.float32)}, "image_mask has dtype float32; it must be bool"),
        ({"tokens": np.full((4, 9), 509, np.int32)}, "tokens holds ids from 509 to 509; spec.vocab_size 509 allows 0 to 508"),
        ({"tokens": np.full((4, 9), -1, np.int32)}, "tokens holds ids from -1 to -1"),
        ({"tokens": np.zeros((4, 9), np.int64)}, "tokens has dtype int64; it must be int32"),
        ({"tokens": np.zeros((4, 73), np.int32), "token_mask": np.ones((4, 73), bool)}, "tokens has 73 tokens a sample; spec.max_token_len is 72"),
        ({"token_mask": np.zeros((4, 9), bool), "image_mask": np.zeros((4, 3), bool)}, "Sample 0 has neither a camera in image_mask nor a token"),
        ({"actions": np.zeros((4, 8, 4), np.float32)}, r"actions has shape \(4, 8, 4\); it must be \[B, A, M\] = \(4, 8, 11\)"),
        ({"actions": np.full((4, 8, 11), np.inf, np.float32)}, r"actions\[0, 0, 0\] is inf; 352 of 352"),
        ({"action_is_pad": np.ones((4, 8), bool)}, "action_is_pad of sample 0 marks its first step as padding"),
        ({"action_dim_is_pad": np.ones((4, 11), bool)}, "action_dim_is_pad of sample 0 marks every dim as padding"),
        ({"sample_ids": np.arange(4, dtype=np.int32)}, "sample_ids has dtype int32; it must be int64"),
        ({"actions": [[0.0]]}, "actions is a list; it must be a NumPy array"),
    ],
)  # fmt: skip
def test_a_wrong_batch_is_one_error_that_names_the_field(fields: dict, says: str) -> None:
    with pytest.raises(ValueError, match="^" + says):
        changed(**fields).validate(SPEC)


def test_more_cameras_than_slots_is_an_error() -> None:
    with pytest.raises(ValueError, match="images holds 4 cameras"):
        changed(images=np.zeros((4, 4, 70, 70, 3), np.uint8), image_mask=np.ones((4, 4), bool)).validate(SPEC)


def test_draws_of_a_sample_do_not_depend_on_its_batch() -> None:
    together, alone = make_draws(SPEC, 7, 2, np.array([5, 9, 1])), make_draws(SPEC, 7, 2, np.array([9]))
    assert np.array_equal(together.noise[1], alone.noise[0]) and together.time[1] == alone.time[0]
    for other in (make_draws(SPEC, 8, 2, np.array([9])), make_draws(SPEC, 7, 3, np.array([9])), make_draws(SPEC, 7, 2, np.array([8]))):
        assert not np.array_equal(other.noise, alone.noise) and other.time[0] != alone.time[0]


def test_draws_have_the_published_distributions() -> None:
    draws = make_draws(SPEC, 0, 0, np.arange(4000))
    draws.validate(SPEC, 4000)
    noise, time = draws.noise.ravel().astype(np.float64), np.sort((draws.time.astype(np.float64) - 0.001) / 0.999)
    assert abs(noise.mean()) < 5 / np.sqrt(noise.size) and abs(noise.std() - 1) < 5 / np.sqrt(2 * noise.size) and abs((noise**4).mean() - 3) < 0.05
    # Kolmogorov and Smirnov's distance from Beta(1.5, 1), whose distribution function is t^1.5; 1.95 / sqrt(n) is the 0.1 % point.
    assert np.abs(np.arange(1, 4001) / 4000 - time**1.5).max() < 1.95 / np.sqrt(4000)


def test_the_stream_of_draws_is_pinned() -> None:
    """A change of these numbers changes every training run; it is a decision, not an accident."""
    draws = make_draws(SPEC, 0, 0, np.array([0]))
    assert np.allclose(draws.noise[0, 0, :3], PINNED_NOISE, rtol=1e-6) and np.isclose(draws.time[0], PINNED_TIME, rtol=1e-6)


PINNED_NOISE, PINNED_TIME = (1.0971502, 0.40642673, -1.1678736), 0.33701518


@pytest.mark.parametrize(("time", "says"), [(0.0, r"time runs from 0\.0"), (1.5, "it must lie in")])
def test_a_flow_time_outside_its_range_is_an_error(time: float, says: str) -> None:
    draws = make_draws(SPEC, 0, 0, np.arange(2))
    with pytest.raises(ValueError, match=says):
        Draws(noise=draws.noise, time=np.full(2, time, np.float32)).validate(SPEC, 2)
