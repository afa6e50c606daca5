"""parity/reference.py: its derivatives agree with each other, its parts with torch's own functions, its masks and positions with the rules."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as functional

from parity.reference import NumpyOps, TorchOps, directional_derivative, forward, loss, sample_actions, token_logits
from pi05.batch import Batch, Draws, make_draws, synthetic_batch
from pi05.params import TABLE, shape
from pi05.spec import ModelSpec

SPEC = ModelSpec.tiny()
TOKEN_LEN = 13
STENCIL = ((1, 45 / 60), (2, -9 / 60), (3, 1 / 60))  # central difference of sixth order
DEAD = ("trunk.final_norm.scale", "vision.layers.k_proj.bias")  # no path to the loss; softmax is shift-invariant
F64 = NumpyOps(np.float64)


def warm_params() -> dict[str, np.ndarray]:
    """A model in the middle of training: no tensor is zero, activations are about one, attention is far from flat."""
    rng, out = np.random.default_rng(7), {}
    for row in TABLE:
        size, part = shape(row, SPEC), row.name.rsplit(".", 1)[-1]
        if part in ("scale", "bias", "pos_embed"):
            values = 0.3 * rng.standard_normal(size) + (part == "scale" and row.group == "vision")
        else:
            inner = size[1:] if row.stacked else size
            fan_in = {"trunk.embed.weight": inner[1]}.get(row.name, math.prod(inner[:-1]) if "o_proj" in row.name or "patch" in row.name else inner[0])
            gain = 2.0 if "q_proj" in row.name or "k_proj" in row.name else 0.5 if "modulation" in row.name else 1.0
            values = gain / math.sqrt(fan_in) * rng.standard_normal(size)
        out[row.name] = values.astype(np.float32)
    return out


PARAMS = warm_params()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return synthetic_batch(SPEC, 3, seed=3, token_len=TOKEN_LEN)


@pytest.fixture(scope="module")
def draws() -> Draws:
    return make_draws(SPEC, 5, 0, np.arange(3))


@pytest.fixture(scope="module")
def taps(batch, draws):
    return forward(PARAMS, SPEC, batch, draws, ops=F64)


@pytest.fixture(scope="module")
def gradients(batch, draws):
    """Gradient of the loss of every parameter, by torch's autograd in float64."""
    leaves = {name: torch.tensor(array, dtype=torch.float64, requires_grad=True) for name, array in PARAMS.items()}
    value = loss(leaves, SPEC, batch, draws, ops=TorchOps(torch.float64))["loss"]
    grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {name: grad.numpy() for name, grad in zip(leaves, grads, strict=True)}


def direction_of(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).standard_normal(PARAMS[name].shape)


def relative(got, want) -> float:
    got, want = (np.asarray(x.detach() if isinstance(x, torch.Tensor) else x, np.float64) for x in (got, want))
    assert got.shape == want.shape and np.isfinite(got).all() and np.abs(want).max() > 1e-3
    return np.abs(got - want).max() / np.abs(want).max()


def with_observation(batch: Batch, **changes) -> Batch:
    return dataclasses.replace(batch, observation=dataclasses.replace(batch.observation, **changes))


# ---- Derivatives


def test_complex_step_equals_autograd_for_every_parameter(batch, draws, gradients):
    for name in sorted(PARAMS.keys() - set(DEAD)):
        direction = direction_of(name)
        want, size = np.vdot(gradients[name], direction), np.linalg.norm(gradients[name]) * np.linalg.norm(direction)
        assert size > 1e-3, name
        assert abs(directional_derivative(PARAMS, SPEC, batch, draws, name, direction) - want) <= 1e-13 * size, name


@pytest.mark.parametrize("name", DEAD)
def test_a_parameter_without_influence_has_no_derivative(name, batch, draws, gradients):
    assert np.abs(gradients[name]).max() < 1e-15
    assert abs(directional_derivative(PARAMS, SPEC, batch, draws, name, direction_of(name))) < 1e-14


@pytest.mark.parametrize(
    "name", ["vision.patch_embed.weight", "vision.layers.q_proj.weight", "trunk.embed.weight", "expert.layers.mlp_norm.modulation.weight", "time_mlp_in.weight"]
)
def test_complex_step_equals_central_differences(name, batch, draws):
    options = {"padded_steps": "count", "loss_dims": "real"}
    direction = direction_of(name) / np.linalg.norm(direction_of(name))

    def value(step: float) -> float:
        return loss({**PARAMS, name: PARAMS[name] + step * direction}, SPEC, batch, draws, ops=F64, **options)["loss"]

    step = 3e-3
    difference = sum(weight * (value(i * step) - value(-i * step)) for i, weight in STENCIL) / step
    derivative = directional_derivative(PARAMS, SPEC, batch, draws, name, direction, **options)
    assert abs(difference - derivative) <= 1e-10 * max(abs(derivative), 1e-1)


# ---- The same equations in other arrays and precisions


def test_torch_in_float64_equals_numpy_in_every_intermediate(batch, draws, taps):
    other = forward(PARAMS, SPEC, batch, draws, ops=TorchOps(torch.float64))
    assert other.keys() == taps.keys()
    assert {name: error for name in taps if (error := relative(other[name], taps[name])) > 1e-12} == {}


def test_low_precision_is_used_where_the_contract_says(batch, draws, taps):
    low = forward(PARAMS, SPEC, batch, draws, ops=TorchOps(torch.bfloat16))
    full = {name for name, x in low.items() if isinstance(x, torch.Tensor) and x.dtype == torch.float32}
    assert full == {"time.embedding", "time.cond", "velocity"}
    assert all(x.dtype == torch.bfloat16 for name, x in low.items() if isinstance(x, torch.Tensor) and name not in full)
    assert 1e-3 < relative(low["velocity"], taps["velocity"]) < 0.1
    single = forward(PARAMS, SPEC, batch, draws, ops=TorchOps(torch.float32))
    assert 1e-8 < relative(single["velocity"], taps["velocity"]) < 1e-4
    assert relative(single["velocity"], forward(PARAMS, SPEC, batch, draws, ops=NumpyOps(np.float32))["velocity"]) < 1e-4


def test_intermediates_have_the_documented_shapes(batch, draws, taps):
    B, C, T, A, M = 3, 3, TOKEN_LEN, SPEC.action_horizon, SPEC.action_dim  # noqa: N806
    v, t, e = SPEC.vision, SPEC.trunk, SPEC.expert
    prefix = C * v.num_patches + T
    want = {
        "vision.embedded": (B, C, v.num_patches, v.width),
        "vision.layers.attn": (v.depth, B, C, v.num_patches, v.num_heads, v.head_dim),
        "vision.layers.out": (v.depth, B, C, v.num_patches, v.width),
        "vision.tokens": (B, C, v.num_patches, t.width),
        "prefix.embedded": (B, prefix, t.width),
        "prefix.valid": (B, prefix),
        "prefix.positions": (B, prefix),
        "suffix.positions": (B, A),
        "suffix.embedded": (B, A, e.width),
        "time.embedding": (B, e.width),
        "time.cond": (B, e.width),
        "velocity": (B, A, M),
    }
    for group, gemma, length in (("trunk", t, prefix), ("expert", e, A)):
        for part, heads in (("q", t.num_heads), ("k", t.num_kv_heads), ("v", t.num_kv_heads), ("attn", t.num_heads)):
            want[f"{group}.layers.{part}"] = (gemma.depth, B, length, heads, gemma.head_dim)
        want |= {f"{group}.layers.out": (gemma.depth, B, length, gemma.width), f"{group}.final": (B, length, gemma.width)}
    assert {name: x.shape for name, x in taps.items()} == want
    assert taps["prefix.valid"].dtype == bool and taps["suffix.positions"].dtype.kind == "i"


def test_very_sharp_attention_stays_finite_in_every_arithmetic(batch, draws):
    sharp = {name: array * 500 if "q_proj" in name else array for name, array in PARAMS.items()}
    results = [forward(sharp, SPEC, batch, draws, ops=ops)["velocity"] for ops in (F64, NumpyOps(np.complex128), TorchOps(torch.float64))]
    assert relative(results[1].real, results[0]) < 1e-9 and relative(results[2], results[0]) < 1e-9
    assert forward(sharp, SPEC, batch, draws, ops=TorchOps(torch.float32))["velocity"].isfinite().all()


# ---- Parts against torch's own functions


def weight_of(name: str, layer: int | None = None) -> torch.Tensor:
    return torch.tensor(PARAMS[name] if layer is None else PARAMS[name][layer]).double()


def test_patch_embedding_is_a_convolution(batch, taps):
    images = torch.tensor(batch.observation.images).double().flatten(0, 1).permute(0, 3, 1, 2) / 127.5 - 1
    kernel = weight_of("vision.patch_embed.weight").permute(3, 2, 0, 1)
    want = functional.conv2d(images, kernel, weight_of("vision.patch_embed.bias"), stride=SPEC.vision.patch_size).flatten(2).transpose(1, 2)
    assert relative(taps["vision.embedded"].reshape(want.shape), want + weight_of("vision.pos_embed")) < 1e-12


def test_vision_layer_equals_torch_functions(taps):
    def get(name):
        return weight_of(f"vision.layers.{name}", 1)

    def norm(x, name):
        return functional.layer_norm(x, x.shape[-1:], get(f"{name}.scale"), get(f"{name}.bias"), 1e-6)

    x = torch.tensor(taps["vision.layers.out"][0]).flatten(0, 1)
    q, k, v = (torch.einsum("bpd,dnh->bnph", norm(x, "attn_norm"), get(f"{c}_proj.weight")) + get(f"{c}_proj.bias")[:, None] for c in "qkv")
    attention = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    x = x + attention.flatten(2) @ get("o_proj.weight").flatten(0, 1) + get("o_proj.bias")
    h = functional.gelu(norm(x, "mlp_norm") @ get("up_proj.weight") + get("up_proj.bias"), approximate="tanh")
    x = x + h @ get("down_proj.weight") + get("down_proj.bias")
    assert relative(taps["vision.layers.attn"][1].reshape(attention.shape), attention) < 1e-12
    assert relative(taps["vision.layers.out"][1].reshape(x.shape), x) < 1e-12


@pytest.mark.parametrize("group", ["trunk", "expert"])
def test_gemma_layer_equals_torch_functions(group, taps, batch):
    def get(name):
        return weight_of(f"{group}.layers.{name}", 1)

    def norm(x, name):
        unit = functional.rms_norm(x, x.shape[-1:], None, 1e-6)
        if group == "trunk":
            return unit * (1 + get(f"{name}.scale")), 1.0
        scale, shift, gate = (torch.einsum("bc,cmd->mbd", cond, get(f"{name}.modulation.weight")) + get(f"{name}.modulation.bias")[:, None])[:, :, None]
        return unit * (1 + scale) + shift, gate

    def rotate(x, positions):
        half = x.shape[-1] // 2
        angle = torch.tensor(positions)[:, :, None, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], -1)

    cond = torch.tensor(taps["time.cond"])
    x = torch.tensor(taps[f"{group}.layers.out"][0])
    positions = taps["prefix.positions" if group == "trunk" else "suffix.positions"]
    h, gate = norm(x, "attn_norm")
    q, k, v = (torch.einsum("btd,dnh->btnh", h, get(f"{c}_proj.weight")) for c in "qkv")
    assert relative(taps[f"{group}.layers.q"][1], rotate(q, positions)) < 1e-12
    assert relative(taps[f"{group}.layers.k"][1], rotate(k, positions)) < 1e-12
    assert relative(taps[f"{group}.layers.v"][1], v) < 1e-12
    keys, values = (torch.tensor(np.concatenate([taps[f"{g}.layers.{c}"][1] for g in ("trunk", "expert")], 1)).transpose(1, 2) for c in "kv")
    seen = [taps["prefix.valid"], ~batch.action_is_pad if group == "expert" else np.zeros_like(batch.action_is_pad)]
    mask = torch.tensor(np.concatenate(seen, 1))[:, None, None]
    q = rotate(q, positions).transpose(1, 2)
    attention = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    assert relative(taps[f"{group}.layers.attn"][1], attention) < 1e-12
    x = x + attention.flatten(2) @ get("o_proj.weight").flatten(0, 1) * gate
    h, gate = norm(x, "mlp_norm")
    x = x + functional.gelu(h @ get("gate_proj.weight"), approximate="tanh") * (h @ get("up_proj.weight")) @ get("down_proj.weight") * gate
    assert relative(taps[f"{group}.layers.out"][1], x) < 1e-12


def test_embeddings_and_heads_follow_the_equations(batch, draws, taps):
    time, width = float(draws.time[1]), SPEC.expert.width
    periods = [0.004 * 1000 ** (i / (width // 2 - 1)) for i in range(width // 2)]
    embedding = [math.sin(2 * math.pi * time / p) for p in periods] + [math.cos(2 * math.pi * time / p) for p in periods]
    assert relative(taps["time.embedding"][1], np.array(embedding)) < 1e-12
    hidden = torch.tensor(taps["time.embedding"])
    for name in ("time_mlp_in", "time_mlp_out"):
        hidden = functional.silu(hidden @ weight_of(f"{name}.weight") + weight_of(f"{name}.bias"))
    assert relative(taps["time.cond"], hidden) < 1e-12
    actions = batch.actions[1].astype(float) * ~batch.action_is_pad[1][:, None]  # what a step behind the end holds is not read
    x_t = time * draws.noise[1].astype(float) + (1 - time) * actions
    assert relative(taps["suffix.embedded"][1], x_t @ PARAMS["action_in_proj.weight"] + PARAMS["action_in_proj.bias"]) < 1e-12
    assert relative(taps["velocity"], taps["expert.final"] @ PARAMS["action_out_proj.weight"] + PARAMS["action_out_proj.bias"]) < 1e-12
    word = PARAMS["trunk.embed.weight"][batch.observation.tokens[2, 4]].astype(float) * math.sqrt(SPEC.trunk.width)
    assert relative(taps["prefix.embedded"][2, 3 * SPEC.vision.num_patches + 4], word) < 1e-12


def test_black_and_white_pixels_become_minus_one_and_one(batch, draws):
    black_white = np.where(batch.observation.images > 127, 255, 0).astype(np.uint8)
    scaled = np.where(black_white == 255, 1, -1).astype(np.float32)
    results = [forward(PARAMS, SPEC, with_observation(batch, images=images), draws, ops=F64)["velocity"] for images in (black_white, scaled)]
    np.testing.assert_array_equal(*results)


def test_attention_of_the_warm_parameters_is_not_flat(taps):
    q, k = taps["trunk.layers.q"][0, 1], taps["trunk.layers.k"][0, 1]
    logits = np.einsum("tkgh,skh->tkgs", q.reshape(len(q), 2, 3, -1), k) / math.sqrt(q.shape[-1])
    logits = logits[..., taps["prefix.valid"][1]]
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    assert np.median(1 / weights.sum(-1)) > 8 / logits.shape[-1]


# ---- Masks, positions, loss, sampling


def test_content_of_padding_changes_no_bit_of_anything_valid(batch, draws, taps):
    rng, seen = np.random.default_rng(1), batch.observation
    images = np.where(seen.image_mask[..., None, None, None], seen.images, rng.integers(0, 256, seen.images.shape, np.uint8))
    tokens = np.where(seen.token_mask, seen.tokens, rng.integers(0, SPEC.vocab_size, seen.tokens.shape, np.int32))
    padded = batch.action_is_pad[:, :, None]
    other = dataclasses.replace(with_observation(batch, images=images, tokens=tokens), actions=np.where(padded, batch.actions + 3, batch.actions))
    noise = dataclasses.replace(draws, noise=np.where(padded, draws.noise - 2, draws.noise))
    assert padded.any() and not seen.token_mask.all() and not seen.image_mask.all()
    scrambled = forward(PARAMS, SPEC, other, noise, ops=F64)
    np.testing.assert_array_equal(scrambled["trunk.layers.out"][:, taps["prefix.valid"]], taps["trunk.layers.out"][:, taps["prefix.valid"]])
    np.testing.assert_array_equal(scrambled["velocity"][~batch.action_is_pad], taps["velocity"][~batch.action_is_pad])
    for options in ({}, {"loss_dims": "real"}):
        before, after = (loss(PARAMS, SPEC, *data, ops=F64, **options) for data in ((batch, draws), (other, noise)))
        np.testing.assert_array_equal(before["per_sample"], after["per_sample"])
        np.testing.assert_array_equal(before["per_dim"], after["per_dim"])
    counted = [forward(PARAMS, SPEC, *data, ops=F64, padded_steps="count")["velocity"] for data in ((batch, draws), (other, noise))]
    assert np.abs(counted[0] - counted[1])[~batch.action_is_pad].max() > 1e-2


def test_positions_count_valid_tokens_only_also_behind_a_missing_leading_camera(batch, draws, taps):
    assert not batch.observation.image_mask[0, 0] and batch.observation.image_mask[0, 1]
    patches, steps = SPEC.vision.num_patches, ~batch.action_is_pad
    np.testing.assert_array_equal(taps["prefix.positions"][0, : patches + 2], [0] * patches + [0, 1])
    for b, valid in enumerate(np.concatenate([taps["prefix.valid"], steps], 1)):
        want = [max(sum(valid[: i + 1]) - 1, 0) for i in range(len(valid))]
        np.testing.assert_array_equal(np.concatenate([taps["prefix.positions"], taps["suffix.positions"]], 1)[b], want)
    counted = forward(PARAMS, SPEC, batch, draws, ops=F64, padded_steps="count")["suffix.positions"]
    np.testing.assert_array_equal(counted, taps["prefix.valid"].sum(1)[:, None] + np.arange(SPEC.action_horizon))


def test_a_missing_leading_camera_equals_a_batch_without_it(batch, draws):
    seen = batch.observation
    mask = seen.image_mask & [False, True, True]
    masked = forward(PARAMS, SPEC, with_observation(batch, image_mask=mask), draws, ops=F64)
    absent = forward(PARAMS, SPEC, with_observation(batch, images=seen.images[:, 1:], image_mask=mask[:, 1:]), draws, ops=F64)
    assert relative(absent["velocity"], masked["velocity"]) < 1e-12


def test_prefix_never_sees_the_suffix_and_action_steps_see_each_other(batch, draws, taps):
    noise = draws.noise.copy()
    noise[:, 1] += 1
    other = forward(PARAMS, SPEC, batch, dataclasses.replace(draws, noise=noise), ops=F64)
    np.testing.assert_array_equal(other["trunk.layers.out"], taps["trunk.layers.out"])
    first_sees_second = np.abs(other["velocity"] - taps["velocity"])[:, 0].max(-1) > 1e-3
    np.testing.assert_array_equal(first_sees_second, ~batch.action_is_pad[:, 1])


@pytest.mark.parametrize(("padded_steps", "loss_dims"), [("ignore", "model"), ("ignore", "real"), ("count", "model"), ("count", "real")])
def test_loss_is_the_mean_over_counted_steps_and_dims(padded_steps, loss_dims, batch, draws):
    got = loss(PARAMS, SPEC, batch, draws, ops=F64, padded_steps=padded_steps, loss_dims=loss_dims)
    velocity = forward(PARAMS, SPEC, batch, draws, ops=F64, padded_steps=padded_steps)["velocity"]
    squares = (velocity - (draws.noise.astype(float) - batch.actions)) ** 2
    per_sample, per_dim = [[] for _ in range(3)], [[] for _ in range(SPEC.action_dim)]
    for b, a, m in np.ndindex(squares.shape):
        if (padded_steps == "count" or not batch.action_is_pad[b, a]) and (loss_dims == "model" or not batch.action_dim_is_pad[b, m]):
            per_sample[b].append(squares[b, a, m])
            per_dim[m].append(squares[b, a, m])
    assert relative(got["per_sample"], np.array([np.mean(x) for x in per_sample])) < 1e-12
    assert relative(got["per_dim"], np.array([np.mean(x) if x else 0.0 for x in per_dim])) < 1e-12
    assert abs(got["loss"] - np.mean([np.mean(x) for x in per_sample])) < 1e-12


def test_token_logits_are_the_trunk_alone_times_the_table(batch, taps):
    want = taps["trunk.final"][:, -TOKEN_LEN:] @ PARAMS["trunk.embed.weight"].T
    assert relative(token_logits(PARAMS, SPEC, batch.observation, ops=F64), want) < 1e-12
    assert token_logits(PARAMS, SPEC, batch.observation, ops=TorchOps(torch.bfloat16)).dtype == torch.float32


def test_sampling_walks_from_noise_by_the_velocity_of_forward(batch, draws):
    steps = sample_actions(PARAMS, SPEC, batch.observation, draws.noise, 4, ops=F64)
    assert len(steps) == 4
    # forward mixes x_t from noise and actions; with both equal to x it is x at any time.
    for k, (x, following) in enumerate(zip([draws.noise.astype(float), *steps[:-1]], steps, strict=True)):
        at = dataclasses.replace(batch, actions=x)
        velocity = forward(PARAMS, SPEC, at, Draws(x, np.full(3, 1 - k / 4)), ops=F64, padded_steps="count")["velocity"]
        assert relative(following, x - velocity / 4) < 1e-12
