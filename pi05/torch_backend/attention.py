"""Attention: one function, one signature, several strategies.

Pi0.5 needs no [T, S] mask: the prefix attends to the valid prefix, the suffix to the valid prefix and suffix, so which keys are
valid says everything, and it is the same for every query of a call. Padding queries attend like any other (nobody reads them).

Axes: B T S N K G H (see spec.py).
Dtypes: logits and softmax in at least float32, probabilities in the dtype of q.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor as Array
from torch.nn.attention import SDPBackend, sdpa_kernel

from pi05.errors import SpecError


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
    q_BNTH, k_BKSH, v_BKSH = (rearrange(x, "B T N H -> B N T H") for x in (q_BTNH, k_BSKH, v_BSKH))
    mask_B11S, reached_B111 = None, None
    if valid_BS is not None:
        reached_B111 = valid_BS.any(1)[:, None, None, None]
        mask_B11S = valid_BS[:, None, None, :] | ~reached_B111  # no fully masked row ever enters a kernel
    # cuDNN is left out: with a mask its dQ is NaN at some lengths (T % 128 == 64, cuDNN 9.19), see docs/numerics.md.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        out_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BKSH, v_BKSH, attn_mask=mask_B11S, enable_gqa=k_BKSH.shape[1] != q_BNTH.shape[1])
    if reached_B111 is not None:
        out_BNTH = torch.where(reached_B111, out_BNTH, 0)  # a query without keys: zeros, not the mean
    return rearrange(out_BNTH, "B N T H -> B T N H")


STRATEGIES: dict[str, Callable[..., Array]] = {"explicit": explicit_attention}
