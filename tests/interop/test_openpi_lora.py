"""openpi's adapters by openpi's own rules, as its modules apply them to activations, not as anyone's converter thinks of them."""

from pathlib import Path

import numpy as np
import pytest

from parity import oracles
from pi05.batch import make_draws, synthetic_batch
from pi05.compare import relative_error
from pi05.convert import Options, convert
from pi05.errors import CheckpointError, ParamsError
from pi05.interop.source import merge_lora, without_lora
from pi05.interop.sources import load_weights, open_source
from pi05.spec import Compute, LoRA, ModelSpec

from .published import Tree, lora_leaves, save_orbax

RANKS = {"": 2, "_1": 3}
ALPHA = {"trunk": 8.0, "expert": 6.0}  # so that the attention's scale is 4 and 2
LAYER = 1


@pytest.fixture(scope="module")
def adapters(spec: ModelSpec) -> Tree:
    return lora_leaves(spec, RANKS)


@pytest.fixture(scope="module")
def folder(tree: Tree, adapters: Tree, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_orbax(tmp_path_factory.mktemp("lora"), tree | adapters)


def openpi_outputs(tree: Tree, mark: str, scale: float, inputs: Tree) -> Tree:
    """What openpi's linear maps of one layer give for `inputs`, in float64, each by the two products its module makes."""

    def leaf(name: str) -> np.ndarray:
        return tree[f"PaliGemma/llm/layers/{name}"][LAYER].astype(np.float64)

    def einsum(name: str, equation: str, first: str, second: str, x: np.ndarray, slot: int | None = None) -> np.ndarray:
        w, a, b = (leaf(f"attn/{name}{mark}/{part}") for part in ("w", "lora_a", "lora_b"))
        w, a, b = (array if slot is None else array[slot] for array in (w, a, b))
        return np.einsum(equation, x, w) + scale * np.einsum(second, np.einsum(first, x, a), b)

    def dot(name: str, x: np.ndarray, slot: int | None = None) -> np.ndarray:
        w, a, b = (leaf(f"mlp{mark}/{part}") for part in (name, f"{name}_lora_a", f"{name}_lora_b"))
        w, a, b = (array if slot is None else array[slot] for array in (w, a, b))
        return x @ w + x @ a @ b

    return {
        "q_proj": einsum("q_einsum", "btd,ndh->btnh", "btd,ndl->btnl", "btnl,nlh->btnh", inputs["d"]),
        "k_proj": einsum("kv_einsum", "btd,kdh->btkh", "btd,kdl->btkl", "btkl,klh->btkh", inputs["d"], 0),
        "v_proj": einsum("kv_einsum", "btd,kdh->btkh", "btd,kdl->btkl", "btkl,klh->btkh", inputs["d"], 1),
        "o_proj": einsum("attn_vec_einsum", "btnh,nhd->btd", "btnh,nhl->btl", "btl,nld->btd", inputs["nh"]),
        "gate_proj": dot("gating_einsum", inputs["d"], 0),
        "up_proj": dot("gating_einsum", inputs["d"], 1),
        "down_proj": dot("linear", inputs["f"]),
    }


@pytest.mark.parametrize("group", ["trunk", "expert"])
@pytest.mark.parametrize("form", ["merged", "kept"])
def test_every_linear_map_is_the_one_that_openpi_computes(form: str, group: str, spec: ModelSpec, tree: Tree, adapters: Tree, folder: Path) -> None:
    source = open_source(folder, like=spec, lora_alpha=ALPHA)
    tensors = dict(merge_lora(source.tensors(), source.spec) if form == "merged" else source.tensors())
    mark, tower, rng = {"trunk": "", "expert": "_1"}[group], getattr(spec, group), np.random.default_rng(5)
    sizes = {"d": (tower.width,), "nh": (tower.num_heads, tower.head_dim), "f": (tower.mlp_dim,)}
    inputs = {key: rng.standard_normal((2, 3, *size)) for key, size in sizes.items()}
    for name, want in openpi_outputs(tree | adapters, mark, ALPHA[group] / RANKS[mark], inputs).items():
        x = inputs[{"o_proj": "nh", "down_proj": "f"}.get(name, "d")].reshape(6, -1)
        weight, *factors = (
            tensors[f"{group}.layers.{name}.{part}"][LAYER].astype(np.float64) for part in ("weight", "lora_a", "lora_b")[: 1 if form == "merged" else 3]
        )
        got = x @ weight.reshape(x.shape[1], -1)
        if form == "kept":
            a, b = factors[0].reshape(x.shape[1], -1), factors[1].reshape(factors[1].shape[0], -1)
            got = got + source.spec.lora(group).scale * (x @ a @ b)
        assert relative_error(got, want.reshape(6, -1)) < 1e-6, name


def test_merged_and_kept_adapters_give_one_velocity(spec: ModelSpec, folder: Path) -> None:
    from pi05.torch_backend.model import from_numpy, make_model

    batch = synthetic_batch(spec, 2, seed=4, token_len=9)
    draws = make_draws(spec, 4, 0, np.arange(2))
    source = open_source(folder, like=spec)
    forms = {"kept": (source.spec, source.tensors()), "merged": (without_lora(source.spec), merge_lora(source.tensors(), source.spec))}
    assert source.spec.trunk.lora == LoRA(2 * 8, 16.0) and source.spec.expert.lora == LoRA(3 * 8, 24.0)
    velocity = {}
    torch_batch, torch_draws = from_numpy((batch, draws))
    for name, (own_spec, tensors) in forms.items():
        model = make_model(own_spec, Compute("float32"), tensors)
        x_t, _, counted = model.flow(torch_batch, torch_draws)
        velocity[name] = model(torch_batch.observation, x_t, torch_draws.time, counted)[0].detach().numpy()
    plain = make_model(spec, Compute("float32"), ((name, array) for name, array in source.tensors() if ".lora_" not in name))
    assert relative_error(velocity["kept"], velocity["merged"]) < 1e-5
    without = plain(torch_batch.observation, x_t, torch_draws.time, counted)[0].detach().numpy()
    assert relative_error(without, velocity["merged"]) > 1e-2


def test_the_trees_missing_alpha_is_the_rank_and_said(spec: ModelSpec, folder: Path) -> None:
    default, told = open_source(folder, like=spec), open_source(folder, like=spec, lora_alpha={"trunk": 2.0, "expert": 3.0})
    for (name, one), (_, other) in zip(default.tensors(), told.tensors(), strict=True):
        assert np.array_equal(one, other), name
    assert any("trunk has openpi's adapters of rank 2, alpha 2, its rank: the tree does not say" in note for note in default.notes)
    with pytest.raises(CheckpointError, match="adapters of vision, which the checkpoint does not have; it has trunk, expert"):
        open_source(folder, like=spec, lora_alpha={"vision": 1.0})


def test_alpha_scales_the_attention_and_not_the_feed_forward(spec: ModelSpec, folder: Path) -> None:
    one, four = (dict(open_source(folder, like=spec, lora_alpha={"trunk": alpha}).tensors()) for alpha in (2.0, 8.0))
    changed = {name for name in one if not np.array_equal(one[name], four[name])}
    assert changed == {f"trunk.layers.{name}_proj.lora_b" for name in "qkvo"}
    assert all(np.array_equal(4 * one[name], four[name]) for name in changed)


@pytest.mark.parametrize("target", ["jax", "torch", "lerobot", "pi05"])
def test_the_converter_merges_into_every_form(target: str, spec: ModelSpec, folder: Path, tmp_path: Path) -> None:
    if target != "pi05":
        with pytest.raises(CheckpointError, match="--merge-lora"):
            convert(str(folder), tmp_path / "out", target, Options(weights_only=True))
    convert(str(folder), tmp_path / "out", target, Options(weights_only=True, merge_lora=True, lora_alpha=("trunk=8", "expert=6")))
    source = open_source(folder, like=spec, lora_alpha=ALPHA)
    wanted = dict(merge_lora(source.tensors(), source.spec))
    got = dict(load_weights(tmp_path / "out", spec, seed=0).tensors)
    assert got.keys() == wanted.keys() and all(np.array_equal(got[name], wanted[name]) for name in wanted)


def test_one_tower_alone_may_have_adapters(spec: ModelSpec, tree: Tree, tmp_path: Path) -> None:
    source = open_source(save_orbax(tmp_path, tree | lora_leaves(spec, {"_1": 3})), like=spec)
    assert source.spec.trunk.lora is None and source.spec.expert.lora == LoRA(24, 24.0)
    assert dict(source.tensors()).keys() >= {"expert.layers.q_proj.lora_a"}


def test_a_lost_adapter_is_missed(spec: ModelSpec, tree: Tree, adapters: Tree, tmp_path: Path) -> None:
    lost = "PaliGemma/llm/layers/attn/q_einsum/lora_b"
    save_orbax(tmp_path / "lost", {name: array for name, array in (tree | adapters).items() if name != lost})
    with pytest.raises(ParamsError, match=rf"1 in the target that nothing fills: trunk.layers.q_proj.lora_b \(from {lost}\)"):
        load_weights(tmp_path / "lost", spec.replace(trunk__lora=LoRA(16, 16.0), expert__lora=LoRA(24, 24.0)), seed=0)
    save_orbax(tmp_path / "mixed", tree | adapters | _other_rank(spec))
    with pytest.raises(CheckpointError, match=r"adapters of trunk have several ranks, \[2, 5\]"):
        open_source(tmp_path / "mixed", like=spec)


def _other_rank(spec: ModelSpec) -> Tree:
    return {name: array for name, array in lora_leaves(spec, {"": 5}).items() if "linear" in name}


def test_the_oracle_network_agrees_with_the_merged_weights(spec: ModelSpec, folder: Path) -> None:
    """The merged tensors are an ordinary model: LeRobot's network gives our velocity on them."""
    from pi05.torch_backend.model import from_numpy, make_model

    source = open_source(folder, like=spec)
    merged = dict(merge_lora(source.tensors(), source.spec))
    batch = synthetic_batch(spec, 2, seed=4, token_len=9, padded_actions=False)
    draws = make_draws(spec, 4, 0, np.arange(2))
    theirs = oracles.lerobot(spec, merged, batch, draws, 1)["velocity"]
    model = make_model(source.spec, Compute("float32"), source.tensors())
    torch_batch, torch_draws = from_numpy((batch, draws))
    x_t, _, counted = model.flow(torch_batch, torch_draws, padded_steps="count")
    ours = model(torch_batch.observation, x_t, torch_draws.time, counted)[0].detach().numpy()
    assert relative_error(ours, theirs) < 1e-5
