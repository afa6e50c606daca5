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

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import Array

from pi05.errors import SpecError
from pi05.jax_backend.layers import cast, keep, promote


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
        raise SpecError("compute.attention is 'fused', whose kernels need an NVIDIA GPU; JAX computes on the CPU. Set compute.attention to explicit.")
    if max(head_dims) > MAX_HEAD_DIM:
        raise SpecError(
            f"compute.attention is 'fused', whose kernels take head dims to {MAX_HEAD_DIM}, not {max(head_dims)}. Set compute.attention to explicit."
        )


def pack(valid_BS: Array, *arrays: Array) -> tuple[Array, ...]:
    """The validity and the arrays [B, S, ...] with the valid tokens in front, otherwise in their order."""
    order_BS = jnp.argsort(~valid_BS, axis=1, stable=True)
    return tuple(_reorder(x, order_BS) for x in (valid_BS, *arrays))


def unpack(valid_BS: Array, packed: Array) -> Array:
    """The array [B, S, ...] in the order it had before `pack`."""
    return _reorder(packed, jnp.argsort(jnp.argsort(~valid_BS, axis=1, stable=True), axis=1))


def join(first: Array, second: Array, first_valid_BS: Array, second_valid_BA: Array) -> Array:
    """Two packed parts [B, S, ...] and [B, A, ...] as one [B, S + A, ...] with the valid tokens of both in front.

    The second part's valid tokens overwrite padding of the first, so nothing but they moves.
    """
    first_len_B1, second_len_B1 = (valid.sum(1, keepdims=True, dtype=jnp.int32) for valid in (first_valid_BS, second_valid_BA))
    rank_BA = jnp.cumsum(second_valid_BA, axis=1, dtype=jnp.int32) - 1
    padding_BA = first_valid_BS.shape[1] + second_len_B1 + jnp.cumsum(~second_valid_BA, axis=1, dtype=jnp.int32) - 1
    place_BA = jnp.where(second_valid_BA, first_len_B1 + rank_BA, padding_BA)
    room = jnp.concatenate((first, jnp.zeros_like(second)), axis=1)
    return jax.vmap(lambda room, place_A, second: room.at[place_A].set(second, unique_indices=True))(room, place_BA, second)


def _reorder(x: Array, order_BS: Array) -> Array:
    """x [B, S, ...] in the order of a permutation: unique indices, so that its gradient is no sum."""
    return jax.vmap(lambda x, order_S: x.at[order_S].get(unique_indices=True, mode="promise_in_bounds"))(x, order_BS)


def explicit_attention(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, valid_BS: Array | None) -> Array:
    """The reference strategy: works on every device and for every length, dtype and head dim."""
    q_BTKGH = rearrange(q_BTNH, "B T (K G) H -> B T K G H", K=k_BSKH.shape[2])
    precision = None if q_BTNH.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST  # as in layers.matmul
    logits_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, precision=precision, preferred_element_type=promote(q_BTNH).dtype)
    logits_BKGTS = logits_BKGTS * q_BTNH.shape[-1] ** -0.5
    if valid_BS is not None:
        logits_BKGTS = jnp.where(valid_BS[:, None, None, None, :], logits_BKGTS, jnp.finfo(logits_BKGTS.dtype).min)
    weights_BKGTS = jax.nn.softmax(logits_BKGTS, axis=-1)
    if valid_BS is not None:
        weights_BKGTS = jnp.where(valid_BS[:, None, None, None, :], weights_BKGTS, 0)  # a query without keys: zeros, not the mean
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", cast(weights_BKGTS, q_BTNH.dtype), v_BSKH, precision=precision)
    return rearrange(out_BTKGH, "B T K G H -> B T (K G) H")


def fused_attention(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, valid_BS: Array | None, *, dtype: str, fold: bool) -> Array:
    """A GPU's attention kernel on the valid keys, computed in `dtype` with float32 sums and softmax inside.

    fold: the G query heads of a key head as queries of one head, which is the same since no mask depends on the query: the kernel sums dk and
        dv over them in float32, and reads k and v once.
    """
    batch, length, heads, head_dim = q_BTNH.shape
    keys, kv_heads = k_BSKH.shape[1:3]
    key_len_B = jnp.full((batch,), keys, jnp.int32) if valid_BS is None else valid_BS.sum(1, dtype=jnp.int32)
    query_len_B = key_len_B if length == keys else jnp.full((batch,), length, jnp.int32)
    copies = heads // kv_heads if fold else 1
    q_BTNH = rearrange(q_BTNH, "B T (K C) H -> B (T C) K H", C=copies)
    q_BTNH, k_BSKH, v_BSKH = (_fit(x) for x in (q_BTNH, k_BSKH, v_BSKH))
    padded = valid_BS is not None or k_BSKH.shape[1] != keys
    out_BTNH = _scaled_kernel(q_BTNH, k_BSKH, v_BSKH, query_len_B * copies, key_len_B, dtype, padded, head_dim**-0.5)
    return rearrange(out_BTNH[:, : length * copies, :, :head_dim], "B (T C) K H -> B T (K C) H", C=copies)


def kernel(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, query_len_B: Array | None, key_len_B: Array | None, scale: float) -> Array:
    """The attention kernel on 16-bit arrays: cuDNN through jax.nn, or flash attention through torch.nn.attention.

    Queries from query_len_B on get zeros or nobody's values. None: all queries and keys. scale: of the logits.

    Raises:
        SpecError: there is no GPU, or none that has this kernel.
    """
    check_kernels("fused", (q_BTNH.shape[-1],), on_gpu=jax.default_backend() == "gpu")
    lengths = {"query_seq_lengths": query_len_B, "key_value_seq_lengths": key_len_B}
    try:
        return jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, scale=scale, **lengths, implementation="cudnn")
    except (NotImplementedError, RuntimeError) as error:  # an older GPU, no cuDNN or too old a one
        raise SpecError(f"compute.attention is 'fused', but cuDNN refuses: {error}. Set compute.attention to explicit.") from error


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _scaled_kernel(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, query_len_B: Array, key_len_B: Array, dtype: str, padded: bool, scale: float) -> Array:
    return _forward(q_BTNH, k_BSKH, v_BSKH, query_len_B, key_len_B, dtype, padded, scale)[0]


def _forward(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, query_len_B: Array, key_len_B: Array, dtype: str, padded: bool, scale: float) -> tuple[Array, tuple]:
    lengths = (query_len_B.clip(1), key_len_B.clip(1)) if padded else (None, None)  # a length of zero is NaN in some cuDNN
    low = (cast(x, dtype) for x in (q_BTNH, k_BSKH, v_BSKH))
    out_BTNH, pullback = jax.vjp(lambda q, k, v: kernel(q, k, v, *lengths, scale), *low)
    live_BT11 = ((jnp.arange(q_BTNH.shape[1]) < query_len_B[:, None]) & (key_len_B[:, None] > 0))[:, :, None, None]
    # The pullback is a pytree of what the kernel keeps; named, so that recomputing a layer does not run the forward kernel again.
    leaves, tree = jax.tree.flatten(pullback)
    kept = [keep(x) if isinstance(x, jax.Array) else x for x in leaves]
    out_BTNH = next((x for leaf, x in zip(leaves, kept, strict=True) if leaf is out_BTNH), keep(out_BTNH))  # one of them: not kept twice
    pullback = jax.tree.unflatten(tree, kept)
    return cast(jnp.where(live_BT11, out_BTNH, 0), q_BTNH.dtype), (pullback, live_BT11, tuple(jnp.zeros((0,), x.dtype) for x in (q_BTNH, k_BSKH, v_BSKH)))


def _backward(dtype: str, padded: bool, scale: float, residuals: tuple, g_BTNH: Array) -> tuple[Array | None, ...]:
    pullback, live_BT11, dtypes = residuals
    g_BTNH = jnp.where(live_BT11, promote(g_BTNH), 0)
    scale_B111 = power_of_two(g_BTNH)
    dq, dk, dv = (promote(x) / scale_B111 for x in pullback(cast(g_BTNH * scale_B111, dtype)))
    dq = jnp.where(live_BT11, dq, 0)
    return *(cast(x, like.dtype) for x, like in zip((dq, dk, dv), dtypes, strict=True)), None, None


_scaled_kernel.defvjp(_forward, _backward)


def power_of_two(g_BTNH: Array) -> Array:
    """A power of two [B, 1, 1, 1] for each sample that brings its largest |g| to between 1/2 and 1; 1 where that is 0, Inf or NaN."""
    largest_B111 = jnp.abs(g_BTNH).max((1, 2, 3), keepdims=True)
    usable_B111 = jnp.isfinite(largest_B111) & (largest_B111 > 0)
    _, exponent_B111 = jnp.frexp(jnp.where(usable_B111, largest_B111, 1))
    return jnp.where(usable_B111, jnp.ldexp(jnp.ones_like(largest_B111), (-exponent_B111).clip(-100, 100)), 1)


def attention_and_gradients(q: Any, k: Any, v: Any, valid: Any, cotangent: Any, *, strategy: str) -> tuple[Any, Any, Any, Any]:
    """Output and the gradients of q, k and v of one call on NumPy arrays, taken as bfloat16; float32 NumPy arrays. For checks of kernels."""
    inputs = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, cotangent))
    return tuple(np.asarray(x) for x in _vjp(*inputs, None if valid is None else jnp.asarray(valid), strategy, kernel))


@functools.partial(jax.jit, static_argnums=(5, 6))
def _vjp(q: Array, k: Array, v: Array, g: Array, valid: Array | None, strategy: str, used: Callable) -> tuple[Array, ...]:
    """used: the present `kernel`, so that another one is compiled anew."""
    out, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, valid, strategy=strategy), q, k, v)
    return tuple(cast(x, jnp.float32) for x in (out, *pullback(g)))


def _fit(x_BTNH: Array) -> Array:
    """With zeros up to an even length and a head dim that 8 divides, which cuDNN wants."""
    return jnp.pad(x_BTNH, ((0, 0), (0, x_BTNH.shape[1] % 2), (0, 0), (0, -x_BTNH.shape[3] % 8)))


STRATEGIES: dict[str, Callable[..., Array]] = {
    "explicit": explicit_attention,
    "fused_float16": functools.partial(fused_attention, dtype="float16", fold=False),
    "fused_bfloat16": functools.partial(fused_attention, dtype="bfloat16", fold=False),
}
MAX_HEAD_DIM = 256  # of the kernels, and of their backward pass
