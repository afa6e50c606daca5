"""The published layouts, written by hand from their description and not from pi05/params.py, so that one can judge the other.

Source: shapes and names of openpi's orbax tree and of the PyTorch files that openpi and LeRobot publish.
"""

import numpy as np

from pi05.spec import ModelSpec

VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model."
TRUNK = "paligemma_with_expert.paligemma.model.language_model."
EXPERT = "paligemma_with_expert.gemma_expert.model."
PROJECTOR = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear."


def openpi_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The 51 leaves of openpi's tree."""
    v, t, e = spec.vision, spec.trunk, spec.expert
    img, blk = "PaliGemma/img/", "PaliGemma/img/Transformer/encoderblock/"
    out: dict[str, tuple[int, ...]] = {
        img + "embedding/kernel": (v.patch_size, v.patch_size, 3, v.width),
        img + "embedding/bias": (v.width,),
        img + "pos_embedding": (1, v.num_patches, v.width),
        img + "Transformer/encoder_norm/scale": (v.width,),
        img + "Transformer/encoder_norm/bias": (v.width,),
        img + "head/kernel": (v.width, t.width),
        img + "head/bias": (t.width,),
    }
    for norm in ("LayerNorm_0", "LayerNorm_1"):
        out |= {f"{blk}{norm}/{kind}": (v.depth, v.width) for kind in ("scale", "bias")}
    for kind in ("query", "key", "value"):
        out[f"{blk}MultiHeadDotProductAttention_0/{kind}/kernel"] = (v.depth, v.width, v.num_heads, v.head_dim)
        out[f"{blk}MultiHeadDotProductAttention_0/{kind}/bias"] = (v.depth, v.num_heads, v.head_dim)
    out[f"{blk}MultiHeadDotProductAttention_0/out/kernel"] = (v.depth, v.num_heads, v.head_dim, v.width)
    out[f"{blk}MultiHeadDotProductAttention_0/out/bias"] = (v.depth, v.width)
    for i, (a, b) in enumerate(((v.width, v.mlp_dim), (v.mlp_dim, v.width))):
        out |= {f"{blk}MlpBlock_0/Dense_{i}/kernel": (v.depth, a, b), f"{blk}MlpBlock_0/Dense_{i}/bias": (v.depth, b)}
    out["PaliGemma/llm/embedder/input_embedding"] = (spec.vocab_size, t.width)
    for g, mark in ((t, ""), (e, "_1")):
        layers = "PaliGemma/llm/layers/"
        out |= {
            f"{layers}attn/q_einsum{mark}/w": (g.depth, g.num_heads, g.width, g.head_dim),
            f"{layers}attn/kv_einsum{mark}/w": (g.depth, 2, g.num_kv_heads, g.width, g.head_dim),
            f"{layers}attn/attn_vec_einsum{mark}/w": (g.depth, g.num_heads, g.head_dim, g.width),
            f"{layers}mlp{mark}/gating_einsum": (g.depth, 2, g.width, g.mlp_dim),
            f"{layers}mlp{mark}/linear": (g.depth, g.mlp_dim, g.width),
        }
    for norm in ("pre_attention_norm", "pre_ffw_norm"):
        out[f"PaliGemma/llm/layers/{norm}/scale"] = (t.depth, t.width)
        out[f"PaliGemma/llm/layers/{norm}_1/Dense_0/kernel"] = (e.depth, e.width, 3 * e.width)
        out[f"PaliGemma/llm/layers/{norm}_1/Dense_0/bias"] = (e.depth, 3 * e.width)
    out["PaliGemma/llm/final_norm/scale"] = (t.width,)
    out["PaliGemma/llm/final_norm_1/Dense_0/kernel"] = (e.width, 3 * e.width)
    out["PaliGemma/llm/final_norm_1/Dense_0/bias"] = (3 * e.width,)
    for name, a, b in (("action_in_proj", spec.action_dim, e.width), ("action_out_proj", e.width, spec.action_dim)):
        out |= {f"{name}/kernel": (a, b), f"{name}/bias": (b,)}
    for name in ("time_mlp_in", "time_mlp_out"):
        out |= {f"{name}/kernel": (e.width, e.width), f"{name}/bias": (e.width,)}
    return out


def published_from_openpi(tree: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The published PyTorch tensors that openpi's leaves become."""
    out = {
        VISION + "embeddings.patch_embedding.weight": tree["PaliGemma/img/embedding/kernel"].transpose(3, 2, 0, 1),
        VISION + "embeddings.patch_embedding.bias": tree["PaliGemma/img/embedding/bias"],
        VISION + "embeddings.position_embedding.weight": tree["PaliGemma/img/pos_embedding"][0],
        VISION + "post_layernorm.weight": tree["PaliGemma/img/Transformer/encoder_norm/scale"],
        VISION + "post_layernorm.bias": tree["PaliGemma/img/Transformer/encoder_norm/bias"],
        PROJECTOR + "weight": tree["PaliGemma/img/head/kernel"].T,
        PROJECTOR + "bias": tree["PaliGemma/img/head/bias"],
        TRUNK + "embed_tokens.weight": tree["PaliGemma/llm/embedder/input_embedding"],
        TRUNK + "norm.weight": tree["PaliGemma/llm/final_norm/scale"],
        EXPERT + "norm.dense.weight": tree["PaliGemma/llm/final_norm_1/Dense_0/kernel"].T,
        EXPERT + "norm.dense.bias": tree["PaliGemma/llm/final_norm_1/Dense_0/bias"],
    }
    for name in ("action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out"):
        out |= {f"{name}.weight": tree[f"{name}/kernel"].T, f"{name}.bias": tree[f"{name}/bias"]}
    block = {k.removeprefix("PaliGemma/img/Transformer/encoderblock/"): v for k, v in tree.items() if "encoderblock" in k}
    for i in range(len(block["LayerNorm_0/scale"])):
        at = f"{VISION}encoder.layers.{i}."
        for norm, name in (("LayerNorm_0", "layer_norm1"), ("LayerNorm_1", "layer_norm2")):
            out |= {f"{at}{name}.weight": block[f"{norm}/scale"][i], f"{at}{name}.bias": block[f"{norm}/bias"][i]}
        attention = "MultiHeadDotProductAttention_0/"
        width = block["LayerNorm_0/scale"].shape[1]
        for word, letter in (("query", "q"), ("key", "k"), ("value", "v")):
            out[f"{at}self_attn.{letter}_proj.weight"] = block[f"{attention}{word}/kernel"][i].reshape(width, width).T
            out[f"{at}self_attn.{letter}_proj.bias"] = block[f"{attention}{word}/bias"][i].reshape(-1)
        out[f"{at}self_attn.out_proj.weight"] = block[f"{attention}out/kernel"][i].reshape(width, width).T
        out[f"{at}self_attn.out_proj.bias"] = block[f"{attention}out/bias"][i]
        for j in (0, 1):
            out[f"{at}mlp.fc{j + 1}.weight"] = block[f"MlpBlock_0/Dense_{j}/kernel"][i].T
            out[f"{at}mlp.fc{j + 1}.bias"] = block[f"MlpBlock_0/Dense_{j}/bias"][i]
    for mark, target in (("", TRUNK), ("_1", EXPERT)):
        leaf = {k.removeprefix("PaliGemma/llm/layers/"): v for k, v in tree.items() if "llm/layers/" in k}
        for i in range(len(leaf[f"mlp{mark}/linear"])):
            at = f"{target}layers.{i}."
            q, kv, o = (leaf[f"attn/{name}{mark}/w"][i] for name in ("q_einsum", "kv_einsum", "attn_vec_einsum"))
            heads, width, head_dim = q.shape
            out[f"{at}self_attn.q_proj.weight"] = q.transpose(0, 2, 1).reshape(heads * head_dim, width)
            out[f"{at}self_attn.k_proj.weight"] = kv[0].transpose(0, 2, 1).reshape(-1, width)
            out[f"{at}self_attn.v_proj.weight"] = kv[1].transpose(0, 2, 1).reshape(-1, width)
            out[f"{at}self_attn.o_proj.weight"] = o.reshape(heads * head_dim, width).T
            gating = leaf[f"mlp{mark}/gating_einsum"][i]
            out[f"{at}mlp.gate_proj.weight"], out[f"{at}mlp.up_proj.weight"] = gating[0].T, gating[1].T
            out[f"{at}mlp.down_proj.weight"] = leaf[f"mlp{mark}/linear"][i].T
            for norm, name in (("pre_attention_norm", "input_layernorm"), ("pre_ffw_norm", "post_attention_layernorm")):
                if mark:
                    out[f"{at}{name}.dense.weight"] = leaf[f"{norm}_1/Dense_0/kernel"][i].T
                    out[f"{at}{name}.dense.bias"] = leaf[f"{norm}_1/Dense_0/bias"][i]
                else:
                    out[f"{at}{name}.weight"] = leaf[f"{norm}/scale"][i]
    return out
