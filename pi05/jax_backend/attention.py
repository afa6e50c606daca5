"""Attention: one function, one signature, several strategies.

Pi0.5 needs no [T, S] mask: the prefix attends to the valid prefix, the suffix to the valid prefix and suffix, so which keys are
valid says everything, and it is the same for every query of a call. Padding queries attend like any other (nobody reads them).

Axes: B T S N K G H (see spec.py).
Dtypes: logits and softmax in at least float32, probabilities in the dtype of q.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array

from pi05.errors import SpecError
from pi05.jax_backend.layers import cast, promote


def attention(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, valid_BS: Array | None = None, *, strategy: str = "explicit") -> Array:
    """Softmax attention of every query over the valid keys, scaled by 1/sqrt(H); query head n reads key head n // G.

    valid_BS: bool; None means all. A query without a valid key gets exact zeros, and so do its gradients.
    Returns [B, T, N, H] in the dtype of q.

    Raises:
        SpecError: no such strategy.
    """
    if strategy not in STRATEGIES:
        raise SpecError(f"There is no attention strategy {strategy!r} in this backend; there are {', '.join(STRATEGIES)}.")
    return STRATEGIES[strategy](q_BTNH, k_BSKH, v_BSKH, valid_BS)


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


STRATEGIES: dict[str, Callable[..., Array]] = {"explicit": explicit_attention}
