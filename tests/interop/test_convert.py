"""Conversions: the same bits back from every form, within a stated memory, with everything a robot needs, or not at all."""

import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from parity.cases import warm_params
from pi05.checkpoint import PARAMS
from pi05.convert import Options, convert
from pi05.data.norm_stats import FieldStats, NormStats
from pi05.errors import CheckpointError, ParamsError
from pi05.interop import own
from pi05.interop.assets import OPENPI_TOKENIZER, Assets
from pi05.interop.sources import load_weights, open_source
from pi05.params import rows, shape, shapes
from pi05.spec import LoRA, ModelSpec
from tests.fact_sheet import openpi_shapes, published_from_openpi

from .published import DEAD, EMBEDDING, TIED, Tree, openpi_tree, save_torch, torch_tensors

TARGETS = ("jax", "torch", "lerobot", "pi05")
WEIGHTS_ONLY = Options(weights_only=True)
TINY = ModelSpec.tiny()


def stats(state: int = 4, actions: int = 4) -> NormStats:
    def field(dims: int) -> FieldStats:
        base = np.arange(dims, dtype=np.float64)
        return FieldStats(mean=base, std=base + 1, q01=base - 2, q99=base + 3, min=base - 5, max=base + 5, count=100)

    return NormStats({"state": field(state), "actions": field(actions)}, {"robot": "metaworld"})


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ours, complete for the robot metaworld."""
    folder = tmp_path_factory.mktemp("ours")
    own.write_own(folder, iter(warm_params(TINY).items()), TINY, Assets(stats(), "metaworld", tokenizer=OPENPI_TOKENIZER, robot="metaworld"), ())
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What openpi publishes: weights in its PyTorch form and nothing else."""
    tensors = torch_tensors(openpi_tree(TINY)) | {DEAD: np.ones((TINY.vocab_size, TINY.expert.width), np.float32)}
    return save_torch(tmp_path_factory.mktemp("base"), tensors)


@pytest.mark.parametrize("target", TARGETS)
def test_there_and_back_again_is_bit_for_bit_and_keeps_what_a_robot_needs(target: str, ours: Path, tmp_path: Path) -> None:
    convert(str(ours), tmp_path / "there", target)
    convert(str(tmp_path / "there"), tmp_path / "back", "pi05")
    assert (tmp_path / "back" / PARAMS).read_bytes() == (ours / PARAMS).read_bytes()
    before, after = open_source(ours), open_source(tmp_path / "back")
    assert after.spec == before.spec and len(after.history) == 2
    assert (after.assets.robot, after.assets.tokenizer, after.assets.normalization) == ("metaworld", OPENPI_TOKENIZER, "quantile")
    for key, field in before.assets.norm_stats.fields.items():
        assert all(np.array_equal(value, vars(after.assets.norm_stats.fields[key])[name]) for name, value in vars(field).items())


def test_what_is_written_has_the_names_and_values_of_the_fact_sheet(ours: Path, tmp_path: Path) -> None:
    """Read back by the libraries that openpi and LeRobot use, not by ours."""
    import orbax.checkpoint as ocp

    for target in ("jax", "torch", "lerobot"):
        convert(str(ours), tmp_path / target, target, WEIGHTS_ONLY)
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = _flat(checkpointer.restore((tmp_path / "jax" / "params").resolve())["params"])
    assert {name: array.shape for name, array in tree.items()} == openpi_shapes(TINY)
    wanted = published_from_openpi({name: np.asarray(array) for name, array in tree.items()})
    heads = {TIED: wanted[EMBEDDING], DEAD: np.zeros((TINY.vocab_size, TINY.expert.width), np.float32)}
    tied = {name: array for name, array in (wanted | heads).items() if name != EMBEDDING}
    _assert_equal(load_file(tmp_path / "torch" / "model.safetensors"), tied)
    _assert_equal(load_file(tmp_path / "lerobot" / "model.safetensors"), {f"model.{name}": array for name, array in (wanted | heads).items()})


def _flat(tree: dict, path: str = "") -> Tree:
    return {
        key: value for name, node in tree.items() for key, value in (_flat(node, f"{path}{name}/") if isinstance(node, dict) else {path + name: node}).items()
    }


def _assert_equal(got: Tree, want: Tree) -> None:
    assert got.keys() == want.keys() and not [name for name in want if not np.array_equal(got[name], want[name])]


def test_openpis_statistics_lie_where_openpi_looks(ours: Path, tmp_path: Path) -> None:
    for target in ("jax", "torch"):
        convert(str(ours), tmp_path / target, target)
        assert (tmp_path / target / "assets" / "metaworld" / "norm_stats.json").is_file()
        (tmp_path / target / "pi05.json").unlink()
        found = open_source(tmp_path / target).assets
        assert found.asset_id == "metaworld" and np.array_equal(found.norm_stats.fields["state"].q99, stats().fields["state"].q99)


@pytest.mark.parametrize("target", ["jax", "torch", "lerobot", "pi05"])
def test_what_a_robot_needs_and_nobody_gave_is_missed_here(target: str, base: Path, tmp_path: Path) -> None:
    missing = "norm_stats" if target in ("jax", "torch") else "norm_stats, robot"
    with pytest.raises(CheckpointError, match=rf"does not say its {missing}.*--norm-stats FILE.*--weights-only"):
        convert(str(base), tmp_path / "out", target)
    assert not list(tmp_path.iterdir())


def test_given_on_the_command_line_it_travels_along(base: Path, tmp_path: Path) -> None:
    stats().save(tmp_path / "stats.json")
    convert(str(base), tmp_path / "out", "torch", Options(norm_stats=tmp_path / "stats.json", tokenizer="owner/name", robot="metaworld"))
    assets = open_source(tmp_path / "out").assets
    assert assets.robot == "metaworld" and assets.tokenizer == "owner/name" and assets.norm_stats.fingerprint == {"robot": "metaworld"}
    with pytest.raises(CheckpointError, match="no statistics file"):
        convert(str(base), tmp_path / "again", "torch", Options(norm_stats=tmp_path / "other.json"))


def test_of_several_statistics_one_has_to_be_named(ours: Path, tmp_path: Path) -> None:
    convert(str(ours), tmp_path / "base", "jax", WEIGHTS_ONLY)
    (tmp_path / "base" / "pi05.json").unlink()
    for robot, dims in (("droid", 8), ("lab/metaworld", 4)):
        stats(dims, dims).save(tmp_path / "base" / "assets" / robot / "norm_stats.json")
    with pytest.raises(CheckpointError, match="statistics of droid, lab/metaworld.*--asset-id"):
        convert(str(tmp_path / "base"), tmp_path / "out", "torch")
    with pytest.raises(CheckpointError, match="no statistics 'ur5'; it has droid, lab/metaworld"):
        convert(str(tmp_path / "base"), tmp_path / "out", "torch", Options(asset_id="ur5"))
    convert(str(tmp_path / "base"), tmp_path / "out", "torch", Options(asset_id="lab/metaworld"))
    assert len(open_source(tmp_path / "out").assets.norm_stats.fields["state"].mean) == 4


def test_a_robot_that_the_statistics_are_not_of_is_refused(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="statistics of state have 4 dims, robot 'so100' has 6"):
        convert(str(ours), tmp_path / "out", "lerobot", Options(robot="so100"))


def test_a_target_that_exists_is_left_alone(ours: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        convert(str(ours), tmp_path / "out", "torch")


def test_a_conversion_that_fails_leaves_nothing(ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(*args: object) -> None:
        raise ParamsError("half way")

    monkeypatch.setattr("pi05.convert.fitted", lambda *args: (_ for _ in range(1) if half()))
    with pytest.raises(ParamsError, match="half way"):
        convert(str(ours), tmp_path / "out", "torch")
    assert not list(tmp_path.iterdir())


def test_our_own_adapters_travel_to_our_form_and_are_merged_for_the_others(tmp_path: Path) -> None:
    spec = TINY.replace(trunk__lora=LoRA(4, 8.0), vision__lora=LoRA(2, 1.0))
    before = warm_params(spec)
    (tmp_path / "ours").mkdir()
    own.write_own(tmp_path / "ours", iter(before.items()), spec, Assets(), ())
    convert(str(tmp_path / "ours"), tmp_path / "kept", "pi05", WEIGHTS_ONLY)
    kept = load_weights(tmp_path / "kept", spec, seed=0)
    assert all(np.array_equal(array, before[name]) for name, array in kept.tensors)
    for target in ("jax", "torch", "lerobot"):
        with pytest.raises(CheckpointError, match="Merge them: --merge-lora"):
            convert(str(tmp_path / "ours"), tmp_path / target, target, WEIGHTS_ONLY)
        convert(str(tmp_path / "ours"), tmp_path / target, target, Options(weights_only=True, merge_lora=True))
        merged = dict(load_weights(tmp_path / target, TINY, seed=0).tensors)
        for name, scale in (("trunk.layers.o_proj", 2.0), ("vision.layers.up_proj", 0.5), ("trunk.layers.k_proj", 2.0)):
            weight, a, b = (before[f"{name}.{part}"].astype(np.float64) for part in ("weight", "lora_a", "lora_b"))
            delta = np.einsum("lit,lto->lio", a.reshape(len(a), -1, a.shape[-1]), b.reshape(len(b), b.shape[1], -1)).reshape(weight.shape)
            assert np.abs(merged[f"{name}.weight"] - (weight + scale * delta)).max() < 1e-6
        assert np.array_equal(merged["expert.layers.o_proj.weight"], before["expert.layers.o_proj.weight"])


@pytest.mark.parametrize("target", ["torch", "lerobot", "pi05", "jax"])
@pytest.mark.parametrize("form", ["jax", "torch"])
def test_memory_stays_below_the_largest_tensor_and_one_copy_of_the_output(form: str, target: str, tmp_path: Path) -> None:
    """The full model has 13 GB and its largest tensor, gate and up of all layers, 4.8 GB; here they are 12 MB and 4.7 MB."""
    spec = TINY.replace(trunk__mlp_dim=2048, trunk__depth=3, expert__mlp_dim=512)
    (tmp_path / "ours").mkdir()
    own.write_own(tmp_path / "ours", ((row.name, np.ones(shape(row, spec), np.float32)) for row in rows(spec)), spec, Assets(), ())
    convert(str(tmp_path / "ours"), tmp_path / "source", form, WEIGHTS_ONLY)
    largest = 4 * max(int(np.prod(size)) for layout in ("openpi", "published") for size in shapes(spec, layout).values())
    output = 4 * sum(int(np.prod(size)) for size in shapes(spec, "published").values())
    assert largest > output / 3
    tracemalloc.start()
    try:
        convert(str(tmp_path / "source"), tmp_path / "target", target, WEIGHTS_ONLY)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    overhead = 1_000_000  # the libraries' own, and rows in passing
    assert peak < 2.5 * largest + overhead < 1.3 * largest + output


def command(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "pi05.convert", *map(str, words)], capture_output=True, text=True, check=False)


def test_the_command_ends_with_2_and_both_lists_if_a_tensor_would_be_lost(base: Path, tmp_path: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    tensors["action_in_proj.lora_A.weight"] = tensors.pop("time_mlp_in.bias")
    save_torch(tmp_path / "source", tensors)
    done = command(tmp_path / "source", tmp_path / "out", "--to", "pi05", "--weights-only")
    assert done.returncode == 2
    assert "1 in the source that no parameter reads: action_in_proj.lora_A.weight" in done.stderr
    assert "1 in the target that nothing fills: time_mlp_in.bias (from time_mlp_in.bias)" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_command_needs_no_config_and_says_what_it_found(base: Path, tmp_path: Path) -> None:
    done = command(base, tmp_path / "out", "--to", "pi05", "--weights-only")
    assert done.returncode == 0, done.stderr
    assert "openpi-torch, Pi0.5: vision 4 x 60" in done.stdout and "loaded 143/143 tensors, wrote 615,803 parameters" in done.stdout
    assert dict(load_weights(tmp_path / "out", TINY, seed=0).tensors).keys() == shapes(TINY).keys()
