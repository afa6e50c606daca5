"""The oracles of level 10 against equations written out in NumPy, and the promises they make to their callers."""

import dataclasses
import importlib.metadata
import os
import socket
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from parity import oracles
from parity.cases import warm_params
from pi05.batch import Batch, Draws, make_draws, synthetic_batch
from pi05.compare import relative_error
from pi05.errors import ParamsError, SpecError
from pi05.params import dead_params, philox, shapes, write
from pi05.spec import ModelSpec

SEED = 11
LIMIT = {"float64": 1e-12, "float32": 1e-5}  # double precision throughout; the noise of float32 over one or two layers is 2e-6
STEP = 1e-30  # of a complex step derivative, which has no cancellation
NO_GRADIENT = "vision.layers.k_proj.bias"  # softmax ignores a shift, so this gradient is rounding noise around zero
SPEC = ModelSpec.tiny().replace(vision__depth=2)
Params = Mapping[str, np.ndarray]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.real.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _layer_norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * scale + bias


def _rms_norm(x: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale)


def _siglip(params: Params, images: np.ndarray) -> np.ndarray:
    """SigLIP and its projection, canonical parameters, any dtype numpy computes in."""
    p = {name.removeprefix("vision."): value for name, value in params.items()}
    size, edge = p["patch_embed.weight"].shape[0], images.shape[1]
    rows = [
        np.einsum("nijr,ijrd->nd", images[:, y : y + size, x : x + size], p["patch_embed.weight"]) for y in range(0, edge, size) for x in range(0, edge, size)
    ]
    x = np.stack(rows, 1) + p["patch_embed.bias"] + p["pos_embed"]
    for i in range(SPEC.vision.depth):
        h = _layer_norm(x, p["layers.attn_norm.scale"][i], p["layers.attn_norm.bias"][i])
        q, k, v = (np.einsum("btd,dnh->btnh", h, p[f"layers.{c}_proj.weight"][i]) + p[f"layers.{c}_proj.bias"][i] for c in "qkv")
        weights = _softmax(np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1]))
        x = x + np.einsum("bnts,bsnh,nhd->btd", weights, v, p["layers.o_proj.weight"][i], optimize=True) + p["layers.o_proj.bias"][i]
        h = _layer_norm(x, p["layers.mlp_norm.scale"][i], p["layers.mlp_norm.bias"][i])
        h = _gelu(h @ p["layers.up_proj.weight"][i] + p["layers.up_proj.bias"][i])
        x = x + h @ p["layers.down_proj.weight"][i] + p["layers.down_proj.bias"][i]
    return _layer_norm(x, p["final_norm.scale"], p["final_norm.bias"]) @ p["head.weight"] + p["head.bias"]


def _rotate(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    angle = positions[:, :, None, None] * 10_000.0 ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], -1)


def _gemma_layer(params: Params, which: str, x: np.ndarray, positions: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """One Gemma layer, canonical parameters of that layer, any dtype numpy computes in."""
    p = {name.removeprefix(f"{which}.layers."): value for name, value in params.items()}
    h = _rms_norm(x, p.get("attn_norm.scale", 0.0))
    q, k, v = (np.einsum("btd,dnh->btnh", h, p[f"{c}_proj.weight"]) for c in "qkv")
    shared = q.shape[2] // k.shape[2]  # consecutive query heads share a key head
    q, k, v = _rotate(q, positions), _rotate(k, positions).repeat(shared, 2), v.repeat(shared, 2)
    logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    weights = _softmax(np.where(valid[:, None, None, :], logits, -np.inf))
    x = x + np.einsum("bnts,bsnh,nhd->btd", weights, v, p["o_proj.weight"], optimize=True)
    h = _rms_norm(x, p.get("mlp_norm.scale", 0.0))
    return x + (_gelu(h @ p["gate_proj.weight"]) * (h @ p["up_proj.weight"])) @ p["down_proj.weight"]


def _slopes(function: Callable[[Params], np.ndarray], params: Params, grads: Params, cotangent: np.ndarray) -> dict[str, tuple[float, float, float]]:
    """For each tensor and a random direction: the slope by its gradient, the slope by a complex step, and the size of the terms summed."""
    out = {}
    for name, value in params.items():
        direction = philox(SEED, name).standard_normal(value.shape)
        moved = function({**params, name: value + 1j * STEP * direction})
        terms = grads[name] * direction
        out[name] = float(terms.sum()), float((moved.imag / STEP * cotangent).sum()), float(np.linalg.norm(terms))
    return out


def _worst_error(got: np.ndarray, grads: Params, function: Callable[[Params], np.ndarray], params: Params, cotangent: np.ndarray) -> float:
    """The largest error of an output or of a gradient's slope, relative to the size of the tensor."""
    assert grads.keys() == params.keys()
    assert {name: value.shape for name, value in grads.items()} == {name: value.shape for name, value in params.items()}
    slopes = _slopes(function, params, grads, cotangent)
    scale = max(size for _, _, size in slopes.values())
    errors = {name: abs(by_grad - by_step) / (scale if name == NO_GRADIENT else size) for name, (by_grad, by_step, size) in slopes.items()}
    return max(relative_error(got, function(params)), *errors.values())


def _siglip_error(dtype: oracles.Dtype) -> float:
    params = {name: value.astype(np.float64) for name, value in warm_params(SPEC).items() if name.startswith("vision.")}
    rng, edge = philox(SEED, "siglip"), SPEC.vision.image_size
    images, cotangent = rng.uniform(-1, 1, (2, edge, edge, 3)), rng.standard_normal((2, SPEC.vision.num_patches, SPEC.trunk.width))
    tokens, grads = oracles.siglip(SPEC, params, images, cotangent, dtype)
    assert tokens.dtype == dtype and {grad.dtype for grad in grads.values()} == {np.dtype(dtype)}
    return _worst_error(tokens, grads, lambda p: _siglip(p, images), params, cotangent)


def _gemma_error(dtype: oracles.Dtype, which: str = "trunk") -> float:
    whole, layer = warm_params(SPEC), 1
    used = [name for name in whole if name.startswith(f"{which}.layers.") and "modulation" not in name]
    params = {name: whole[name][layer].astype(np.float64) for name in used}
    width = {"trunk": SPEC.trunk.width, "expert": SPEC.expert.width}[which]
    rng = philox(SEED, "gemma")
    x, cotangent = rng.standard_normal((2, 2, 13, width))
    valid = rng.random((2, 13)) < 0.7
    positions = np.array([[3], [600]]) + np.cumsum(valid, 1)  # near and far: a rounded frequency shows at a large position
    out, grads = oracles.gemma_layer(SPEC, whole, layer, x, positions, valid, cotangent, dtype, which=which)
    assert out.dtype == dtype and {grad.dtype for grad in grads.values()} == {np.dtype(dtype)}
    return _worst_error(out, grads, lambda p: _gemma_layer(p, which, x, positions, valid), params, cotangent)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_siglip_and_its_gradients_equal_the_equations(dtype):
    assert _siglip_error(dtype) < LIMIT[dtype]


@pytest.mark.parametrize(("dtype", "which"), [("float64", "trunk"), ("float64", "expert"), ("float32", "trunk"), ("float32", "expert")])
def test_gemma_layer_and_its_gradients_equal_the_equations(dtype, which):
    assert _gemma_error(dtype, which) < LIMIT[dtype]


def _swap_keys_and_values(place: oracles.Place) -> oracles.Place:
    other = {"k_proj": "v_proj", "v_proj": "k_proj"}
    found = next((word for word in other if word in place.key), None)
    return place if found is None else place._replace(key=place.key.replace(found, other[found]))


@pytest.mark.parametrize(("maker", "error"), [("_siglip_places", _siglip_error), ("_gemma_layer_places", _gemma_error)])
def test_swapped_keys_and_values_are_noticed(monkeypatch, maker, error):
    places = getattr(oracles, maker)
    monkeypatch.setattr(oracles, maker, lambda *names: {name: _swap_keys_and_values(place) for name, place in places(*names).items()})
    assert error("float64") > 1e-3


def test_interleaved_heads_are_noticed(monkeypatch):
    def interleave(array: np.ndarray) -> np.ndarray:
        return array.reshape(array.shape[0], -1).T if array.ndim == 2 else array.swapaxes(1, 2).reshape(array.shape[0], -1).T

    monkeypatch.setitem(oracles._LAYOUTS, "in_out", (interleave, oracles._LAYOUTS["in_out"][1]))
    assert _gemma_error("float64") > 1e-3


def test_lerobot_places_are_those_of_the_published_column_of_the_parameter_table():
    params = warm_params(oracles.LEROBOT_SPEC)
    ours, theirs = dict(write(params.items(), oracles.LEROBOT_SPEC, "published")), oracles.to_oracle(params, oracles.lerobot_places())
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[key], theirs[key]) for key in ours)


def test_parameters_survive_the_way_to_an_oracle_and_back_bit_for_bit():
    params, places = warm_params(oracles.LEROBOT_SPEC), oracles.lerobot_places()
    back = oracles.to_canonical(oracles.to_oracle(params, places), places, params)
    assert back.keys() == params.keys()
    assert all(np.array_equal(back[name], params[name]) for name in params)


def _lerobot_inputs(batch_size: int = 2) -> tuple[ModelSpec, dict[str, np.ndarray], Batch, Draws]:
    spec = oracles.LEROBOT_SPEC
    batch = synthetic_batch(spec, batch_size, seed=SEED, token_len=9, padded_actions=False)
    batch.observation.tokens[0, 0] = 0  # whose embedding LeRobot, left alone, would not train
    return spec, warm_params(spec), batch, make_draws(spec, SEED, 0, np.arange(batch_size))


def _with_observation(batch: Batch, **changes: np.ndarray) -> Batch:
    return dataclasses.replace(batch, observation=dataclasses.replace(batch.observation, **changes))


def test_lerobot_loss_is_the_squared_error_of_the_velocity():
    spec, params, batch, draws = _lerobot_inputs()
    out = oracles.lerobot(spec, params, batch, draws, 1, "float64")
    target = draws.noise.astype(np.float64) - batch.actions
    assert relative_error(out["loss_per_element"], (target - out["velocity"]) ** 2) < 1e-14


def test_lerobot_takes_one_euler_step_against_the_velocity():
    spec, params, batch, draws = _lerobot_inputs()
    draws = Draws(noise=draws.noise, time=np.ones_like(draws.time))  # so that x_t is the noise, where sampling starts
    out = oracles.lerobot(spec, params, batch, draws, 1, "float64")
    assert relative_error(out["actions"], draws.noise - out["velocity"]) < 1e-12


def test_lerobot_reads_rows_of_an_image_as_rows():
    spec, params, batch, draws = _lerobot_inputs()
    corner = np.zeros_like(params["vision.patch_embed.weight"])
    corner[0, -1] = params["vision.patch_embed.weight"][0, -1]  # each patch is seen through its upper right pixel alone
    params, size = params | {"vision.patch_embed.weight": corner}, spec.vision.patch_size
    velocity = oracles.lerobot(spec, params, batch, draws, 1)["velocity"]
    for rows, columns, matters in ((slice(0, None, size), slice(size - 1, None, size), True), (slice(size - 1, None, size), slice(0, None, size), False)):
        images = batch.observation.images.copy()
        images[:, :, rows, columns] = 255 - images[:, :, rows, columns]
        other = oracles.lerobot(spec, params, _with_observation(batch, images=images), draws, 1)["velocity"]
        assert np.array_equal(other, velocity) != matters


def test_lerobot_in_double_precision_does_not_round_the_images():
    spec, params, batch, draws = _lerobot_inputs()
    rounded = _with_observation(batch, images=(batch.observation.images / 255 * 2 - 1).astype(np.float32))
    exact, other = (oracles.lerobot(spec, params, each, draws, 1, "float64")["velocity"] for each in (batch, rounded))
    assert 1e-11 < relative_error(other, exact) < 1e-6


def test_lerobot_sees_what_the_masks_allow_and_nothing_else():
    spec, params, batch, draws = _lerobot_inputs(3)
    seen = batch.observation
    assert not seen.image_mask.all() and not seen.token_mask.all()
    out = oracles.lerobot(spec, params, batch, draws, 1)
    masked_images = np.where(seen.image_mask[:, :, None, None, None], seen.images, 255 - seen.images)
    masked_tokens = np.where(seen.token_mask, seen.tokens, spec.vocab_size - 1 - seen.tokens)
    same = oracles.lerobot(spec, params, _with_observation(batch, images=masked_images, tokens=masked_tokens), draws, 1)
    assert all(np.array_equal(out[key], same[key]) for key in ("loss_per_element", "actions"))
    for camera in range(len(spec.cameras)):
        images = seen.images.copy()
        images[:, camera] = 255 - images[:, camera]
        other = oracles.lerobot(spec, params, _with_observation(batch, images=images), draws, 1)
        changed = np.abs(other["velocity"] - out["velocity"]).max((1, 2)) > 1e-6
        assert np.array_equal(changed, seen.image_mask[:, camera])


def test_lerobot_gradients_are_slopes_of_its_loss():
    # In double precision only: a forgotten float32 inside would spoil the difference of two losses by 1e-3 of it.
    spec, params, batch, draws = _lerobot_inputs()
    params = {name: value.astype(np.float64) for name, value in params.items()}
    directions = {name: philox(SEED, name).standard_normal(value.shape) for name, value in params.items()}
    grads = oracles.lerobot(spec, params, batch, draws, 1, "float64")["grads"]
    step, losses = 1e-6, []
    for sign in (1, -1):
        moved = {name: value + sign * step * directions[name] for name, value in params.items()}
        losses.append(oracles.lerobot(spec, moved, batch, draws, 1, "float64")["loss_per_element"].mean())
    slope = sum(float((grads[name] * directions[name]).sum()) for name in grads)
    assert abs((losses[0] - losses[1]) / (2 * step) / slope - 1) < 1e-7


def test_lerobot_returns_every_gradient_and_names_those_it_does_not_have():
    spec, params, batch, draws = _lerobot_inputs()
    out = oracles.lerobot(spec, params, batch, draws, 2)
    assert {name: grad.shape for name, grad in out["grads"].items()} == shapes(spec)
    without_path = {name for name, reason in dead_params(spec).items() if reason == "no path to the loss"}
    assert set(out["no_grad"]) == without_path - {"trunk.layers.2.q_proj.weight"}
    assert not out["grads"]["trunk.layers.q_proj.weight"][2].any()
    assert all(grad.any() for name, grad in out["grads"].items() if name != "trunk.final_norm.scale")


def test_running_an_oracle_leaves_no_trace_and_opens_no_connection(monkeypatch):
    from lerobot.policies.pi05 import modeling_pi05

    def refuse(*args):
        raise AssertionError(f"connection to {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    spec, params, batch, draws = _lerobot_inputs(1)
    copies = {name: value.copy() for name, value in params.items()}
    before = torch.get_default_dtype(), torch.get_rng_state(), dict(vars(modeling_pi05)), dict(os.environ)
    oracles.lerobot(spec, params, batch, draws, 1, "float64")
    assert torch.get_default_dtype() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert dict(vars(modeling_pi05)) == before[2] and dict(os.environ) == before[3]
    assert all(np.array_equal(params[name], copies[name]) for name in params)


def test_what_an_oracle_cannot_do_is_said_with_the_cure(monkeypatch):
    spec, params, batch, draws = _lerobot_inputs(1)
    with pytest.raises(SpecError, match="LEROBOT_SPEC"):
        oracles.lerobot(spec.replace(trunk__num_heads=4, expert__num_heads=4), params, batch, draws)
    with pytest.raises(ParamsError, match="action_in_proj.bias"):
        oracles.lerobot(spec, {name: value for name, value in params.items() if name != "action_in_proj.bias"}, batch, draws)
    other = {name: place._replace(key=place.key.replace("fc1", "up")) for name, place in oracles._siglip_places("tower.vision_model.", "projector.").items()}
    with monkeypatch.context() as patch, pytest.raises(oracles.OracleError, match="lacks the tensors .*fc1|lacks the tensors .*up"):
        patch.setattr(oracles, "_siglip_places", lambda *names: other)
        oracles.siglip(SPEC, warm_params(SPEC), np.zeros((1, 70, 70, 3)), np.zeros((1, 25, 96)))
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.17.0" if name == "transformers" else version(name))
    with pytest.raises(oracles.OracleError, match=r"supports transformers .*5\.4.*5\.17\.0 is installed"):
        oracles.lerobot(spec, params, batch, draws)
