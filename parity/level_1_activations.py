"""Level 1: every named intermediate of every module, and unit operations on the inputs that show their faults.

A whole model hides faults of eps, mask value or precision: at usual inputs they change nothing measurable. So each has an input of its own.
"""

import numpy as np
import pytest

from pi05.compare import Check, max_error, relative_error

from .cases import each_scene_and_dtype, scene
from .lab import BACKENDS, Lab
from .record import Record
from .tolerances import ROTARY_LIMITS, TIME_LIMITS, UNIT_LIMITS, judge
from .units import units

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_precision = pytest.mark.parametrize("dtype", ["float64", "float32"])


@each_scene_and_dtype
@each_backend
def test_every_activation_matches_the_truth(lab: Lab, record: Record, backend: str, dtype: str, scene_name: str) -> None:
    got, truth = lab.results(backend, dtype, scene_name).activations, lab.truth(scene_name).activations
    naive = lab.results("reference", dtype, scene_name).activations if dtype == "bfloat16" else {}
    assert got.keys() == truth.keys()
    checks = [judge("L1", name, got[name], truth[name], dtype, naive.get(name)) for name in truth]
    record.settle("L1", f"activations {scene_name} {dtype} {backend}", checks)


@each_precision
@each_backend
def test_norms_of_small_inputs_use_the_published_eps(record: Record, backend: str, dtype: str) -> None:
    """At a row size of 1e-3 the eps of 1e-6 is as large as the mean square; eps 1e-5, or outside the root, changes the result by half."""
    rng, unit = np.random.default_rng(1), units(backend, dtype)
    x, scale, bias = 1e-3 * rng.standard_normal((2, 5, 24)), rng.standard_normal(24), rng.standard_normal(24)
    mean_square = (x * x).mean(-1, keepdims=True)
    centred = x - x.mean(-1, keepdims=True)
    want_rms = x / np.sqrt(mean_square + 1e-6) * (1 + scale)
    want_layer = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * scale + bias
    checks = [
        Check("rms_norm", relative_error(unit.rms_norm(x, scale), want_rms), UNIT_LIMITS[dtype]),
        Check("layer_norm", relative_error(unit.layer_norm(x, scale, bias), want_layer), UNIT_LIMITS[dtype]),
    ]
    record.settle("L1", f"norms of small inputs {dtype} {backend}", checks)


@each_precision
@each_backend
def test_adaptive_norm_modulates_by_scale_shift_gate_in_this_order(record: Record, backend: str, dtype: str) -> None:
    rng, unit = np.random.default_rng(2), units(backend, dtype)
    x, cond = rng.standard_normal((2, 5, 24)), rng.standard_normal((2, 24))
    weight, bias = rng.standard_normal((24, 3, 24)) / 5, rng.standard_normal((3, 24))
    scale, shift, gate = np.moveaxis(np.einsum("bc,cmd->bmd", cond, weight) + bias, 1, 0)[:, :, None, :]
    want = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + scale) + shift
    got, got_gate = unit.ada_rms_norm(x, cond, weight, bias)
    checks = [
        Check("modulated", relative_error(got, want), UNIT_LIMITS[dtype]),
        Check("gate", relative_error(got_gate, gate), UNIT_LIMITS[dtype]),
    ]
    record.settle("L1", f"adaptive norm {dtype} {backend}", checks)


@each_precision
@each_backend
def test_rotary_embedding_is_exact_at_every_position(record: Record, backend: str, dtype: str) -> None:
    """Pairs j and j + H/2, base 10000, positions up to the published 1017: the error of low-precision frequencies grows with distance."""
    rng, unit, head_dim = np.random.default_rng(3), units(backend, dtype), 256
    x, positions = rng.standard_normal((2, 6, 3, head_dim)), np.array([[0, 1, 63, 300, 777, 1017], [5, 128, 512, 600, 900, 1000]])
    angle = positions[:, :, None, None] / 10000.0 ** (np.arange(0, head_dim, 2) / head_dim)
    first, second = x[..., : head_dim // 2], x[..., head_dim // 2 :]
    want = np.concatenate([first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], -1)
    got = unit.rotate(x, positions, num_positions=1018)
    record.settle("L1", f"rotary far positions {dtype} {backend}", [Check("rotated", relative_error(got, want), ROTARY_LIMITS[dtype])])


@each_precision
@each_backend
def test_time_embedding_is_exact_where_the_angle_is_large(record: Record, backend: str, dtype: str) -> None:
    unit, width = units(backend, dtype), 1024
    time = np.random.default_rng(4).random(64).astype(np.float32).astype(np.float64)
    time[:2] = 1.0, 0.001
    period = 4e-3 * (4.0 / 4e-3) ** np.linspace(0, 1, width // 2)
    angle = time[:, None] * 2 * np.pi / period
    want = np.concatenate([np.sin(angle), np.cos(angle)], -1)
    record.settle("L1", f"time embedding {dtype} {backend}", [Check("embedded", max_error(unit.time_embedding(time, width), want), TIME_LIMITS[dtype])])


@each_precision
@each_backend
def test_gelu_is_the_tanh_approximation(record: Record, backend: str, dtype: str) -> None:
    x = np.linspace(-6, 6, 241)
    want = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    record.settle("L1", f"gelu {dtype} {backend}", [Check("gelu", relative_error(units(backend, dtype).gelu(x), want), UNIT_LIMITS[dtype])])


@each_precision
@each_backend
def test_token_embedding_is_scaled_by_the_exact_root_of_the_width(record: Record, backend: str, dtype: str) -> None:
    weight, tokens = np.random.default_rng(5).standard_normal((17, 24)), np.array([[0, 16, 3], [3, 3, 8]])
    checks = [Check("embedded", relative_error(units(backend, dtype).embed(weight, tokens), weight[tokens] * np.sqrt(24)), UNIT_LIMITS[dtype])]
    record.settle("L1", f"token embedding {dtype} {backend}", checks)


@each_precision
@each_backend
def test_attention_matches_the_formula_for_grouped_heads_and_large_logits(record: Record, backend: str, dtype: str) -> None:
    """Six query heads on two key heads; logits beyond 100, where a low-precision logit or an unscaled one shows."""
    rng = np.random.default_rng(6)
    q, k, v = rng.standard_normal((2, 7, 6, 16)) * 8, rng.standard_normal((2, 9, 2, 16)) * 8, rng.standard_normal((2, 9, 2, 16))
    valid = np.ones((2, 9), bool)
    valid[0, 6:], valid[1, :2] = False, False
    got = units(backend, dtype).attention(q, k, v, valid)
    limit = UNIT_LIMITS[dtype] * 50  # exp amplifies the relative rounding of a logit by its size
    record.settle("L1", f"attention large logits {dtype} {backend}", [Check("attn", relative_error(got, _attention(q, k, v, valid)), limit)])


@each_precision
@each_backend
def test_masked_keys_leak_nothing_whatever_they_hold(record: Record, backend: str, dtype: str) -> None:
    """The logits of masked keys are 1e4 above those of valid keys, their values 1e6: a finite additive mask would let them through."""
    rng = np.random.default_rng(7)
    q, k, v = np.abs(rng.standard_normal((1, 4, 6, 16))), rng.standard_normal((1, 8, 2, 16)), rng.standard_normal((1, 8, 2, 16))
    valid = np.arange(8)[None] < 5
    dirty_k, dirty_v = k.copy(), v.copy()
    dirty_k[:, 5:], dirty_v[:, 5:] = 1e4, 1e6
    unit = units(backend, dtype)
    leak = max_error(unit.attention(q, dirty_k, dirty_v, valid), unit.attention(q, k, v, valid))
    record.settle("L1", f"masked keys leak {dtype} {backend}", [Check("attn", leak, 0.0)])


@each_precision
@each_backend
def test_a_query_without_any_key_gives_exact_zeros_and_zero_gradients(record: Record, backend: str, dtype: str) -> None:
    rng = np.random.default_rng(8)
    q, k, v = rng.standard_normal((2, 4, 6, 16)), rng.standard_normal((2, 8, 2, 16)), rng.standard_normal((2, 8, 2, 16))
    valid = np.array([[True] * 8, [False] * 8])
    out, gradients = units(backend, dtype).attention_gradients(q, k, v, valid, np.full(q.shape, 1e6))
    checks = [Check("out", max_error(out[1], np.zeros_like(out[1])), 0.0)]
    checks += [Check(name, max_error(gradient[1], np.zeros_like(gradient[1])), 0.0) for name, gradient in gradients.items()]
    assert all(np.isfinite(gradient).all() and gradient[0].any() for gradient in gradients.values())
    record.settle("L1", f"dead rows {dtype} {backend}", checks)


@each_backend
def test_positions_count_valid_tokens_only(lab: Lab, record: Record, backend: str) -> None:
    """Written out by hand from the masks: padding repeats the position before it, a missing leading camera starts at zero."""
    case, got = scene("ragged"), lab.results(backend, "float32", "ragged").activations
    patches, checks = case.spec.vision.num_patches, []
    for sample, (cameras, tokens) in enumerate(zip(case.batch.observation.image_mask, case.batch.observation.token_mask, strict=True)):
        position, want = -1, []
        for valid in [camera for camera in cameras for _ in range(patches)] + list(tokens):
            position += int(valid)
            want.append(max(position, 0))
        steps = [position + 1 + step for step in range(int((~case.batch.action_is_pad[sample]).sum()))]
        steps += [steps[-1]] * (case.spec.action_horizon - len(steps))
        checks += [Check(f"prefix.positions[{sample}]", max_error(got["prefix.positions"][sample], np.array(want)), 0.0)]
        checks += [Check(f"suffix.positions[{sample}]", max_error(got["suffix.positions"][sample], np.array(steps)), 0.0)]
    record.settle("L1", f"positions {backend}", checks)


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, valid: np.ndarray) -> np.ndarray:
    out, group = np.empty_like(q), q.shape[2] // k.shape[2]
    for b, t, n in np.ndindex(q.shape[:3]):
        logits = k[b, valid[b], n // group] @ q[b, t, n] / np.sqrt(q.shape[-1])
        weights = np.exp(logits - logits.max())
        out[b, t, n] = weights @ v[b, valid[b], n // group] / weights.sum()
    return out
