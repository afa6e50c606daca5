"""Level 6: sampled actions. Positions, cache and the time grid are invisible to the training loss and decide what the robot does."""

import pytest

from pi05.compare import Check, relative_error
from pi05.spec import Compute

from .cases import each_scene, each_scene_and_dtype, scene
from .lab import BACKENDS, RUNS, Lab
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
    run = RUNS[backend](scene("ragged"), Compute("float64"))

    def velocities(model, batch, draws):
        sampling = run.module("sampling")
        prefix, cache = sampling.encode_prefix(model, batch.observation)
        whole, _ = model(batch.observation, draws.noise, draws.time, batch.action_is_pad | True)
        return sampling.cached_velocity(model, prefix, cache, draws.noise, draws.time), whole

    cached, whole = run.call(velocities)
    record.settle("L6", f"cached = uncached float64 {backend}", [Check("velocity", relative_error(cached, whole), F64_LIMITS["L6"])])
