"""Level 5: whole runs. Both backends train the tiny model in float32 on the same real demonstrations, from the same weights, by the same recipe.

Rounding differs, and training amplifies what differs: so the losses cannot stay equal to the last bit. What is limited is how far they are
apart in the end; what is told is how fast they part.
"""

import functools

import numpy as np

from pi05.backend import load_backend
from pi05.batch import Batch, Draws
from pi05.compare import Check
from pi05.config import TrainConfig, get_config
from pi05.data.run_data import open_run_data
from pi05.initial import initial_params
from pi05.schedule import learning_rate

from .lab import BACKENDS
from .record import Record
from .tolerances import TRAJECTORY_LIMIT

STEPS = 30
FIELDS = {
    "data.datasets.0.episodes": "[0, 1, 6, 12]",  # of three tasks
    "data.discrete_state": "false",  # prompts of one length: JAX compiles once
    "data.holdout_episodes": "0",
    "data.num_workers": "0",
    "data.augmentation": "standard",
    "batch_size": "4",
    "schedule.peak_lr": "1e-3",
    "schedule.warmup_steps": "5",
    "schedule.decay_steps": str(STEPS),
}


@functools.cache
def run_config() -> TrainConfig:
    return get_config("tiny", FIELDS)


@functools.cache
def batches() -> tuple[tuple[Batch, Draws], ...]:
    """The run's batches, in the order of its loader."""
    with open_run_data(run_config()).make_loader() as loader:
        return tuple(loader.batches(first=0, last=STEPS))


@functools.cache
def losses(backend: str) -> np.ndarray:
    """The loss of each step, float64[STEPS]."""
    config = run_config()
    engine = load_backend(backend, config.spec(), config.compute, config.recipe(), device="cpu")
    state, out = engine.init_state(initial_params(config.spec(), config.seed)), []
    for step, (batch, draws) in enumerate(batches()):
        state, metrics = engine.train_step(state, batch, draws, learning_rate(config.schedule, step))
        out.append(metrics.fetch()["loss"])
    return np.array(out)


def test_both_backends_take_the_same_path(record: Record) -> None:
    jax, torch = (losses(backend) for backend in BACKENDS)
    apart = np.abs(jax - torch) / np.abs(torch)
    thirds = [apart[i : i + STEPS // 3] for i in range(0, STEPS, STEPS // 3)]
    checks = [Check(f"steps {1 + i * STEPS // 3} to {(i + 1) * STEPS // 3}", float(third.max()), TRAJECTORY_LIMIT) for i, third in enumerate(thirds)]
    print("largest relative difference of the loss:", ", ".join(f"{check.name} {check.error:.1e}" for check in checks))
    for check in checks:
        record.settle("L5", f"losses f32, {check.name}", [check])


def test_the_path_leads_somewhere() -> None:
    """Two backends that learn nothing, or one loss for every batch, would agree as well."""
    for backend in BACKENDS:
        path = losses(backend)
        assert path[-10:].mean() < 0.6 * path[:5].mean() and len(set(path)) == STEPS
