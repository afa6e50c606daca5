"""Layers the three transformers are made of.

Axes: B T N H D; H also counts the halves of a head in rotary embedding (see spec.py).
Dtypes: parameters are float32 and are cast to the dtype of x where they are used; norms, rotary and time embedding compute in
at least float32 (`promote`), so that a float64 run is float64 throughout.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor as Array
from torch import nn
from torch.utils.checkpoint import checkpoint

from pi05.params import MODULATION_SLOTS
from pi05.spec import NORM_EPS, LoRA, rope_table, time_frequencies


def cast(x: Array, dtype: Any) -> Array:
    """Returns x in `dtype`."""
    return x.to(dtype)


def promote(x: Array) -> Array:
    """Returns x in float32, or as it is where it is float64."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def keep(x: Array) -> Array:
    """Returns x, which a layer that is recomputed in the backward pass keeps (in JAX; PyTorch computes it again)."""
    return x


def region(function: Callable, *, dynamic: bool = False) -> Callable:
    """Marks a function (module, x, ...) of plain operations that PyTorch compiles on a GPU as one piece; JAX compiles whole steps anyway.

    dynamic: once for all shapes instead of once for each.
    """
    compiled = functools.cache(lambda: torch.compile(function, dynamic=dynamic))  # not at import: loading the compiler takes seconds

    @functools.wraps(function)
    def run(module: nn.Module, x: Array, *rest: Any) -> Any:
        return (compiled() if x.is_cuda and not torch.compiler.is_compiling() else function)(module, x, *rest)

    return run


def unless(condition: Any, function: Callable[[Array], Array], x: Array) -> Array:
    """function(x), or x itself where `condition`, a bool or None for never, holds: then nothing is computed."""
    return x if condition else function(x)


def matmul(x: Array, weight: Array) -> Array:
    """x [..., fan_in] times a weight, in their dtype; float32 products are never rounded to TF32."""
    return F.linear(x, weight)  # exact unless the user asks torch for TF32


class Linear(nn.Module):
    """x times weight, plus the low-rank adapters' product if there are some, plus bias, in the dtype of x."""

    def __init__(self, fan_in: int, fan_out: int, *, bias: bool = False, lora: LoRA | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((fan_out, fan_in)))
        self.bias = nn.Parameter(torch.zeros((fan_out,))) if bias else None
        self.lora_scale = None if lora is None else lora.scale
        self.lora_a = None if lora is None else nn.Parameter(torch.zeros((lora.rank, fan_in)))
        self.lora_b = None if lora is None else nn.Parameter(torch.zeros((fan_out, lora.rank)))

    def forward(self, x: Array) -> Array:
        y = matmul(x, cast(self.weight[...], x.dtype))
        if self.lora_scale is not None:
            y = y + matmul(matmul(x, cast(self.lora_a[...], x.dtype)), cast(self.lora_b[...], x.dtype)) * self.lora_scale
        # In at least float32, so that the bias's gradient, a sum over all tokens, is not accumulated in bfloat16.
        return y if self.bias is None else cast(promote(y) + promote(self.bias[...]), x.dtype)


class Embedding(nn.Module):
    """Token embedding scaled by sqrt(D), tied to the token logits (Gemma Team 2024)."""

    def __init__(self, vocab_size: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((vocab_size, width)))

    def forward(self, tokens_BT: Array) -> Array:
        """Embeds ids; at least float32[B, T, D]."""
        x_BTD = promote(self.weight[...][tokens_BT])
        return x_BTD * x_BTD.shape[-1] ** 0.5

    def logits(self, x_BTD: Array) -> Array:
        """Scores every token of the vocabulary; at least float32[B, T, V]."""
        return matmul(promote(x_BTD), promote(self.weight[...]))


class LayerNorm(nn.Module):
    """LayerNorm with scale and bias (Ba et al. 2016), computed in at least float32."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((width,)))
        self.bias = nn.Parameter(torch.zeros((width,)))

    def forward(self, x_BTD: Array) -> Array:
        y_BTD = promote(x_BTD)
        y_BTD = y_BTD - y_BTD.mean(-1, keepdim=True)
        y_BTD = y_BTD / torch.sqrt((y_BTD * y_BTD).mean(-1, keepdim=True) + NORM_EPS)
        return cast(y_BTD * promote(self.scale[...]) + promote(self.bias[...]), x_BTD.dtype)


def rms_normalize(x_BTD: Array) -> Array:
    """x / sqrt(mean(x^2) + eps), at least float32 (Zhang and Sennrich 2019)."""
    y_BTD = promote(x_BTD)
    return y_BTD / torch.sqrt((y_BTD * y_BTD).mean(-1, keepdim=True) + NORM_EPS)


class RMSNorm(nn.Module):
    """RMSNorm whose gain is 1 + scale, computed in at least float32."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros((width,)))

    def forward(self, x_BTD: Array, cond_BD: Array | None) -> tuple[Array, None]:
        """Returns the normalised x in its dtype, and no gate; `cond_BD` is not used."""
        return cast(rms_normalize(x_BTD) * (1 + promote(self.scale[...])), x_BTD.dtype), None


class AdaRMSNorm(nn.Module):
    """RMSNorm whose scale, shift and residual gate are linear in a condition (adaLN, Peebles and Xie 2023), in at least float32."""

    def __init__(self, width: int, cond_width: int):
        super().__init__()
        self.modulation = Linear(cond_width, len(MODULATION_SLOTS) * width, bias=True)

    def forward(self, x_BTD: Array, cond_BD: Array) -> tuple[Array, Array]:
        """Returns the modulated x in its dtype, and the gate [B, 1, D] of the residual branch that follows, at least float32."""
        scale_B1D, shift_B1D, gate_B1D = self.modulation(promote(cond_BD))[:, None, :].chunk(len(MODULATION_SLOTS), -1)
        y_BTD = rms_normalize(x_BTD) * (1 + scale_B1D) + shift_B1D
        return cast(y_BTD, x_BTD.dtype), gate_B1D


def add_gated(x_BTD: Array, branch_BTD: Array, gate_B1D: Array | None) -> Array:
    """Residual addition of a branch; where its norm gave a gate, gated, in at least float32."""
    return x_BTD + branch_BTD if gate_B1D is None else cast(promote(x_BTD) + promote(branch_BTD) * gate_B1D, x_BTD.dtype)


def gelu(x: Array) -> Array:
    """GELU in its tanh approximation (Hendrycks and Gimpel 2016), which SigLIP and Gemma both use."""
    return F.gelu(x, approximate="tanh")


def rotation(positions_BT: Array, head_dim: int, num_positions: int, dtype: Any) -> tuple[Array, Array]:
    """Cosines and sines [B, T, H / 2] of rotary embedding at `positions_BT`, which must lie below `num_positions`."""
    cos_TH, sin_TH = _tables(rope_table, (head_dim, num_positions), dtype, positions_BT.device)
    return cos_TH[positions_BT], sin_TH[positions_BT]


def rotate(x_BTNH: Array, angles: tuple[Array, Array]) -> Array:
    """Rotary embedding that pairs dim j with dim j + H/2 (Su et al. 2021, in Gemma's layout), computed in at least float32."""
    cos_BTNH, sin_BTNH = (promote(angle_BTH)[:, :, None, :] for angle_BTH in angles)
    first_BTNH, second_BTNH = promote(x_BTNH).chunk(2, -1)
    rotated = (first_BTNH * cos_BTNH - second_BTNH * sin_BTNH, second_BTNH * cos_BTNH + first_BTNH * sin_BTNH)
    return cast(torch.concatenate(rotated, axis=-1), x_BTNH.dtype)


def time_embedding(time_B: Array, width: int) -> Array:
    """Sine-cosine embedding [B, width] of the flow time, in at least float32.

    The angle reaches 250 turns, where a float32 product is off by 1e-4 rad. So time and frequency are both split into a coarse
    part, whose product is exact, and a fine part, and whole turns are dropped before the parts are added: the result is good
    to 1e-6 without float64 (Cody and Waite 1980).
    """
    coarse_D, fine_D = _tables(time_frequencies, (width,), time_B.dtype, time_B.device)
    time_B1 = promote(time_B)[:, None]
    coarse_B1 = torch.round(time_B1 * 4096) / 4096
    exact_BD = coarse_B1 * coarse_D
    turns_BD = (exact_BD - torch.floor(exact_BD)) + (coarse_B1 * fine_D + (time_B1 - coarse_B1) * (coarse_D + fine_D))
    angle_BD = turns_BD * (2 * torch.pi)
    return torch.concatenate((torch.sin(angle_BD), torch.cos(angle_BD)), axis=-1)


def stack_layers(make: Callable[[], nn.Module], depth: int) -> nn.Module:
    """`depth` equal layers: one module whose parameters have a leading layer axis."""
    return nn.ModuleList([make() for _ in range(depth)])


def scan_layers(body: Callable, layers: tuple, carry: Any, xs: dict | None = None, *, remat: str = "none") -> tuple[Any, dict]:
    """Runs `carry, out = body(layer of each stack, carry, x, last)` over all layers; `xs` and the outs are dicts of arrays [L, ...].

    last: whether it is the last layer. remat: see spec.Compute.
    """
    outs: list[dict[str, Array]] = []
    depth = len(layers[0])
    for index, layer in enumerate(zip(*layers, strict=True)):
        x, last = None if xs is None else {name: array[index] for name, array in xs.items()}, index == depth - 1
        carry, out = checkpoint(body, layer, carry, x, last, use_reentrant=False) if remat == "layer" else body(layer, carry, x, last)
        outs.append(out)
    return carry, {name: torch.stack([out[name] for out in outs]) for name in outs[0]}


@functools.cache
def _tables(make: Callable[..., tuple], sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Array, ...]:
    """Tables of spec.py on a device, moved there once."""
    with torch.inference_mode(False):  # a table that was first needed to act must also serve in training
        return tuple(torch.as_tensor(table, dtype=dtype, device=device) for table in make(*sizes))
