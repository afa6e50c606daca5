"""Attention as it must not be done: cuDNN with a mask of queries x keys, and what goes wrong with it. The gauntlet must call it UNSAFE.

On a GPU the real kernel runs, through jax.nn. On the CPU NumPy rounds where it rounds and repeats its two known faults: a masked logit is a large
number instead of minus infinity, which swallows the sum of a fully masked row (bfloat16: every weight of the row becomes 1), and where the number
of keys is 64 modulo 128, columns behind the last key score 0, so that exp(0 - logsumexp) is infinite for very negative logits (cuDNN 9.19, H200).

Axes: B T S N H (see spec.py).
"""

import numpy as np

from pi05.kernel_check import Scene, round_bfloat16

MASKED = {"float16": np.float32(-(2.0**15)), "bfloat16": np.float32(-(2.0**41))}
ROUND = {"float16": lambda x: np.asarray(x).astype(np.float16).astype(np.float32), "bfloat16": round_bfloat16}


def masked_attention(scene: Scene, *, dtype: str, guarded: bool, scaled: bool, on_gpu: bool) -> dict[str, np.ndarray]:
    """Output and gradients of self-attention in `dtype`.

    guarded: rows without a key see all keys, and are zeroed afterwards. scaled: the cotangent is brought near 1, per sample.
    """
    mask_BTS = np.ones((len(scene.q), scene.q.shape[1], scene.k.shape[1]), bool)
    if scene.valid is not None:
        mask_BTS = scene.valid[:, :, None] & scene.valid[:, None, :]
    alive_BT11 = mask_BTS.any(2)[:, :, None, None]
    live_BT11 = alive_BT11 | (not guarded)
    g = np.where(live_BT11, scene.g, 0)
    largest_B111 = np.abs(g).max((1, 2, 3), keepdims=True)
    scale_B111 = np.exp2(-np.ceil(np.log2(largest_B111))) if scaled else np.ones_like(largest_B111)
    attend = _on_gpu if on_gpu else _emulated
    with np.errstate(over="ignore", invalid="ignore"):  # overflow is what is shown
        out, dq, dk, dv = attend(scene, g * scale_B111, mask_BTS | ~live_BT11[:, :, 0], dtype)
    out, dq = np.where(alive_BT11, out, 0), np.where(live_BT11, dq / scale_B111, 0)  # nobody reads that out
    return {"out": out, "dq": dq, "dk": dk / scale_B111, "dv": dv / scale_B111}


def _emulated(scene: Scene, g: np.ndarray, mask_BTS: np.ndarray, dtype: str) -> tuple[np.ndarray, ...]:
    low, group, scale = ROUND[dtype], scene.q.shape[2] // scene.k.shape[2], np.float32(scene.q.shape[-1] ** -0.5)
    q, k, v, g = (low(x) for x in (scene.q, scene.k, scene.v, g))
    out, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, n in np.ndindex(q.shape[0], q.shape[2]):
        query, key, value, cotangent = q[b, :, n], k[b, :, n // group], v[b, :, n // group], g[b, :, n]
        logits = query @ key.T * scale + np.where(mask_BTS[b], np.float32(0), MASKED[dtype])
        top = logits.max(1, keepdims=True)
        weights = np.exp(logits - top)
        total = weights.sum(1, keepdims=True)
        out[b, :, n] = low(low(weights) @ value / total)
        weights = np.exp(logits - (top + np.log(total)))
        sums = (cotangent * out[b, :, n]).sum(1, keepdims=True)
        dlogits = low(weights * (cotangent @ value.T - sums) * scale)
        overrun = np.zeros_like(sums)
        if len(key) % 128 == 64:
            overrun = low(np.exp(-(top + np.log(total))) * (0 - sums) * scale) * np.float32(0)  # times a key of zeros: 0, or NaN
        dq[b, :, n] = low(dlogits @ key + overrun)
        dk[b, :, n // group] += low(dlogits.T @ query)
        dv[b, :, n // group] += low(low(weights).T @ cotangent)
    return out, dq, dk, dv


def _on_gpu(scene: Scene, g: np.ndarray, mask_BTS: np.ndarray, dtype: str) -> tuple[np.ndarray, ...]:
    import jax
    import jax.numpy as jnp

    q, k, v, g = (jnp.asarray(x, dtype) for x in (scene.q, scene.k, scene.v, g))
    mask_B1TS = jnp.asarray(mask_BTS[:, None])
    out, pull = jax.vjp(jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=mask_B1TS, implementation="cudnn")), q, k, v)
    return tuple(np.asarray(x.astype(jnp.float32)) for x in (out, *pull(g)))
