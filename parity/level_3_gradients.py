"""Level 3: the gradient of every parameter, by name. A fault that the loss, the velocity and the actions all hide shows here."""

import contextlib

import numpy as np
import pytest

from pi05.compare import Check, max_error
from pi05.params import ROWS, TABLE, dead_params, philox, shape, shapes
from pi05.spec import Compute

from . import reference
from .cases import SEED, each_scene, each_scene_and_dtype, scene
from .emulator import emulated
from .lab import BACKENDS, RUNS, Lab
from .record import Record
from .tolerances import F64_LIMITS, SHIFT_INVARIANT_LIMITS, judge

each_backend = pytest.mark.parametrize("backend", BACKENDS)


def gradient_checks(got: dict, want: dict, dead: dict[str, str], dtype: str, naive: dict | None = None) -> list[Check]:
    """One check for every parameter: exact zeros where no path leads to the loss, noise bounds where only rounding is left."""
    assert got.keys() == want.keys()
    checks = []
    for name in want:
        if dead.get(name) == "no path to the loss":
            checks.append(Check(f"{name} (exact zero)", max_error(got[name], np.zeros_like(want[name])), 0.0))
        elif name in dead:
            sibling = np.abs(want[name.replace("k_proj", "v_proj")]).max()
            checks.append(Check(f"{name} (rounding)", max_error(got[name], want[name]) / sibling, SHIFT_INVARIANT_LIMITS[dtype]))
        else:
            assert want[name].any(), f"the truth of {name} is zero: this scene does not test it"
            checks.append(judge("L3", name, got[name], want[name], dtype, None if naive is None else naive[name]))
    return checks


@each_scene_and_dtype
@each_backend
def test_every_gradient_matches_the_truth(lab: Lab, record: Record, backend: str, dtype: str, scene_name: str) -> None:
    got, truth = lab.results(backend, dtype, scene_name).gradients, lab.truth(scene_name).gradients
    naive = lab.results("reference", dtype, scene_name).gradients if dtype == "bfloat16" else None
    assert truth.keys() == shapes(scene(scene_name).spec, "torch").keys()
    record.settle("L3", f"gradients {scene_name} {dtype} {backend}", gradient_checks(got, truth, dead_params(scene(scene_name).spec), dtype, naive))


@each_scene
def test_both_backends_agree_on_every_gradient_in_float32(lab: Lab, record: Record, scene_name: str) -> None:
    first, second = (lab.results(backend, "float32", scene_name).gradients for backend in BACKENDS)
    record.settle("L3", f"gradients {scene_name} float32 jax = torch", gradient_checks(second, first, dead_params(scene(scene_name).spec), "float32"))


@each_backend
@pytest.mark.parametrize("scene_name", ["ragged", "peaky"])
def test_fused_float16_attention_keeps_every_gradient(lab: Lab, record: Record, request: pytest.FixtureRequest, backend: str, scene_name: str) -> None:
    """In bfloat16, with the kernel (its stand-in on the CPU) in float16, under the limits that the explicit strategy has to keep."""
    case, truth, naive = scene(scene_name), lab.truth(scene_name), lab.results("reference", "bfloat16", scene_name)
    with contextlib.nullcontext() if request.config.getoption("--device") == "cuda" else emulated(backend):
        got = RUNS[backend](case, Compute("bfloat16", attention="fused"))
        checks = [judge("L2", name, got.loss[name], truth.loss[name], "bfloat16", naive.loss[name]) for name in truth.loss]
        checks += gradient_checks(got.gradients, truth.gradients, dead_params(case.spec), "bfloat16", naive.gradients)
    record.settle("L3", f"gradients {scene_name} fused float16 {backend}", checks)


@each_backend
def test_gradients_are_derivatives_of_the_reference_without_any_autodiff(lab: Lab, record: Record, backend: str) -> None:
    """Complex-step derivatives (Squire and Trapp 1998) of the NumPy reference along a random direction of each of the 55 tensors."""
    case, gradients, checks = scene("ragged"), lab.results(backend, "float64", "ragged").gradients, []
    for row in TABLE:
        direction = philox(SEED, "direction", *row.name.encode()).standard_normal(shape(row, case.spec))
        want = reference.directional_derivative(case.params, case.spec, case.batch, case.draws, row.name, direction)
        got = sum(float((gradients[name] * part).sum()) for name, part in _torch_layout(row.name, direction, case.spec))
        scale = max(abs(want), *(float(np.linalg.norm(gradients[name])) for name, _ in _torch_layout(row.name, direction, case.spec)))
        checks.append(Check(row.name, abs(got - want) / scale if scale else abs(got - want), F64_LIMITS["L3"]))
    record.settle("L3", f"complex step float64 {backend}", [check for check in checks if check.name != "vision.layers.k_proj.bias"])


@each_backend
def test_rows_of_tokens_that_do_not_occur_have_exact_zero_gradients(lab: Lab, record: Record, backend: str) -> None:
    seen = scene("ragged").batch.observation
    unused = np.setdiff1d(np.arange(scene("ragged").spec.vocab_size), seen.tokens[seen.token_mask])
    gradient = lab.results(backend, "float32", "ragged").gradients["trunk.embed.weight"]
    used = np.delete(gradient, unused, axis=0)
    assert len(unused) and np.abs(used).max(1).all()
    record.settle("L3", f"unused tokens {backend}", [Check("trunk.embed.weight", max_error(gradient[unused], np.zeros_like(gradient[unused])), 0.0)])


def test_the_list_of_dead_parameters_is_exactly_what_the_truth_has(lab: Lab, record: Record) -> None:
    """No parameter is excused that has a gradient, and none has an unexpected zero."""
    spec, gradients = scene("ragged").spec, lab.truth("ragged").gradients
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    dead = {name for name, gradient in gradients.items() if np.abs(gradient).max() < 1e-12 * largest}
    record.settle("L3", "dead parameters", [Check("names that differ", float(len(dead ^ dead_params(spec).keys())), 0.0)])


def _torch_layout(name: str, array: np.ndarray, spec: object) -> list[tuple[str, np.ndarray]]:
    from pi05.params import to_layout

    return list(to_layout(ROWS[name], array, spec, "torch"))
