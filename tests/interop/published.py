"""Writes the published forms by hand: names and transforms from tests/fact_sheet.py, files by the libraries that their makers use.

Nothing here comes from pi05/params.py or pi05/interop, so that one can judge the other.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from pi05.params import philox
from pi05.spec import ModelSpec
from tests.fact_sheet import openpi_shapes, published_from_openpi

PREFIX = "paligemma_with_expert."
EMBEDDING = PREFIX + "paligemma.model.language_model.embed_tokens.weight"
TIED = PREFIX + "paligemma.lm_head.weight"
DEAD = PREFIX + "gemma_expert.lm_head.weight"
Tree = dict[str, np.ndarray]


def openpi_tree(spec: ModelSpec, seed: int = 0) -> Tree:
    """Leaves of openpi's tree by path, float32, scaled so that activations stay near one and nothing is idle."""
    out = {}
    for name, size in openpi_shapes(spec).items():
        rng, leaf = philox(seed, name), name.rsplit("/", 1)[-1]
        values = rng.standard_normal(size, np.float32)
        if leaf in ("bias", "scale"):
            values = 0.2 * values + (1.0 if "img" in name and leaf == "scale" else 0.0)
        else:
            fan_in = {"attn_vec_einsum": size[-3:-1], "out": size[-3:-1], "embedding": size[:-1]}.get(name.split("/")[-2].removesuffix("_1"), size[-2:-1])
            fan_in = size[1:2] if name.endswith(("query/kernel", "key/kernel", "value/kernel")) else fan_in
            values = values / np.sqrt(np.prod(size[-1:] if "embed" in leaf else fan_in))
        out[name] = values.astype(np.float32)
    return out


def lora_leaves(spec: ModelSpec, ranks: dict[str, int], seed: int = 0) -> Tree:
    """openpi's adapters of the trunk ("") or the expert ("_1"): shapes of the fact sheet's last paragraph on JAX leaves."""
    out: dict[str, tuple[int, ...]] = {}
    for mark, rank in ranks.items():
        g = spec.expert if mark else spec.trunk
        n, k, d, h, f, layers = g.num_heads, g.num_kv_heads, g.width, g.head_dim, g.mlp_dim, g.depth
        attn, mlp = "PaliGemma/llm/layers/attn/", f"PaliGemma/llm/layers/mlp{mark}/"
        out |= {
            f"{attn}q_einsum{mark}/lora_a": (layers, n, d, rank),
            f"{attn}q_einsum{mark}/lora_b": (layers, n, rank, h),
            f"{attn}kv_einsum{mark}/lora_a": (layers, 2, k, d, rank),
            f"{attn}kv_einsum{mark}/lora_b": (layers, 2, k, rank, h),
            f"{attn}attn_vec_einsum{mark}/lora_a": (layers, n, h, rank),
            f"{attn}attn_vec_einsum{mark}/lora_b": (layers, n, rank, d),
            f"{mlp}gating_einsum_lora_a": (layers, 2, d, rank),
            f"{mlp}gating_einsum_lora_b": (layers, 2, rank, f),
            f"{mlp}linear_lora_a": (layers, f, rank),
            f"{mlp}linear_lora_b": (layers, rank, d),
        }
    return {name: 0.3 * philox(seed, name).standard_normal(size, np.float32) for name, size in out.items()}


def save_orbax(folder: Path, tree: Tree, *, value_key: bool = False, outer: bool = True) -> Path:
    """An orbax checkpoint as openpi's trainer (`value_key`) or its released ones have it; returns the folder that holds params/."""
    import orbax.checkpoint as ocp

    nested: dict = {}
    for name, array in tree.items():
        node = nested
        *parents, leaf = name.split("/") + ["value"] * value_key
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = array
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save((folder / "params").resolve(), {"params": nested} if outer else nested)
    return folder


def torch_tensors(tree: Tree, *, names: str = "tied") -> Tree:
    """The published tensors, contiguous. names: "tied" keeps the embedding as lm_head alone, as openpi's files do; "embed" under its own; "both"."""
    out = {name: np.ascontiguousarray(array) for name, array in published_from_openpi(tree).items()}
    if names in ("tied", "both"):
        out[TIED] = out[EMBEDDING] if names == "tied" else np.full_like(out[EMBEDDING], 7.0)  # both: after training with LeRobot it is stale
    if names == "tied":
        del out[EMBEDDING]
    return out


def save_torch(folder: Path, tensors: Tree, *, prefix: str = "", config: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({prefix + name: array for name, array in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
