"""The vision tower: SigLIP (Zhai et al. 2023), and the projection of its tokens to the trunk's width.

Axes: B C Y X P N H D (see spec.py).
Dtypes: image scaling, patch embedding and position embedding in at least float32, the layers in the compute dtype.
"""

from typing import Any

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import Array

from pi05.jax_backend.attention import attention
from pi05.jax_backend.layers import LayerNorm, Linear, cast, gelu, region, scan_layers, stack_layers
from pi05.spec import Compute, ModelSpec, VisionSpec


class VisionLayer(nnx.Module):
    """One pre-norm transformer layer with biases."""

    def __init__(self, spec: VisionSpec):
        self.attn_norm = LayerNorm(spec.width)
        self.q_proj = Linear(spec.width, spec.width, bias=True, lora=spec.lora)
        self.k_proj = Linear(spec.width, spec.width, bias=True, lora=spec.lora)
        self.v_proj = Linear(spec.width, spec.width, bias=True, lora=spec.lora)
        self.o_proj = Linear(spec.width, spec.width, bias=True, lora=spec.lora)
        self.mlp_norm = LayerNorm(spec.width)
        self.up_proj = Linear(spec.width, spec.mlp_dim, bias=True, lora=spec.lora)
        self.down_proj = Linear(spec.mlp_dim, spec.width, bias=True, lora=spec.lora)


@region
def project_heads(layer: VisionLayer, x_BPD: Array, head_dim: int) -> tuple[Array, Array, Array]:
    """Normalises the stream; returns queries, keys and values [B, P, N, H]."""
    h_BPD = layer.attn_norm(x_BPD)
    return tuple(rearrange(proj(h_BPD), "B P (N H) -> B P N H", H=head_dim) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))


@region
def finish_layer(layer: VisionLayer, x_BPD: Array, attn_BPNH: Array) -> Array:
    """Adds the attention branch, then the feed-forward branch."""
    x_BPD = x_BPD + layer.o_proj(rearrange(attn_BPNH, "B P N H -> B P (N H)"))
    return x_BPD + layer.down_proj(gelu(layer.up_proj(layer.mlp_norm(x_BPD))))


def vision_block(layer: VisionLayer, x_BPD: Array, spec: VisionSpec, compute: Compute) -> tuple[Array, dict[str, Array]]:
    """One layer on the tokens of each image; returns the stream and its intermediates."""
    attn_BPNH = attention(*project_heads(layer, x_BPD, spec.head_dim), strategy=compute.strategy)
    x_BPD = finish_layer(layer, x_BPD, attn_BPNH)
    return x_BPD, {"attn": attn_BPNH, "out": x_BPD}


class Vision(nnx.Module):
    """Images to trunk tokens."""

    def __init__(self, spec: ModelSpec, compute: Compute):
        self.spec, self.compute = spec.vision, compute
        self.patch_embed = Linear(spec.vision.patch_dim, spec.vision.width, bias=True)
        self.pos_embed = nnx.Param(jnp.zeros((spec.vision.num_patches, spec.vision.width), jnp.float32))
        self.layers = stack_layers(lambda: VisionLayer(spec.vision), spec.vision.depth)
        self.final_norm = LayerNorm(spec.vision.width)
        self.head = Linear(spec.vision.width, spec.trunk.width, bias=True)

    def __call__(self, images_BCYX3: Array, *, capture: bool = False) -> tuple[Array, dict[str, Array]]:
        """Encodes uint8 images in 0..255 or float images in [-1, 1].

        Returns the tokens [B, C, P, D] in the compute dtype and, with `capture`, the intermediates by name.
        """
        batch, cameras = images_BCYX3.shape[:2]
        if self.compute.batch_cameras:
            tokens_BPD, taps = self._encode(rearrange(images_BCYX3, "B C Y X R -> (B C) Y X R"), capture)
        else:
            parts = [self._encode(images_BCYX3[:, camera], capture) for camera in range(cameras)]
            tokens_BPD = rearrange(jnp.stack([tokens for tokens, _ in parts]), "C B P D -> (B C) P D")
            taps = {name: rearrange(jnp.stack([part[name] for _, part in parts]), _MERGE_CAMERAS[name]) for name in parts[0][1]}
        taps = {name: rearrange(tap, _SPLIT_CAMERAS[name], B=batch) for name, tap in taps.items()}
        return rearrange(tokens_BPD, "(B C) P D -> B C P D", B=batch), taps

    def _encode(self, images_BYX3: Array, capture: bool) -> tuple[Array, dict[str, Array]]:
        full = jnp.dtype(self.compute.full_dtype)
        pixels_BYX3 = cast(images_BYX3, full)
        if images_BYX3.dtype == jnp.uint8:
            pixels_BYX3 = pixels_BYX3 / 255 * 2 - 1
        size = self.spec.patch_size
        patches_BPD = rearrange(pixels_BYX3, "B (Y I) (X J) R -> B (Y X) (I J R)", I=size, J=size)
        x_BPD = self.patch_embed(patches_BPD) + cast(self.pos_embed[...], full)
        x_BPD = embedded_BPD = cast(x_BPD, jnp.dtype(self.compute.dtype))

        def body(layers: tuple, x_BPD: Array, _: None, last: Any) -> tuple[Array, dict[str, Array]]:
            x_BPD, taps = vision_block(layers[0], x_BPD, self.spec, self.compute)
            return x_BPD, taps if capture else {}

        x_BPD, taps = scan_layers(body, (self.layers,), x_BPD, remat=self.compute.remat)
        tokens_BPD = self.head(self.final_norm(x_BPD))
        if not capture:
            return tokens_BPD, {}
        named = {f"vision.layers.{name}": tap for name, tap in taps.items()}
        return tokens_BPD, {"vision.embedded": embedded_BPD, "vision.tokens": tokens_BPD} | named


_SPLIT_CAMERAS = {
    "vision.embedded": "(B C) P D -> B C P D",
    "vision.tokens": "(B C) P D -> B C P D",
    "vision.layers.attn": "L (B C) P N H -> L B C P N H",
    "vision.layers.out": "L (B C) P D -> L B C P D",
}
_MERGE_CAMERAS = {
    "vision.embedded": "C B P D -> (B C) P D",
    "vision.tokens": "C B P D -> (B C) P D",
    "vision.layers.attn": "C L B P N H -> L (B C) P N H",
    "vision.layers.out": "C L B P D -> L (B C) P D",
}
