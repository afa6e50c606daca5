"""Level 6: sampled actions. Positions, cache and the time grid are invisible to the training loss and decide what the robot does."""

import numpy as np
import pytest

from pi05.compare import Check, relative_error
from pi05.spec import Compute

from .cases import each_scene, each_scene_and_dtype, scene
from .lab import BACKENDS, Lab
from .record import Record
from .tolerances import F64_LIMITS, judge

each_backend = pytest.mark.parametrize("backend", BACKENDS)


@each_scene_and_dtype
@each_backend
def test_every_denoising_step_matches_the_truth(lab: Lab, record: Record, backend: str, dtype: str, scene_name: str) -> None:
    got, truth = lab.results(backend, dtype, scene_name).actions, lab.truth(scene_name).actions
    naive = lab.results("reference", dtype, scene_name).actions if dtype == "bfloat16" else None
    checks = [judge("L6", f"x after step {i + 1}", got[i], truth[i], dtype, None if naive is None else naive[i]) for i in range(len(truth))]
    record.settle("L6", f"steps {scene_name} {dtype} {backend}", checks)


@each_scene
def test_both_backends_sample_the_same_actions_in_float32(lab: Lab, record: Record, scene_name: str) -> None:
    first, second = (lab.results(backend, "float32", scene_name).actions for backend in BACKENDS)
    record.settle(
        "L6", f"steps {scene_name} float32 jax = torch", [judge("L6", f"x after step {i + 1}", second[i], first[i], "float32") for i in range(len(first))]
    )


@each_backend
def test_the_velocity_with_a_cache_is_the_velocity_without(record: Record, backend: str) -> None:
    cached, whole = VELOCITIES[backend](scene("ragged"))
    record.settle("L6", f"cached = uncached float64 {backend}", [Check("velocity", relative_error(cached, whole), F64_LIMITS["L6"])])


def _jax_velocities(case: object) -> tuple[np.ndarray, np.ndarray]:
    import jax
    import jax.numpy as jnp

    from pi05.jax_backend import model, sampling

    with jax.enable_x64(True):
        pi05 = model.make_model(case.spec, Compute("float64"), ((name, value.astype(np.float64)) for name, value in case.params.items()))
        observation, draws = model.from_numpy(case.batch.observation), model.from_numpy(case.draws)
        prefix, cache = sampling.encode_prefix(pi05, observation)
        cached = sampling.cached_velocity(pi05, prefix, cache, draws.noise, draws.time)
        whole, _ = pi05(observation, draws.noise, draws.time, jnp.ones(draws.noise.shape[:2], bool))
        return np.asarray(cached), np.asarray(whole)


def _torch_velocities(case: object) -> tuple[np.ndarray, np.ndarray]:
    import torch

    from pi05.torch_backend import model, sampling

    pi05 = model.make_model(case.spec, Compute("float64"), ((name, value.astype(np.float64)) for name, value in case.params.items()))
    observation, draws = model.from_numpy(case.batch.observation), model.from_numpy(case.draws)
    with torch.no_grad():
        prefix, cache = sampling.encode_prefix(pi05, observation)
        cached = sampling.cached_velocity(pi05, prefix, cache, draws.noise, draws.time)
        whole, _ = pi05(observation, draws.noise, draws.time, torch.ones(draws.noise.shape[:2], dtype=torch.bool))
    return cached.cpu().numpy(), whole.cpu().numpy()


VELOCITIES = {"jax": _jax_velocities, "torch": _torch_velocities}
