"""Attention: one function, one signature, several strategies.

Pi0.5 needs no [T, S] mask: the prefix attends to the valid prefix, the suffix to the valid prefix and suffix, so which keys are
valid says everything, and it is the same for every query of a call. Padding queries attend like any other (nobody reads them).

The fused strategies want the valid keys in front (`pack`, `join`), so that a length says which they are: no mask reaches a kernel, no
row without a key, and what is masked is not computed. Their kernels compute in 16 bits (Dao et al. 2022): float16, with the
cotangent of each sample scaled by a power of two into its range, is as exact as the explicit strategy in bfloat16; see docs/numerics.md.

Axes: B T S N K G H (see spec.py).
Dtypes: logits and softmax in at least float32, probabilities in the dtype of q (explicit) or of the kernel (fused).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor as Array
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from pi05.errors import SpecError
from pi05.torch_backend.layers import cast, promote, region


def attention(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, valid_BS: Array | None = None, *, strategy: str = "explicit") -> Array:
    """Softmax attention of every query over the valid keys, scaled by 1/sqrt(H); query head n reads key head n // G.

    valid_BS: bool; None means all. For a fused strategy the valid ones stand in front; where T = S, so do the queries, and padding queries
        get zeros. A query without a valid key gets exact zeros, and so do its gradients.
    strategy: "explicit", "fused_float16" or "fused_bfloat16".
    Returns [B, T, N, H] in the dtype of q.

    Raises:
        SpecError: no such strategy, or no device for its kernels.
    """
    if strategy not in STRATEGIES:
        raise SpecError(f"There is no attention strategy {strategy!r} in this backend; there are {', '.join(STRATEGIES)}.")
    return STRATEGIES[strategy](q_BTNH, k_BSKH, v_BSKH, valid_BS)


def is_fused(strategy: str) -> bool:
    """Whether the strategy wants the valid keys in front."""
    return strategy.startswith("fused")


def check_kernels(strategy: str, head_dims: tuple[int, ...], on_gpu: bool) -> None:
    """Whether the kernels of a fused strategy exist for these heads and this device; asked before weights load and anything compiles.

    Raises:
        SpecError: they do not.
    """
    if not is_fused(strategy):
        return
    if not on_gpu:
        raise SpecError("compute.attention is 'fused', whose kernels need an NVIDIA GPU; PyTorch computes on the CPU. Set compute.attention to explicit.")
    if max(head_dims) > MAX_HEAD_DIM:
        raise SpecError(
            f"compute.attention is 'fused', whose kernels take head dims to {MAX_HEAD_DIM}, not {max(head_dims)}. Set compute.attention to explicit."
        )


def pack(valid_BS: Array, *arrays: Array) -> tuple[Array, ...]:
    """The validity and the arrays [B, S, ...] with the valid tokens in front, otherwise in their order."""
    order_BS = torch.argsort((~valid_BS).to(torch.int8), dim=1, stable=True)
    return tuple(torch.take_along_dim(x, order_BS.reshape(order_BS.shape + (1,) * (x.ndim - 2)), dim=1) for x in (valid_BS, *arrays))


def unpack(valid_BS: Array, packed: Array) -> Array:
    """The array [B, S, ...] in the order it had before `pack`."""
    order_BS = torch.argsort(torch.argsort((~valid_BS).to(torch.int8), dim=1, stable=True), dim=1)
    return torch.take_along_dim(packed, order_BS.reshape(order_BS.shape + (1,) * (packed.ndim - 2)), dim=1)


def join(first: Array, second: Array, first_valid_BS: Array, second_valid_BA: Array) -> Array:
    """Two packed parts [B, S, ...] and [B, A, ...] as one [B, S + A, ...] with the valid tokens of both in front.

    The second part's valid tokens overwrite padding of the first, so nothing but they moves.
    """
    first_len_B1, second_len_B1 = (valid.sum(1, keepdims=True, dtype=torch.int32) for valid in (first_valid_BS, second_valid_BA))
    rank_BA = torch.cumsum(second_valid_BA, 1, dtype=torch.int32) - 1
    padding_BA = first_valid_BS.shape[1] + second_len_B1 + torch.cumsum(~second_valid_BA, 1, dtype=torch.int32) - 1
    place_BA = torch.where(second_valid_BA, first_len_B1 + rank_BA, padding_BA)
    room = torch.concatenate((first, torch.zeros_like(second)), axis=1)
    return room.scatter(1, place_BA.long().reshape(place_BA.shape + (1,) * (room.ndim - 2)).expand(second.shape), second)


def explicit_attention(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, valid_BS: Array | None) -> Array:
    """The reference strategy: works on every device and for every length, dtype and head dim."""
    q_BTKGH = rearrange(q_BTNH, "B T (K G) H -> B T K G H", K=k_BSKH.shape[2])
    # Written out: PyTorch's own kernels would round the softmax gradient to bfloat16, see docs/numerics.md.
    logits_BKGTS = torch.einsum("BTKGH,BSKH->BKGTS", promote(q_BTKGH), promote(k_BSKH))
    logits_BKGTS = logits_BKGTS * q_BTNH.shape[-1] ** -0.5
    if valid_BS is not None:
        logits_BKGTS = torch.where(valid_BS[:, None, None, None, :], logits_BKGTS, torch.finfo(logits_BKGTS.dtype).min)
    weights_BKGTS = torch.softmax(logits_BKGTS, -1)
    if valid_BS is not None:
        weights_BKGTS = torch.where(valid_BS[:, None, None, None, :], weights_BKGTS, 0)  # a query without keys: zeros, not the mean
    out_BTKGH = torch.einsum("BKGTS,BSKH->BTKGH", cast(weights_BKGTS, q_BTNH.dtype), v_BSKH)
    return rearrange(out_BTKGH, "B T K G H -> B T (K G) H")


def fused_attention(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, valid_BS: Array | None, *, dtype: str, fold: bool) -> Array:
    """A GPU's attention kernel on the valid keys, computed in `dtype` with float32 sums and softmax inside.

    fold: the G query heads of a key head as queries of one head, which is the same since no mask depends on the query: the kernel sums dk and
        dv over them in float32, and reads k and v once.
    """
    length, heads, head_dim = q_BTNH.shape[1:]
    keys, kv_heads = k_BSKH.shape[1:3]
    low, scale_B111 = getattr(torch, dtype), torch.ones((len(q_BTNH), 1, 1, 1), device=q_BTNH.device)
    copies = heads // kv_heads if fold else 1
    q_BTNH = rearrange(q_BTNH, "B T (K C) H -> B (T C) K H", C=copies)
    q, k, v = (_Enter.apply(_fit(x), scale_B111, low) for x in (q_BTNH, k_BSKH, v_BSKH))
    lengths, live_BT11 = (None, None), None
    if valid_BS is not None:
        key_len_B = valid_BS.sum(1, dtype=torch.int32)
        query_len_B = copies * (key_len_B if length == keys else torch.full_like(key_len_B, length))
        live_BT11 = ((torch.arange(q.shape[1], device=q.device) < query_len_B[:, None]) & (key_len_B[:, None] > 0))[:, :, None, None]
        lengths = (query_len_B.clip(1), key_len_B.clip(1))  # no row without a key enters a kernel
    out_BTNH = _Leave.apply(kernel(q, k, v, *lengths, head_dim**-0.5), scale_B111, live_BT11, q_BTNH.dtype)
    return rearrange(out_BTNH[..., :head_dim], "B (T C) K H -> B T (K C) H", C=copies)


def kernel(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, query_len_B: Array | None, key_len_B: Array | None, scale: float) -> Array:
    """The attention kernel on 16-bit arrays: cuDNN through jax.nn, or flash attention through torch.nn.attention.

    Queries from query_len_B on get zeros or nobody's values. None: all queries and keys. scale: of the logits.

    Raises:
        SpecError: there is no GPU, or none that has this kernel.
    """
    check_kernels("fused", (q_BTNH.shape[-1],), on_gpu=q_BTNH.is_cuda)
    if query_len_B is None:
        q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BSKH, v_BSKH))
        # cuDNN only where there is no mask: with one, its dQ is NaN where T % 128 == 64, see docs/numerics.md.
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)
    # Every sample is two sequences, its valid tokens and its padding: nothing is gathered, no shape depends on the data, and no row is without a key.
    ends = [_ends(length_B, x.shape[1]) for length_B, x in ((query_len_B, q_BTNH), (key_len_B, k_BSKH))]
    packed = (x.flatten(0, 1) for x in (q_BTNH, k_BSKH, v_BSKH))
    return varlen_attn(*packed, *ends, q_BTNH.shape[1], k_BSKH.shape[1], scale=scale).unflatten(0, q_BTNH.shape[:2])


_any_shape = functools.partial(region, dynamic=True)


class _Enter(torch.autograd.Function):
    """Into the kernel's dtype; the gradient comes back from it and is divided by the scale that `_Leave` has found."""

    @staticmethod
    def forward(ctx, x: Array, scale_B111: Array, dtype: torch.dtype) -> Array:
        ctx.scale_B111, ctx.dtype = scale_B111, x.dtype
        return cast(x, dtype)

    @staticmethod
    def backward(ctx, g: Array) -> tuple[Array, None, None]:
        return _multiply(1 / ctx.scale_B111, g, ctx.dtype), None, None


class _Leave(torch.autograd.Function):
    """Out of the kernel's dtype, with zeros in dead rows; the cotangent is scaled per sample before it goes into it."""

    @staticmethod
    def forward(ctx, out_BTNH: Array, scale_B111: Array, live_BT11: Array | None, dtype: torch.dtype) -> Array:
        ctx.scale_B111, ctx.live_BT11, ctx.dtype = scale_B111, live_BT11, out_BTNH.dtype
        return _clear(live_BT11, out_BTNH, dtype)

    @staticmethod
    def backward(ctx, g_BTNH: Array) -> tuple[Array, None, None, None]:
        g_BTNH = _clear(ctx.live_BT11, g_BTNH, g_BTNH.dtype)
        ctx.scale_B111.copy_(power_of_two(g_BTNH))
        return _multiply(ctx.scale_B111, g_BTNH, ctx.dtype), None, None, None


@_any_shape
def _clear(live_BT11: Array | None, x_BTNH: Array, dtype: torch.dtype) -> Array:
    return cast(x_BTNH if live_BT11 is None else torch.where(live_BT11, x_BTNH, 0), dtype)


@_any_shape
def _multiply(scale_B111: Array, x_BTNH: Array, dtype: torch.dtype) -> Array:
    return cast(promote(x_BTNH) * scale_B111, dtype)


def power_of_two(g_BTNH: Array) -> Array:
    """A power of two [B, 1, 1, 1] for each sample that brings its largest |g| to between 1/2 and 1; 1 where that is 0, Inf or NaN."""
    largest_B111 = promote(torch.linalg.vector_norm(g_BTNH, torch.inf, (1, 2, 3), keepdim=True))
    usable_B111 = torch.isfinite(largest_B111) & (largest_B111 > 0)
    usual_B111 = torch.where(usable_B111, largest_B111, 1).clip(2.0**-100, 2.0**100)
    mantissa_B111, _ = torch.frexp(usual_B111)
    return torch.where(usable_B111, mantissa_B111 / usual_B111, 1)  # the quotient is exact


def attention_and_gradients(q: Any, k: Any, v: Any, valid: Any, cotangent: Any, *, strategy: str) -> tuple[Any, Any, Any, Any]:
    """Output and the gradients of q, k and v of one call on NumPy arrays, taken as bfloat16; float32 NumPy arrays. For checks of kernels."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    valid_BS = None if valid is None else torch.tensor(valid, device=device)
    inputs = [torch.tensor(x, device=device, dtype=torch.bfloat16).requires_grad_() for x in (q, k, v)]
    out = attention(*inputs, valid_BS, strategy=strategy)
    gradients = torch.autograd.grad(out, inputs, torch.tensor(cotangent, device=device, dtype=torch.bfloat16))
    return tuple(x.detach().float().cpu().numpy() for x in (out, *gradients))


def _fit(x_BTNH: Array) -> Array:
    """With zeros up to a head dim that 8 divides, which the kernels want."""
    return F.pad(x_BTNH, (0, -x_BTNH.shape[3] % 8)) if x_BTNH.shape[3] % 8 else x_BTNH


def _ends(length_B: Array, size: int) -> Array:
    """int32[2 B + 1], where each sample's valid tokens and its padding end in the flattened batch."""
    starts_B = torch.arange(len(length_B), device=length_B.device, dtype=torch.int32) * size
    pairs = torch.stack((starts_B + length_B, starts_B + size), 1).flatten()
    return F.pad(pairs, (1, 0)).to(torch.int32)


STRATEGIES: dict[str, Callable[..., Array]] = {
    "explicit": explicit_attention,
    "fused_float16": functools.partial(fused_attention, dtype="float16", fold=True),
    "fused_bfloat16": functools.partial(fused_attention, dtype="bfloat16", fold=True),
}
MAX_HEAD_DIM = 256  # of the kernels, and of their backward pass
