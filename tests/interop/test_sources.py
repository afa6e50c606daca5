"""Weights for a training run: from anywhere, whole, of the right model, and nothing random that was not asked for."""

import os
import sys
import time
from pathlib import Path

import fsspec
import huggingface_hub
import numpy as np
import pytest

from pi05.errors import CheckpointError, ParamsError
from pi05.initial import initial_params
from pi05.interop import own
from pi05.interop.assets import Assets
from pi05.interop.ledger import Ledger
from pi05.interop.sources import load_weights, open_source
from pi05.params import count, rows, shapes
from pi05.spec import LoRA, ModelSpec

from .published import DEAD, EMBEDDING, TIED, Tree, openpi_tree, save_orbax, save_torch, torch_tensors


def loaded(folder: Path | str, spec: ModelSpec, **options: object) -> Tree:
    return dict(load_weights(folder, spec, **{"seed": 0} | options).tensors)


# --- user_reports 3.1, 3.8: nothing is lost, nothing is random


def test_a_missing_and_an_unknown_tensor_are_errors_with_both_lists(spec: ModelSpec, tree: Tree, tmp_path: Path) -> None:
    broken = {name: array for name, array in tree.items() if name != "time_mlp_in/bias"} | {"PaliGemma/img/extra/kernel": np.zeros(3, np.float32)}
    save_orbax(tmp_path, broken)
    with pytest.raises(ParamsError) as error:
        load_weights(tmp_path, spec, seed=0)
    assert "1 in the source that no parameter reads: PaliGemma/img/extra/kernel" in str(error.value)
    assert "1 in the target that nothing fills: time_mlp_in.bias (from time_mlp_in/bias)" in str(error.value)


def test_adapters_that_nobody_reads_are_an_error(spec: ModelSpec, tree: Tree, tmp_path: Path) -> None:
    extra = {"paligemma_with_expert.gemma_expert.model.layers.0.self_attn.q_proj.lora_A.weight": np.zeros((2, 56), np.float32)}
    save_torch(tmp_path, torch_tensors(tree) | extra)
    with pytest.raises(ParamsError, match="1 in the source that no parameter reads: .*q_proj.lora_A.weight"):
        load_weights(tmp_path, spec, seed=0)


def test_a_tensor_of_a_wrong_shape_is_named_with_both_shapes(spec: ModelSpec, tree: Tree, tmp_path: Path) -> None:
    save_torch(tmp_path, torch_tensors(tree) | {"time_mlp_in.bias": np.zeros(55, np.float32)})
    with pytest.raises(CheckpointError, match=r"time_mlp_in.bias has shape \(55,\)"):
        load_weights(tmp_path, spec, seed=0)


def test_adapters_that_the_run_asks_for_start_fresh_and_are_named(forms: dict[str, Path], spec: ModelSpec) -> None:
    adapted = spec.replace(trunk__lora=LoRA(4, 8.0))
    weights = load_weights(forms["orbax"], adapted, seed=7)
    names = [row.name for row in rows(adapted) if row.adapter]
    assert list(weights.report.new) == names and "new: [trunk.*.lora_a (7), trunk.*.lora_b (7)]" in str(weights.report)
    assert weights.report.parameters == count(spec)
    got, drawn, base = dict(weights.tensors), dict(initial_params(adapted, 7)), loaded(forms["orbax"], spec)
    assert got.keys() == shapes(adapted).keys()
    assert all(np.array_equal(got[name], drawn[name] if name in names else base[name]) for name in got)


@pytest.mark.parametrize("ours", [None, LoRA(4, 4.0), LoRA(8, 8.0)])
def test_adapters_that_the_run_does_not_have_are_not_dropped(ours: LoRA | None, spec: ModelSpec, tmp_path: Path) -> None:
    adapted = spec.replace(expert__lora=LoRA(4, 8.0))
    own.write_own(tmp_path, initial_params(adapted, 0), adapted, Assets(), ())
    with pytest.raises(CheckpointError, match=r"expert of rank 4, alpha 8; the model has .*Set model.lora.expert to \{rank: 4, alpha: 8\}, or merge"):
        load_weights(tmp_path, spec.replace(expert__lora=ours), seed=0)
    assert loaded(tmp_path, adapted).keys() == shapes(adapted).keys()


def test_random_has_to_be_written_out_and_says_so(spec: ModelSpec) -> None:
    weights = load_weights("random", spec, seed=5)
    assert f"55 tensors, {count(spec):,} parameters, drawn with seed 5" in str(weights.report)
    wanted = dict(initial_params(spec, 5))
    assert all(np.array_equal(array, wanted[name]) for name, array in weights.tensors)


# --- 3.2: the tied embedding


@pytest.mark.parametrize("names", ["tied", "embed", "both"])
def test_the_embedding_is_found_under_either_name(names: str, spec: ModelSpec, tree: Tree, tmp_path: Path) -> None:
    """With both, the head has gone stale (LeRobot trains the embedding alone): the embedding counts."""
    save_torch(tmp_path, torch_tensors(tree, names=names))
    assert np.array_equal(loaded(tmp_path, spec)["trunk.embed.weight"], tree["PaliGemma/llm/embedder/input_embedding"])


def test_a_missing_embedding_is_an_error(spec: ModelSpec, tree: Tree, tmp_path: Path) -> None:
    tensors = torch_tensors(tree)
    del tensors[TIED]
    save_torch(tmp_path / "torch", tensors | {DEAD: np.zeros((spec.vocab_size, spec.expert.width), np.float32)})
    with pytest.raises(CheckpointError, match=f"no token embedding: neither {EMBEDDING} nor {TIED}"):
        load_weights(tmp_path / "torch", spec, seed=0)
    save_orbax(tmp_path / "jax", {name: array for name, array in tree.items() if "embedder" not in name})
    with pytest.raises(CheckpointError, match="not a whole Pi0.5 model: it has none of trunk.embed.weight"):
        load_weights(tmp_path / "jax", spec, seed=0)


def test_what_no_pi05_uses_is_dropped_with_a_word(forms: dict[str, Path], spec: ModelSpec, tree: Tree, tmp_path: Path) -> None:
    norm = "paligemma_with_expert.gemma_expert.model.norm.weight"  # a leftover of a port that keeps it beside the adaptive norm
    save_torch(tmp_path, torch_tensors(tree) | {norm: np.zeros(spec.expert.width, np.float32)})
    assert f"dropped {norm}: a plain norm's scale" in str(load_weights(tmp_path, spec, seed=0).report)
    report = load_weights(forms["both names"], spec, seed=0).report
    assert f"dropped {DEAD}" in str(report) and f"dropped {TIED}" in str(report) and report.loaded == report.total == 143


# --- 3.3: names of other versions of transformers: test_published.py, form "newer transformers"


def test_one_tensor_under_two_names_is_an_error(tree: Tree, tmp_path: Path) -> None:
    tensors = torch_tensors(tree)
    bias = "paligemma_with_expert.paligemma.model.vision_tower.vision_model.post_layernorm.bias"
    save_torch(tmp_path, tensors | {bias.replace(".vision_model", ""): tensors[bias]})
    with pytest.raises(CheckpointError, match="one and the same tensor under two names"):
        open_source(tmp_path)


# --- 3.4: other action dims


def test_another_action_dim_is_one_error_with_both_shapes_and_the_choices(forms: dict[str, Path], spec: ModelSpec) -> None:
    for wanted in (7, 20):
        with pytest.raises(CheckpointError) as error:
            load_weights(forms["lerobot"], spec.replace(action_dim=wanted), seed=0)
        text = str(error.value)
        assert f"action_dim 11, the model {wanted}" in text and f"action_in_proj.weight is (11, 56) there and ({wanted}, 56) here" in text
        assert all(choice in text for choice in ("pad_data", "slice", "reinit"))
    with pytest.raises(CheckpointError, match="slice cannot make more dims than there are"):
        load_weights(forms["lerobot"], spec.replace(action_dim=20), seed=0, on_shape_mismatch="slice")
    with pytest.raises(CheckpointError, match="on_shape_mismatch is 'crop'; it is one of"):
        load_weights(forms["lerobot"], spec, seed=0, on_shape_mismatch="crop")


ACTION_TENSORS = ("action_in_proj.weight", "action_out_proj.weight", "action_out_proj.bias")


@pytest.mark.parametrize("form", ["orbax", "lerobot"])
def test_slice_keeps_the_first_dims(form: str, forms: dict[str, Path], spec: ModelSpec) -> None:
    smaller, base = spec.replace(action_dim=7), loaded(forms[form], spec)
    weights = load_weights(forms[form], smaller, seed=0, on_shape_mismatch="slice")
    assert weights.spec == smaller and weights.report.changed == ACTION_TENSORS and "slice: [action_in_proj.weight" in str(weights.report)
    got = dict(weights.tensors)
    wanted = {
        "action_in_proj.weight": base[ACTION_TENSORS[0]][:7],
        ACTION_TENSORS[1]: base[ACTION_TENSORS[1]][:, :7],
        ACTION_TENSORS[2]: base[ACTION_TENSORS[2]][:7],
    }
    assert all(np.array_equal(array, (base | wanted)[name]) for name, array in got.items())
    assert weights.report.parameters == count(smaller) == sum(array.size for array in got.values())


def test_reinit_draws_these_tensors_and_counts_them_as_not_loaded(forms: dict[str, Path], spec: ModelSpec) -> None:
    larger, base = spec.replace(action_dim=20), loaded(forms["orbax"], spec)
    weights = load_weights(forms["orbax"], larger, seed=3, on_shape_mismatch="reinit")
    got, drawn = dict(weights.tensors), dict(initial_params(larger, 3))
    assert all(np.array_equal(array, drawn[name] if name in ACTION_TENSORS else base[name]) for name, array in got.items())
    assert weights.report.parameters == count(larger) - sum(got[name].size for name in ACTION_TENSORS)
    assert "reinit: [action_in_proj.weight, action_out_proj.weight, action_out_proj.bias]" in str(weights.report)


def test_pad_data_keeps_the_checkpoints_model(forms: dict[str, Path], spec: ModelSpec) -> None:
    weights = load_weights(forms["orbax"], spec.replace(action_dim=7), seed=0, on_shape_mismatch="pad_data")
    assert weights.spec == spec and not weights.report.changed
    base = loaded(forms["orbax"], spec)
    assert all(np.array_equal(array, base[name]) for name, array in weights.tensors)


def test_no_tensor_depends_on_the_horizon(forms: dict[str, Path], spec: ModelSpec) -> None:
    weights = load_weights(forms["lerobot"], spec.replace(action_horizon=30), seed=0)
    assert weights.spec.action_horizon == 30 and "action_horizon 8 there, 30 here: no tensor depends on it" in str(weights.report)


def test_another_model_is_an_error_with_both_shapes(forms: dict[str, Path], spec: ModelSpec) -> None:
    shapes_of_one = r"vision.layers.up_proj.weight: \(4, 60, 140\) in the checkpoint, \(4, 60, 99\) in the model"
    with pytest.raises(CheckpointError, match=rf"another model, 3 tensors have other sizes:\n  {shapes_of_one}"):
        load_weights(forms["orbax"], spec.replace(vision__mlp_dim=99), seed=0, on_shape_mismatch="reinit")


# --- 3.6 and pi05-ness: found by content


@pytest.mark.parametrize("form", ["orbax", "orbax with value", "orbax bare"])
def test_the_params_folder_itself_is_accepted(form: str, forms: dict[str, Path], spec: ModelSpec) -> None:
    assert open_source(forms[form] / "params", like=spec).where == open_source(forms[form], like=spec).where


def test_a_file_in_the_folder_is_accepted(forms: dict[str, Path], spec: ModelSpec) -> None:
    assert open_source(forms["lerobot"] / "model.safetensors", like=spec).kind == "lerobot"


def test_a_wrong_folder_fails_at_once_and_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "1000").mkdir()
    (tmp_path / "wandb_id.txt").touch()
    begin = time.monotonic()
    with pytest.raises(
        CheckpointError, match=r"no params.safetensors .*, model.safetensors .*_METADATA.*but 1000, wandb_id.txt. Its folders 1000 look like steps"
    ):
        open_source(tmp_path)
    for missing in ("./nowhere", str(tmp_path / "nowhere"), "~/nowhere-at-all", "a/b/c/d"):
        with pytest.raises(CheckpointError, match="There is no checkpoint"):
            open_source(missing)
    assert time.monotonic() - begin < 5  # no network, no waiting


def test_whether_it_is_a_pi05_is_read_off_the_tensors_and_not_the_path(spec: ModelSpec, tree: Tree, tmp_path: Path) -> None:
    save_orbax(tmp_path / "pi0_base", tree)
    assert open_source(tmp_path / "pi0_base", like=spec).spec == spec
    pi0 = {name.replace("time_mlp", "action_time_mlp"): array for name, array in tree.items()} | {"state_proj/bias": np.zeros(3, np.float32)}
    save_orbax(tmp_path / "pi05_base", pi0)
    with pytest.raises(CheckpointError, match="is a Pi0 checkpoint: it has state_proj"):
        open_source(tmp_path / "pi05_base")
    save_torch(tmp_path / "pi05_other", {"encoder.weight": np.zeros(3, np.float32)})
    with pytest.raises(CheckpointError, match="no Pi0.5 checkpoint: it has no action_in_proj, but 1 tensors such as encoder.weight"):
        open_source(tmp_path / "pi05_other")
    save_torch(tmp_path / "pi05_act", torch_tensors(tree), prefix="model.", config={"type": "act"})
    with pytest.raises(CheckpointError, match="policy of type 'act'"):
        open_source(tmp_path / "pi05_act")


def test_a_damaged_file_is_no_checkpoint(forms: dict[str, Path], tmp_path: Path) -> None:
    whole = (forms["openpi torch"] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="no whole safetensors file"):
        open_source(tmp_path)


def test_a_later_releases_checkpoint_is_refused(spec: ModelSpec, tmp_path: Path) -> None:
    own.write_own(tmp_path, initial_params(spec, 0), spec, Assets(), ())
    path = tmp_path / "pi05.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(CheckpointError, match="format version 2; this release reads 1"):
        open_source(tmp_path)


# --- where it may be


def test_a_url_is_fetched_once_and_without_what_does_not_act(forms: dict[str, Path], spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bucket = fsspec.filesystem("memory")
    bucket.put(f"{forms['orbax']}/params", "/bucket/pi05_base/params", recursive=True)
    bucket.pipe("/bucket/pi05_base/train_state/huge", b"0" * 100)
    bucket.pipe("/bucket/pi05_base/assets/droid/norm_stats.json", b'{"norm_stats": {"state": {"mean": [0], "std": [1], "q01": [0], "q99": [1]}}}')
    try:
        for url in ("memory://bucket/pi05_base", "memory://bucket/pi05_base/params", "memory://bucket/pi05_base/"):
            weights = load_weights(url, spec, seed=0)
            assert weights.assets.asset_id == "droid" and len(dict(weights.tensors)) == 55
        assert not list((tmp_path / "cache").rglob("huge")) and not list((tmp_path / "cache").rglob(".part-*"))
    finally:
        bucket.rm("/bucket", recursive=True)
    assert len(loaded("memory://bucket/pi05_base", spec)) == 55  # from the cache: the bucket is gone
    with pytest.raises(CheckpointError, match="nothing at memory://bucket/other|cannot be read"):
        load_weights("memory://bucket/other", spec, seed=0)


def test_a_fetch_that_breaks_off_leaves_nothing_behind(forms: dict[str, Path], spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bucket = fsspec.filesystem("memory")
    bucket.put(str(forms["openpi torch"]), "/half", recursive=True)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(type(bucket), "get_file", lambda *args, **options: (_ for _ in ()).throw(OSError("connection lost")))
            with pytest.raises(CheckpointError, match="could not be fetched whole .connection lost"):
                load_weights("memory://half", spec, seed=0)
        assert not list((tmp_path / "cache" / "pi05" / "checkpoints").iterdir())
        assert len(loaded("memory://half", spec)) == 55
    finally:
        bucket.rm("/half", recursive=True)


def test_gcs_without_its_package_names_it(spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(CheckpointError, match="Install gcsfs"):
        load_weights("gs://openpi-assets/checkpoints/pi05_base", spec, seed=0)


def test_a_hub_id_is_downloaded_at_its_revision(forms: dict[str, Path], spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot(name: str, **options: object) -> str:
        asked.append((name, options["revision"]))
        if name == "lerobot/none":
            raise OSError("404 not found")
        return str(forms["lerobot"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert len(loaded("lerobot/pi05_base", spec)) == len(loaded("lerobot/pi05_base@v2", spec)) == 55
    with pytest.raises(CheckpointError, match="neither a folder .* nor a repository that the Hub gives out now .*404"):
        load_weights("lerobot/none", spec, seed=0)
    assert asked == [("lerobot/pi05_base", None), ("lerobot/pi05_base", "v2"), ("lerobot/none", None)]


def test_several_files_with_an_index_are_one_checkpoint(spec: ModelSpec, tree: Tree, tmp_path: Path) -> None:
    import json

    from safetensors.numpy import save_file

    tensors = torch_tensors(tree)
    parts = {"a.safetensors": dict(list(tensors.items())[::2]), "b.safetensors": dict(list(tensors.items())[1::2])}
    for name, part in parts.items():
        save_file(part, tmp_path / name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {key: name for name, part in parts.items() for key in part}}))
    whole = loaded(tmp_path, spec)
    assert np.array_equal(whole["time_mlp_in.weight"], tree["time_mlp_in/kernel"])
    os.remove(tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="b.safetensors"):
        open_source(tmp_path)


# --- the ledger itself


def ledger() -> Ledger:
    return Ledger({"packed": 2, "plain": 1, "dead": 1}, ("k", "v", "w"))


def test_a_ledger_that_comes_out_even_says_nothing() -> None:
    book = ledger()
    for source, target in (("packed", "k"), ("packed", "v"), ("plain", "w")):
        book.consume(source, target)
        book.fill(target)
    book.drop("dead", "unused")
    book.close()


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        (
            [("packed", "k"), ("packed", "k"), ("plain", "w")],
            "1 in the source .*: packed\n.*target that nothing fills: v\n.*filled more than once: k",
        ),
        ([("packed", "k"), ("packed", "v"), ("plain", "w"), ("plain", "w")], "1 read more than once: plain\n.*1 filled more than once: w"),
        ([("packed", "k"), ("packed", "v"), ("plain", "w"), ("other", "x")], "2 named that neither side has: other, x"),
        ([("packed", "k"), ("packed", "v"), ("plain", "w"), ("dead", "w")], "1 read more than once: dead"),
    ],
)
def test_each_way_of_not_coming_out_even_is_named(moves: list[tuple[str, str]], message: str) -> None:
    import re

    book = ledger()
    book.drop("dead", "unused")
    for source, target in moves:
        book.consume(source, target)
        book.fill(target)
    with pytest.raises(ParamsError) as error:
        book.close()
    assert re.search(message, str(error.value), re.DOTALL)


def test_the_tiny_preset_needs_no_help(tmp_path: Path) -> None:
    tiny = ModelSpec.tiny()
    assert open_source(save_torch(tmp_path, torch_tensors(openpi_tree(tiny)))).spec == tiny
