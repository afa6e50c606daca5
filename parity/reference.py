"""The third implementation of Pi0.5: its equations, once, over NumPy or PyTorch arrays. It judges both backends and is nobody's backend.

    NumpyOps(np.float64)     the truth
    NumpyOps(np.complex128)  derivatives of the truth without automatic differentiation, by a complex step (Squire and Trapp 1998)
    TorchOps(torch.bfloat16) the naive same-precision implementation, whose error is the yardstick for the backends' error; torch's
                             autograd differentiates it. Also for float32, and float64 to check the other two.

Parameters: canonical name -> canonical array (see pi05/params.py); weights are cast where they are used. Batches and draws are NumPy.
Constants, tables and shapes are written here again on purpose: taken from pi05.spec, a wrong one would judge itself right.

Axes: see pi05/spec.py; also E width of the trunk, W width of the expert where D is another width, J modulation slot (scale, shift, gate),
    R = H / 2. In the vision tower B is an image (sample and camera), and y, x, i, j, r are patch row and column, pixel row and column, colour.
Dtypes: `low` is the compute dtype: residual streams and operands of matrix products. `full` is at least float32: image scaling, patch and
    position embedding, norms and modulation, rotary embedding, attention logits and softmax, time, action projections, loss.
Every function works on complex arrays: no abs, no comparison, no maximum except of real parts.

Sources: SigLIP (Zhai et al. 2023), Gemma (Gemma Team 2024), adaRMS and flow matching as in Pi0.5 (Physical Intelligence 2025).
"""

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Mapping

import numpy as np
import torch

from pi05.batch import Array, Batch, Draws, LossDims, Observation, PaddedSteps
from pi05.spec import ModelSpec

EPS = 1e-6
ROTARY_BASE = 10_000.0
LONGEST_PERIOD, SHORTEST_PERIOD = 4.0, 4e-3
COMPLEX_STEP = 1e-30  # its square vanishes beside 1, so the derivative has no truncation error and no cancellation

Params = Mapping[str, Array]
Taps = dict[str, Array]


class NumpyOps:
    """Array operations in NumPy; `dtype` is float32, float64 or complex128."""

    def __init__(self, dtype: np.typing.DTypeLike):
        self.low_dtype = np.dtype(dtype)
        self.full_dtype = np.promote_types(self.low_dtype, np.float32)
        self.exp, self.tanh, self.sqrt, self.sin, self.cos = np.exp, np.tanh, np.sqrt, np.sin, np.cos
        self.where, self.concatenate, self.stack = np.where, np.concatenate, np.stack
        self.einsum, self.take = functools.partial(np.einsum, optimize=True), operator.getitem

    def low(self, x: Array) -> Array:
        return np.asarray(x).astype(self.low_dtype)

    def full(self, x: Array) -> Array:
        return np.asarray(x).astype(self.full_dtype)

    def max_real(self, x: Array) -> Array:
        """Maximum of the real parts over the last axis, kept; a constant to any derivative."""
        return x.real.max(axis=-1, keepdims=True)


class TorchOps:
    """Array operations in PyTorch on the CPU, differentiable; `dtype` is bfloat16, float32 or float64."""

    def __init__(self, dtype: torch.dtype):
        self.low_dtype = dtype
        self.full_dtype = torch.promote_types(dtype, torch.float32)
        self.exp, self.tanh, self.sqrt, self.sin, self.cos = torch.exp, torch.tanh, torch.sqrt, torch.sin, torch.cos
        self.concatenate, self.stack, self.einsum = torch.cat, torch.stack, torch.einsum

    def _tensor(self, x: Array) -> torch.Tensor:
        return x if isinstance(x, torch.Tensor) else torch.tensor(x)

    def low(self, x: Array) -> torch.Tensor:
        return self._tensor(x).to(self.low_dtype)

    def full(self, x: Array) -> torch.Tensor:
        return self._tensor(x).to(self.full_dtype)

    def take(self, table: Array, rows: np.ndarray) -> torch.Tensor:
        return self._tensor(table)[torch.tensor(rows, dtype=torch.int64)]

    def where(self, mask: np.ndarray, x: torch.Tensor, other: float) -> torch.Tensor:
        return torch.where(torch.tensor(mask), x, other)

    def max_real(self, x: torch.Tensor) -> torch.Tensor:
        """Maximum over the last axis, kept; a constant to any derivative."""
        return x.detach().amax(dim=-1, keepdim=True)


Ops = NumpyOps | TorchOps


@dataclasses.dataclass(frozen=True)
class _Weights:
    """Parameters, cast at use; `layer` picks a slice of a stacked tensor before the cast."""

    params: Params
    ops: Ops

    def low(self, name: str, layer: int | None = None) -> Array:
        return self.ops.low(self.params[name] if layer is None else self.params[name][layer])

    def full(self, name: str, layer: int | None = None) -> Array:
        return self.ops.full(self.params[name] if layer is None else self.params[name][layer])


@dataclasses.dataclass(frozen=True)
class _Stream:
    """The tokens of one Gemma: x [B, T, D], positions int[B, T], and mask bool[B, S], the keys that each of its queries may see."""

    x: Array
    positions: np.ndarray
    mask: np.ndarray


# ---- Public functions


def forward(params: Params, spec: ModelSpec, batch: Batch, draws: Draws, *, ops: Ops, padded_steps: PaddedSteps = "ignore") -> Taps:
    """Runs the network on the noised actions of `batch`; returns named intermediates, "velocity" [B, A, M] last.

    padded_steps: "ignore" hides steps behind the end of the episode from attention and positions; "count" does as openpi, which knows none.
    Layers are stacked on the leading axis. trunk and expert q and k are taken after rotary embedding and before scaling.
    """
    x_t_BAM, _ = _flow(batch, draws, ops, padded_steps)
    return _network(_Weights(params, ops), spec, batch.observation, x_t_BAM, draws.time, _counted_steps(batch, padded_steps))


def loss(
    params: Params, spec: ModelSpec, batch: Batch, draws: Draws, *, ops: Ops, padded_steps: PaddedSteps = "ignore", loss_dims: LossDims = "model"
) -> dict[str, Array]:
    """Flow-matching loss: mean squared error of the velocity over counted steps and dims.

    Returns "per_sample" [B], its mean "loss", and "per_dim" [M], the mean over all counted steps of the batch (0 where no sample counts the dim).
    loss_dims: "model" counts every dim; "real" only those the robot has.
    """
    velocity_BAM = forward(params, spec, batch, draws, ops=ops, padded_steps=padded_steps)["velocity"]
    _, target_BAM = _flow(batch, draws, ops, padded_steps)
    dims_BM = {"model": np.ones_like(batch.action_dim_is_pad), "real": ~batch.action_dim_is_pad}[loss_dims]
    counted_BAM = _counted_steps(batch, padded_steps)[:, :, None] & dims_BM[:, None, :]
    error_BAM = velocity_BAM - target_BAM
    squared_BAM = ops.where(counted_BAM, error_BAM * error_BAM, 0.0)
    per_sample_B = ops.einsum("BAM->B", squared_BAM) / ops.full(counted_BAM.sum((1, 2)))
    per_dim_M = ops.einsum("BAM->M", squared_BAM) / ops.full(counted_BAM.sum((0, 1)).clip(1))
    return {"per_sample": per_sample_B, "per_dim": per_dim_M, "loss": per_sample_B.mean()}


def token_logits(params: Params, spec: ModelSpec, observation: Observation, *, ops: Ops) -> Array:
    """Next-token logits [B, T, V] of the prompt: the prefix alone through the trunk, times the embedding table, in at least float32."""
    weights = _Weights(params, ops)
    prefix = _embed_prefix(weights, spec, observation, {})
    final_BPD = _transformers(weights, spec, {"trunk": prefix}, None, {})["trunk"]
    text_BTD = final_BPD[:, prefix.mask.shape[1] - observation.tokens.shape[1] :]
    return ops.einsum("BTD,VD->BTV", ops.full(text_BTD), weights.full("trunk.embed.weight"))


def sample_actions(params: Params, spec: ModelSpec, observation: Observation, noise: np.ndarray, num_steps: int, *, ops: Ops) -> list[Array]:
    """Integrates the flow from `noise` [B, A, M] at time 1 to actions at time 0; returns x [B, A, M] after each Euler step.

    The prefix is computed anew in every step, so the result depends on no cache.
    """
    batch, horizon, _ = noise.shape
    x_BAM, out = ops.full(noise), []
    for step in range(num_steps):
        time_B = np.full(batch, 1.0 - step / num_steps)
        velocity_BAM = _network(_Weights(params, ops), spec, observation, x_BAM, time_B, np.ones((batch, horizon), bool))["velocity"]
        x_BAM = x_BAM + (-1.0 / num_steps) * velocity_BAM
        out.append(x_BAM)
    return out


def directional_derivative(
    params: Params,
    spec: ModelSpec,
    batch: Batch,
    draws: Draws,
    name: str,
    direction: np.ndarray,
    *,
    padded_steps: PaddedSteps = "ignore",
    loss_dims: LossDims = "model",
) -> float:
    """Derivative of the loss along `direction` (of the canonical shape) of parameter `name`, exact to rounding of float64.

    By a complex step: Im loss(p + i h d) / h. `params` are real NumPy arrays.
    """
    moved = {**params, name: np.asarray(params[name], np.float64) + 1j * COMPLEX_STEP * np.asarray(direction, np.float64)}
    ops = NumpyOps(np.complex128)
    return float(loss(moved, spec, batch, draws, ops=ops, padded_steps=padded_steps, loss_dims=loss_dims)["loss"].imag / COMPLEX_STEP)


# ---- The model, outside in


def _flow(batch: Batch, draws: Draws, ops: Ops, padded_steps: PaddedSteps) -> tuple[Array, Array]:
    """x_t and the velocity that leads from actions (time 0) to noise (time 1); steps that are not counted have action 0."""
    actions_BAM = ops.full(np.where(_counted_steps(batch, padded_steps)[:, :, None], batch.actions, 0.0))
    noise_BAM, time_B11 = ops.full(draws.noise), ops.full(draws.time)[:, None, None]
    return time_B11 * noise_BAM + (1.0 - time_B11) * actions_BAM, noise_BAM - actions_BAM


def _counted_steps(batch: Batch, padded_steps: PaddedSteps) -> np.ndarray:
    return {"ignore": ~batch.action_is_pad, "count": np.ones_like(batch.action_is_pad)}[padded_steps]


def _network(w: _Weights, spec: ModelSpec, observation: Observation, x_t_BAM: Array, time_B: Array, suffix_valid_BA: np.ndarray) -> Taps:
    ops, taps = w.ops, {}
    prefix = _embed_prefix(w, spec, observation, taps)
    cond_BW = _embed_time(w, spec, time_B, taps)
    x_BAW = ops.low(_linear(w, "action_in_proj", x_t_BAM))
    prefix_valid_BP = prefix.mask
    valid_BS = np.concatenate([prefix_valid_BP, suffix_valid_BA], axis=1)
    suffix_positions_BA = _positions(valid_BS)[:, prefix_valid_BP.shape[1] :]
    # A mask over keys alone: whether a query is padding changes nothing anybody reads, and no row is ever empty.
    prefix_mask_BS = np.concatenate([prefix_valid_BP, np.zeros_like(suffix_valid_BA)], axis=1)
    streams = {"trunk": dataclasses.replace(prefix, mask=prefix_mask_BS), "expert": _Stream(x_BAW, suffix_positions_BA, valid_BS)}
    final = _transformers(w, spec, streams, cond_BW, taps)
    taps.update({"suffix.positions": suffix_positions_BA, "suffix.embedded": x_BAW})
    taps["velocity"] = _linear(w, "action_out_proj", final["expert"])
    return taps


def _positions(valid_BS: np.ndarray) -> np.ndarray:
    """A padding token repeats the position before it; before the first valid token that would be -1, so 0."""
    return (np.cumsum(valid_BS, axis=1) - 1).clip(0)


def _embed_prefix(w: _Weights, spec: ModelSpec, observation: Observation, taps: Taps) -> _Stream:
    """Image tokens camera by camera, then the prompt; the stream's mask is the prefix's own validity."""
    ops = w.ops
    image_BCPE = _vision(w, spec, observation.images, taps)
    batch, cameras, patches, width = image_BCPE.shape
    rows_BTD = ops.full(ops.take(w.params["trunk.embed.weight"], observation.tokens))
    text_BTD = ops.low(rows_BTD * math.sqrt(width))
    x_BPD = ops.concatenate([image_BCPE.reshape(batch, cameras * patches, width), text_BTD], 1)
    valid_BP = np.concatenate([np.repeat(observation.image_mask, patches, axis=1), observation.token_mask], axis=1)
    taps.update({"prefix.embedded": x_BPD, "prefix.valid": valid_BP, "prefix.positions": _positions(valid_BP)})
    return _Stream(x_BPD, taps["prefix.positions"], valid_BP)


def _embed_time(w: _Weights, spec: ModelSpec, time_B: Array, taps: Taps) -> Array:
    """Sines and cosines of the flow time at geometrically spaced periods, longest last; then two layers, each followed by a swish."""
    ops = w.ops
    period = SHORTEST_PERIOD * (LONGEST_PERIOD / SHORTEST_PERIOD) ** np.linspace(0.0, 1.0, spec.expert.width // 2)
    angle_BR = ops.full(time_B)[:, None] * ops.full(2.0 * math.pi / period)
    embedding_BW = ops.concatenate([ops.sin(angle_BR), ops.cos(angle_BR)], 1)
    hidden_BW = _swish(ops, _linear(w, "time_mlp_in", embedding_BW))
    cond_BW = _swish(ops, _linear(w, "time_mlp_out", hidden_BW))
    taps.update({"time.embedding": embedding_BW, "time.cond": cond_BW})
    return cond_BW


# ---- SigLIP


def _vision(w: _Weights, spec: ModelSpec, images: np.ndarray, taps: Taps) -> Array:
    """Tokens [B, C, P, E] of uint8 or float images [B, C, Y, X, 3]."""
    ops, (batch, cameras, edge, _, colours), patch = w.ops, images.shape, spec.vision.patch_size
    grid = edge // patch
    pixels = ops.full(images) / 255.0 * 2.0 - 1.0 if images.dtype == np.uint8 else ops.full(images)
    pixels_Byixjr = pixels.reshape(batch * cameras, grid, patch, grid, patch, colours)
    x_BPD = ops.einsum("Byixjr,ijrD->ByxD", pixels_Byixjr, w.full("vision.patch_embed.weight")).reshape(batch * cameras, grid * grid, -1)
    x_BPD = ops.low(x_BPD + w.full("vision.patch_embed.bias") + w.full("vision.pos_embed"))

    def per_camera(x: Array) -> Array:
        return x.reshape(batch, cameras, *x.shape[1:])

    taps["vision.embedded"] = per_camera(x_BPD)
    attentions, outs = [], []
    for layer in range(spec.vision.depth):
        attention_BPNH, x_BPD = _vision_layer(w, layer, x_BPD)
        attentions.append(per_camera(attention_BPNH))
        outs.append(per_camera(x_BPD))
    taps.update({"vision.layers.attn": ops.stack(attentions), "vision.layers.out": ops.stack(outs)})
    x_BPD = _layer_norm(w, "vision.final_norm", None, x_BPD)
    taps["vision.tokens"] = per_camera(ops.einsum("BPD,DE->BPE", x_BPD, w.low("vision.head.weight")) + w.low("vision.head.bias"))
    return taps["vision.tokens"]


def _vision_layer(w: _Weights, layer: int, x_BPD: Array) -> tuple[Array, Array]:
    ops, at = w.ops, "vision.layers."
    h_BPD = _layer_norm(w, at + "attn_norm", layer, x_BPD)
    q_BPNH, k_BPNH, v_BPNH = (
        ops.einsum("BPD,DNH->BPNH", h_BPD, w.low(f"{at}{letter}_proj.weight", layer)) + w.low(f"{at}{letter}_proj.bias", layer) for letter in "qkv"
    )
    attention_BPNH = _attention(ops, q_BPNH, k_BPNH, v_BPNH, np.ones(x_BPD.shape[:2], bool))
    x_BPD = x_BPD + (ops.einsum("BPNH,NHD->BPD", attention_BPNH, w.low(at + "o_proj.weight", layer)) + w.low(at + "o_proj.bias", layer))
    h_BPD = _layer_norm(w, at + "mlp_norm", layer, x_BPD)
    h_BPF = _gelu(ops, ops.einsum("BPD,DF->BPF", h_BPD, w.low(at + "up_proj.weight", layer)) + w.low(at + "up_proj.bias", layer))
    return attention_BPNH, x_BPD + (ops.einsum("BPF,FD->BPD", h_BPF, w.low(at + "down_proj.weight", layer)) + w.low(at + "down_proj.bias", layer))


# ---- The two Gemmas


def _transformers(w: _Weights, spec: ModelSpec, streams: dict[str, _Stream], cond_BW: Array | None, taps: Taps) -> dict[str, Array]:
    """Runs the Gemmas in lock step, attending jointly; returns each stream after its final norm."""
    record = collections.defaultdict(list)
    x = {group: stream.x for group, stream in streams.items()}
    for layer in range(spec.trunk.depth):
        q, k, v, gates = {}, {}, {}, {}
        for group, stream in streams.items():
            at = f"{group}.layers."
            h_BTD, gates[group] = _gemma_norm(w, at + "attn_norm", layer, x[group], cond_BW)
            q[group] = _rotate(w.ops, w.ops.einsum("BTD,DNH->BTNH", h_BTD, w.low(at + "q_proj.weight", layer)), stream.positions)
            k[group] = _rotate(w.ops, w.ops.einsum("BTD,DKH->BTKH", h_BTD, w.low(at + "k_proj.weight", layer)), stream.positions)
            v[group] = w.ops.einsum("BTD,DKH->BTKH", h_BTD, w.low(at + "v_proj.weight", layer))
        k_BSKH, v_BSKH = w.ops.concatenate(list(k.values()), 1), w.ops.concatenate(list(v.values()), 1)
        for group, stream in streams.items():
            at = f"{group}.layers."
            attention_BTNH = _attention(w.ops, q[group], k_BSKH, v_BSKH, stream.mask)
            x_BTD = _residual(x[group], w.ops.einsum("BTNH,NHD->BTD", attention_BTNH, w.low(at + "o_proj.weight", layer)), gates[group])
            h_BTD, gate_BD = _gemma_norm(w, at + "mlp_norm", layer, x_BTD, cond_BW)
            x[group] = _residual(x_BTD, _gated_mlp(w, at, layer, h_BTD), gate_BD)
            for part, array in zip(("q", "k", "v", "attn", "out"), (q[group], k[group], v[group], attention_BTNH, x[group]), strict=True):
                record[at + part].append(array)
    final = {group: _gemma_norm(w, f"{group}.final_norm", None, x[group], cond_BW)[0] for group in streams}
    taps.update({name: w.ops.stack(arrays) for name, arrays in record.items()})
    taps.update({f"{group}.final": array for group, array in final.items()})
    return final


def _gemma_norm(w: _Weights, name: str, layer: int | None, x_BTD: Array, cond_BW: Array | None) -> tuple[Array, Array | None]:
    """RMSNorm in the trunk; in the expert adaRMS, whose scale, shift and gate [B, D] come from the flow time. Returns (output, gate)."""
    ops = w.ops
    full_BTD = ops.full(x_BTD)
    unit_BTD = full_BTD / ops.sqrt((full_BTD * full_BTD).mean(axis=-1, keepdims=True) + EPS)
    if name.startswith("trunk."):
        return ops.low(unit_BTD * (1.0 + w.full(name + ".scale", layer))), None
    modulation_BJD = ops.einsum("BW,WJD->BJD", cond_BW, w.full(name + ".modulation.weight", layer)) + w.full(name + ".modulation.bias", layer)
    scale_B1D, shift_B1D, gate_BD = modulation_BJD[:, 0:1], modulation_BJD[:, 1:2], modulation_BJD[:, 2]
    return ops.low(unit_BTD * (1.0 + scale_B1D) + shift_B1D), ops.low(gate_BD)


def _residual(x_BTD: Array, update_BTD: Array, gate_BD: Array | None) -> Array:
    return x_BTD + (update_BTD if gate_BD is None else update_BTD * gate_BD[:, None, :])


def _gated_mlp(w: _Weights, at: str, layer: int, h_BTD: Array) -> Array:
    gate_BTF, up_BTF = (w.ops.einsum("BTD,DF->BTF", h_BTD, w.low(f"{at}{part}_proj.weight", layer)) for part in ("gate", "up"))
    return w.ops.einsum("BTF,FD->BTD", _gelu(w.ops, gate_BTF) * up_BTF, w.low(at + "down_proj.weight", layer))


def _rotate(ops: Ops, x_BTNH: Array, positions_BT: np.ndarray) -> Array:
    """Rotary embedding (Su et al. 2021) of the pairs (j, j + H / 2); angles in float64, rounded once."""
    half = x_BTNH.shape[-1] // 2
    angle_BT1R = positions_BT[:, :, None, None] / ROTARY_BASE ** (np.arange(half) / half)
    cos_BT1R, sin_BT1R = ops.full(np.cos(angle_BT1R)), ops.full(np.sin(angle_BT1R))
    first_BTNR, second_BTNR = ops.full(x_BTNH[..., :half]), ops.full(x_BTNH[..., half:])
    return ops.low(ops.concatenate([first_BTNR * cos_BT1R - second_BTNR * sin_BT1R, second_BTNR * cos_BT1R + first_BTNR * sin_BT1R], -1))


# ---- Parts of both towers


def _attention(ops: Ops, q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, mask_BS: np.ndarray) -> Array:
    """Softmax attention over the keys in `mask_BS`; query head n reads key/value head n // (N / K)."""
    batch, queries, heads, head_dim = q_BTNH.shape
    kv_heads = k_BSKH.shape[2]
    q_BTKGH = ops.full(q_BTNH).reshape(batch, queries, kv_heads, heads // kv_heads, head_dim) / math.sqrt(head_dim)
    logits_BKGTS = ops.where(mask_BS[:, None, None, None, :], ops.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, ops.full(k_BSKH)), -math.inf)
    weights_BKGTS = ops.exp(logits_BKGTS - ops.max_real(logits_BKGTS))
    probs_BKGTS = ops.low(weights_BKGTS / weights_BKGTS.sum(axis=-1, keepdims=True))
    return ops.einsum("BKGTS,BSKH->BTKGH", probs_BKGTS, v_BSKH).reshape(batch, queries, heads, head_dim)


def _layer_norm(w: _Weights, name: str, layer: int | None, x_BPD: Array) -> Array:
    full_BPD = w.ops.full(x_BPD)
    centred_BPD = full_BPD - full_BPD.mean(axis=-1, keepdims=True)
    unit_BPD = centred_BPD / w.ops.sqrt((centred_BPD * centred_BPD).mean(axis=-1, keepdims=True) + EPS)
    return w.ops.low(unit_BPD * w.full(name + ".scale", layer) + w.full(name + ".bias", layer))


def _linear(w: _Weights, name: str, x: Array) -> Array:
    """A projection with bias in at least float32; the input's last axis and the weight's first are contracted."""
    return w.ops.einsum("...c,cd->...d", w.ops.full(x), w.full(name + ".weight")) + w.full(name + ".bias")


def _gelu(ops: Ops, x: Array) -> Array:
    """The tanh approximation (Hendrycks and Gimpel 2016)."""
    return 0.5 * x * (1.0 + ops.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def _swish(ops: Ops, x: Array) -> Array:
    """x * sigmoid(x), by tanh because exp(-x) overflows."""
    return x * (0.5 * (1.0 + ops.tanh(0.5 * x)))
