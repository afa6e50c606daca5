"""The trunk (Gemma 2B) and the action expert (Gemma 300M with adaRMS), two transformers that attend jointly, layer by layer.

Axes: B T S P A N K H D L (see spec.py).
Dtypes: the residual streams in the compute dtype; norms, rotary embedding, attention logits and softmax in at least float32.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import Array

from pi05.jax_backend.attention import attention, is_fused, join
from pi05.jax_backend.layers import AdaRMSNorm, Embedding, Linear, RMSNorm, add_gated, gelu, region, rotate, scan_layers, stack_layers, unless
from pi05.spec import Compute, GemmaSpec


class GemmaLayer(nnx.Module):
    """One pre-norm transformer layer without biases (Gemma Team 2024); with `adaptive`, its norms follow the flow time."""

    def __init__(self, spec: GemmaSpec, *, adaptive: bool):
        width, query_dim, kv_dim = spec.width, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.attn_norm = AdaRMSNorm(width, width) if adaptive else RMSNorm(width)
        self.q_proj = Linear(width, query_dim, lora=spec.lora)
        self.k_proj = Linear(width, kv_dim, lora=spec.lora)
        self.v_proj = Linear(width, kv_dim, lora=spec.lora)
        self.o_proj = Linear(query_dim, width, lora=spec.lora)
        self.mlp_norm = AdaRMSNorm(width, width) if adaptive else RMSNorm(width)
        self.gate_proj = Linear(width, spec.mlp_dim, lora=spec.lora)
        self.up_proj = Linear(width, spec.mlp_dim, lora=spec.lora)
        self.down_proj = Linear(spec.mlp_dim, width, lora=spec.lora)


class Gemma(nnx.Module):
    """The parameters of one Gemma; `run_layers` computes with two of them."""

    def __init__(self, spec: GemmaSpec, *, adaptive: bool, vocab_size: int | None = None):
        self.embed = None if vocab_size is None else Embedding(vocab_size, spec.width)
        self.layers = stack_layers(lambda: GemmaLayer(spec, adaptive=adaptive), spec.depth)
        self.final_norm = AdaRMSNorm(spec.width, spec.width) if adaptive else RMSNorm(spec.width)


@dataclasses.dataclass(frozen=True)
class Stream:
    """The tokens of one transformer.

    x: residual stream [B, T, D]. angles: rotary cosines and sines [B, T, H / 2] at the tokens' positions.
    valid: bool[B, T], tokens that may be attended to.
    """

    x: Array
    angles: tuple[Array, Array]
    valid: Array


@region
def project_heads(layer: GemmaLayer, x_BTD: Array, cond_BD: Array | None, angles: tuple[Array, Array]) -> tuple[Array, Array, Array, Array | None]:
    """Normalises the stream; returns rotated queries [B, T, N, H] and keys [B, T, K, H], values, and the gate of the attention branch."""
    head_dim = 2 * angles[0].shape[-1]
    h_BTD, gate_B1D = layer.attn_norm(x_BTD, cond_BD)
    q_BTNH, k_BTKH, v_BTKH = (rearrange(proj(h_BTD), "B T (N H) -> B T N H", H=head_dim) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    return rotate(q_BTNH, angles), rotate(k_BTKH, angles), v_BTKH, gate_B1D


@region
def finish_layer(layer: GemmaLayer, x_BTD: Array, attn_BTNH: Array, gate_B1D: Array | None, cond_BD: Array | None) -> Array:
    """Adds the attention branch, then the GeGLU branch (Shazeer 2020)."""
    x_BTD = add_gated(x_BTD, layer.o_proj(rearrange(attn_BTNH, "B T N H -> B T (N H)")), gate_B1D)
    h_BTD, gate_B1D = layer.mlp_norm(x_BTD, cond_BD)
    return add_gated(x_BTD, layer.down_proj(gelu(layer.gate_proj(h_BTD)) * layer.up_proj(h_BTD)), gate_B1D)


def block(
    layers: tuple, xs: tuple, prefix: Stream | None, suffix: Stream | None, cond_BD: Array | None, cache: dict | None, compute: Compute, last: Any = None
) -> tuple:
    """One layer of both transformers.

    layers: (trunk, expert). xs: (prefix x, suffix x), None where the stream is absent; `prefix` and `suffix` give angles and validity.
    cache: {"k", "v"} of this layer's prefix [B, P, K, H] where the prefix itself is absent.
    last: whether nothing reads the new prefix, so that only its keys and values are computed; None: it is read, and intermediates are wanted.
    Returns the new (prefix x, suffix x) and the intermediates; of the prefix, "trunk.k" and "trunk.v" are the cache.
    """
    (trunk, expert), (prefix_x, suffix_x), taps = layers, xs, {}
    if prefix_x is not None:
        q_BPNH, k_BPKH, v_BPKH, gate_B1D = project_heads(trunk, prefix_x, None, prefix.angles)
        cache = {"k": k_BPKH, "v": v_BPKH}

        def attend() -> Array:
            return attention(q_BPNH, k_BPKH, v_BPKH, prefix.valid, strategy=compute.strategy)

        if last is None:
            attn_BPNH = attend()
            prefix_x = finish_layer(trunk, prefix_x, attn_BPNH, gate_B1D, None)
            taps |= {"trunk.q": q_BPNH, "trunk.k": k_BPKH, "trunk.v": v_BPKH, "trunk.attn": attn_BPNH, "trunk.out": prefix_x}
        else:
            prefix_x = unless(last, lambda x_BPD: finish_layer(trunk, x_BPD, attend(), gate_B1D, None), prefix_x)
    if suffix_x is not None:
        q_BANH, k_BAKH, v_BAKH, gate_B1D = project_heads(expert, suffix_x, cond_BD, suffix.angles)
        both = ((cache["k"], k_BAKH), (cache["v"], v_BAKH), (prefix.valid, suffix.valid))
        if is_fused(compute.strategy):
            k_BSKH, v_BSKH, valid_BS = (join(*parts, prefix.valid, suffix.valid) for parts in both)
        else:
            k_BSKH, v_BSKH, valid_BS = (jnp.concatenate(parts, axis=1) for parts in both)
        attn_BANH = attention(q_BANH, k_BSKH, v_BSKH, valid_BS, strategy=compute.strategy)
        suffix_x = finish_layer(expert, suffix_x, attn_BANH, gate_B1D, cond_BD)
        taps |= {"expert.q": q_BANH, "expert.k": k_BAKH, "expert.v": v_BAKH, "expert.attn": attn_BANH, "expert.out": suffix_x}
    return (prefix_x, suffix_x), taps


def run_layers(
    trunk: Gemma,
    expert: Gemma,
    prefix: Stream,
    suffix: Stream | None,
    cond_BD: Array | None,
    compute: Compute,
    *,
    cache: dict | None = None,
    keep: tuple[str, ...] = (),
) -> tuple[Array | None, Array | None, dict[str, Array]]:
    """All layers and the final norms.

    cache: {"k", "v"} [L, B, P, K, H] of an earlier call; then only the suffix is computed and `prefix.x` is not read.
    keep: names of the block's intermediates to return, stacked over layers.
    Returns the final prefix [B, P, D] (None with a cache, and where it is not read: there is a suffix, and no intermediates are wanted), the
    final suffix [B, A, D] (None without one), and what was kept.
    """

    prefix_is_read = suffix is None or bool(keep)

    def body(layers: tuple, xs: tuple, layer_cache: dict | None, last: Any) -> tuple[tuple, dict[str, Array]]:
        xs, taps = block(layers, xs, prefix, suffix, cond_BD, layer_cache, compute, None if prefix_is_read else last)
        return xs, {name: taps[name] for name in keep if name in taps}

    start = (None if cache is not None else prefix.x, None if suffix is None else suffix.x)
    (prefix_x, suffix_x), kept = scan_layers(body, (trunk.layers, expert.layers), start, cache, remat=compute.remat)
    final_prefix = None if prefix_x is None or not prefix_is_read else trunk.final_norm(prefix_x, None)[0]
    final_suffix = None if suffix_x is None else expert.final_norm(suffix_x, cond_BD)[0]
    return final_prefix, final_suffix, kept


BLOCK_TAPS = tuple(f"{tower}.{name}" for tower in ("trunk", "expert") for name in ("q", "k", "v", "attn", "out"))
CACHE_TAPS = ("trunk.k", "trunk.v")
