"""Schedules against their formulas, written out here, and openpi's through optax."""

import jax
import numpy as np
import optax
import pytest

from pi05.errors import ConfigError
from pi05.schedule import Schedule, learning_rate


def test_cosine_is_openpis_warmup_cosine_decay() -> None:
    schedule = Schedule(peak_lr=2.5e-5, warmup_steps=100, decay_steps=3_000, decay_lr=2.5e-6)
    openpi = optax.warmup_cosine_decay_schedule(init_value=2.5e-5 / 101, peak_value=2.5e-5, warmup_steps=100, decay_steps=3_000, end_value=2.5e-6)
    steps = np.array([0, 1, 50, 99, 100, 101, 1_500, 2_999, 3_000, 10_000])
    with jax.numpy_dtype_promotion("standard"):
        wanted = [float(openpi(step)) for step in steps]
    np.testing.assert_allclose([learning_rate(schedule, step) for step in steps], wanted, rtol=2e-6)


def test_rsqrt_is_openpis_inverse_square_root() -> None:
    schedule = Schedule(kind="rsqrt", peak_lr=5e-5, warmup_steps=10, timescale=100.0)
    assert learning_rate(schedule, 10) == pytest.approx(5e-5, rel=1e-12)
    assert learning_rate(schedule, 10 + 300) == pytest.approx(5e-5 / 2, rel=1e-12)
    assert learning_rate(schedule, 0) == pytest.approx(5e-5 / 11, rel=1e-12)


def test_constant_stays_after_the_warmup() -> None:
    schedule = Schedule(kind="constant", peak_lr=1e-3, warmup_steps=4)
    assert [learning_rate(schedule, step) for step in (4, 5, 10**6)] == [1e-3] * 3
    assert learning_rate(schedule, 3) < 1e-3


def test_without_warmup_the_first_step_has_the_peak() -> None:
    assert learning_rate(Schedule(warmup_steps=0), 0) == 2.5e-5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "linear"}, "schedule.kind"),
        ({"peak_lr": 0.0}, "schedule.peak_lr"),
        ({"peak_lr": float("nan")}, "schedule.peak_lr"),
        ({"warmup_steps": -1}, "schedule.warmup_steps"),
        ({"decay_steps": 1_000}, "schedule.decay_steps"),
        ({"decay_lr": 1.0}, "schedule.decay_lr"),
        ({"kind": "rsqrt", "timescale": 0.0}, "schedule.timescale"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(changes: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Schedule(**changes)
