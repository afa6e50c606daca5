"""Stand-ins for the GPU's attention kernels that round where those round, in plain operations of either framework.

Inputs and outputs in 16 bits, sums and softmax in float32; probabilities P, their gradient dS and the output O are rounded to 16 bits, and the
row sum D = dO . O is taken from the rounded O, as flash attention does (Dao et al. 2022, algorithm 4; measured study: attention.md section 4).
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np


def jax_kernel(q: Any, k: Any, v: Any, query_len: Any, key_len: Any, scale: float) -> Any:
    """Takes the place of pi05.jax_backend.attention.kernel."""
    import jax
    import jax.numpy as jnp

    dtype, group = q.dtype, q.shape[2] // k.shape[2]

    def low(x):
        return jax.lax.optimization_barrier(x.astype(dtype)).astype(jnp.float32)  # XLA drops a pair of conversions otherwise

    def wide(x):
        return x.astype(jnp.float32)

    def product(equation, *arrays):
        return jnp.einsum(equation, *arrays, precision="highest")

    def inside(x, length):
        return None if length is None else jnp.arange(x.shape[1]) < length[:, None]

    def forward(q, k, v, query_len, key_len):
        rows, keys = inside(q, query_len), inside(k, key_len)
        key, value = (jnp.repeat(wide(x), group, 2) for x in (k, v))
        logits = product("btnh,bsnh->bnts", wide(q), key) * scale
        if keys is not None:
            logits = jnp.where(keys[:, None, None], logits, -jnp.inf)
        weights = jax.nn.softmax(logits, -1)
        out = product("bnts,bsnh->btnh", low(weights), value)
        out = out if rows is None else jnp.where(rows[:, :, None, None], out, 0)
        return out.astype(dtype), weights

    @jax.custom_vjp
    def attend(q, k, v, query_len, key_len):  # all it reads is an argument: a closure over a tracer would leak it under jax.checkpoint
        return forward(q, k, v, query_len, key_len)[0]

    def attend_forward(q, k, v, query_len, key_len):
        out, weights = forward(q, k, v, query_len, key_len)
        return out, (q, k, v, out, weights, query_len)

    def attend_backward(kept, g):
        q, k, v, out, weights, query_len = kept
        rows = inside(q, query_len)
        key, value, g = jnp.repeat(wide(k), group, 2), jnp.repeat(wide(v), group, 2), wide(g)
        g = g if rows is None else jnp.where(rows[:, :, None, None], g, 0)
        sums = (g * wide(out)).sum(-1).swapaxes(1, 2)[..., None]
        dlogits = low(weights * (product("btnh,bsnh->bnts", g, value) - sums) * scale)
        dk, dv = product("bnts,btnh->bsnh", dlogits, wide(q)), product("bnts,btnh->bsnh", low(weights), g)
        dk, dv = (low(x).reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3) for x in (dk, dv))
        return *(x.astype(dtype) for x in (product("bnts,bsnh->btnh", dlogits, key), dk, dv)), None, None

    attend.defvjp(attend_forward, attend_backward)
    return attend(q, k, v, query_len, key_len)


def torch_kernel(q: Any, k: Any, v: Any, query_len: Any, key_len: Any, scale: float) -> Any:
    """Takes the place of pi05.torch_backend.attention.kernel."""
    import torch

    dtype, group = q.dtype, q.shape[2] // k.shape[2]

    def low(x):
        return x.to(dtype).float()

    rows, keys = (None if length is None else (torch.arange(x.shape[1], device=x.device) < length[:, None]) for length, x in ((query_len, q), (key_len, k)))

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            key, value = (x.float().repeat_interleave(group, 2) for x in (k, v))
            logits = torch.einsum("btnh,bsnh->bnts", q.float(), key) * scale
            if keys is not None:
                logits = logits.masked_fill(~keys[:, None, None], -np.inf)
            weights = torch.softmax(logits, -1)
            out = torch.einsum("bnts,bsnh->btnh", low(weights), value)
            out = (out if rows is None else torch.where(rows[:, :, None, None], out, 0)).to(dtype)
            ctx.save_for_backward(q, k, v, out, weights)
            return out

        @staticmethod
        def backward(ctx, g):
            q, k, v, out, weights = ctx.saved_tensors
            key, value, g = k.float().repeat_interleave(group, 2), v.float().repeat_interleave(group, 2), g.float()
            g = g if rows is None else torch.where(rows[:, :, None, None], g, 0)
            sums = (g * out.float()).sum(-1).transpose(1, 2)[..., None]
            dlogits = low(weights * (torch.einsum("btnh,bsnh->bnts", g, value) - sums) * scale)
            dk, dv = torch.einsum("bnts,btnh->bsnh", dlogits, q.float()), torch.einsum("bnts,btnh->bsnh", low(weights), g)
            dk, dv = (low(x).unflatten(2, (-1, group)).sum(3) for x in (dk, dv))
            return tuple(x.to(dtype) for x in (torch.einsum("bnts,bsnh->btnh", dlogits, key), dk, dv))

    return Attend.apply(q, k, v)


KERNELS = {"jax": jax_kernel, "torch": torch_kernel}


@contextlib.contextmanager
def emulated(backend: str) -> Iterator[None]:
    """The fused strategies of `backend` compute with the stand-in, on any device."""
    with mock.patch.object(importlib.import_module(f"pi05.{backend}_backend.attention"), "kernel", KERNELS[backend]):
        yield


@contextlib.contextmanager
def exact(backend: str) -> Iterator[None]:
    """The fused strategies keep their structure (valid tokens in front, dead rows zero) and compute without any rounding of their own."""
    module = importlib.import_module(f"pi05.{backend}_backend.attention")

    def attend(q: Any, k: Any, v: Any, valid: Any) -> Any:
        front = None if valid is None else module.pack(valid, valid)[0]  # a kernel is told lengths, not which keys
        out = module.explicit_attention(q, k, v, front)
        return out if valid is None or q.shape[1] != k.shape[1] else out * module.cast(front, out.dtype)[:, :, None, None]

    with mock.patch.dict(module.STRATEGIES, fused_float16=attend):
        yield
