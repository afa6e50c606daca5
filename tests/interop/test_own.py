"""Checkpoints of our own training runs, as sources: the newest of a run, with everything its config says about acting."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from parity.cases import warm_params
from pi05.checkpoint import Checkpointer, load_params, locate_checkpoint
from pi05.config import get_config
from pi05.convert import Options, convert
from pi05.data.norm_stats import FieldStats, NormStats
from pi05.errors import CheckpointError
from pi05.interop.sources import load_weights, open_source
from pi05.run_folder import open_run
from pi05.spec import LoRA
from pi05.train_state import TrainState

CONFIG = get_config("tiny")
SPEC = CONFIG.spec()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at steps 9 and 10, whose weights to act with are a moving average."""
    root = tmp_path_factory.mktemp("runs")
    dims = np.arange(4.0)
    stats = NormStats({key: FieldStats(dims, dims + 1, dims - 2, dims + 2, dims - 3, dims + 3, 9) for key in ("state", "actions")}, {"robot": "metaworld"})
    stats.save(root / "norm_stats.json")
    files = {"config.yaml": CONFIG.to_yaml(), "norm_stats.json": (root / "norm_stats.json").read_text(), "tokenizer.model": b"sentencepiece"}
    params, zeros = warm_params(SPEC), {}
    with open_run(root / "run", "new") as folder, Checkpointer(folder, SPEC, keep_last=2) as checkpoints:
        for step in (9, 10):
            ema = {name: array + np.float32(step) for name, array in params.items()}
            checkpoints.save(TrainState(step, step, params, zeros, zeros, ema), files)
    return root / "run"


def test_a_run_stands_for_its_newest_checkpoint(run: Path) -> None:
    for place in (run, run / "checkpoints" / "10", run / "checkpoints" / "10" / "params.safetensors"):
        source = open_source(place)
        assert source.where.name == "10" and source.spec == SPEC and source.notes == ("weights: moving average",)
    assert open_source(run / "checkpoints" / "9").where.name == "9"
    got, wanted = dict(load_weights(run, SPEC, seed=0).tensors), warm_params(SPEC)
    assert all(np.array_equal(array, wanted[name] + np.float32(10)) for name, array in got.items())


def test_what_the_runs_config_says_about_acting_travels_along(run: Path, tmp_path: Path) -> None:
    assets = open_source(run).assets
    assert (assets.robot, assets.normalization, assets.floor) == (CONFIG.data.robot, CONFIG.data.normalization, CONFIG.data.floor)
    assert Path(assets.tokenizer).read_bytes() == b"sentencepiece"  # the config names a path; the copy in the checkpoint is what travels
    convert(str(run), tmp_path / "jax", "jax")
    convert(str(tmp_path / "jax"), tmp_path / "back", "pi05")
    after = open_source(tmp_path / "back")
    assert after.assets.robot == assets.robot and after.assets.norm_stats.fingerprint == assets.norm_stats.fingerprint
    folder = run / "checkpoints" / "10"
    one, other = (dict(load_weights(place, SPEC, seed=0).tensors) for place in (folder, tmp_path / "back"))
    assert all(np.array_equal(array, other[name]) for name, array in one.items())


def test_what_convert_writes_is_a_checkpoint_for_the_rest_of_pi05(run: Path, tmp_path: Path) -> None:
    convert(str(run), tmp_path / "out", "pi05", Options(action_dim=7, on_shape_mismatch="slice"))
    assert locate_checkpoint(tmp_path / "out") == tmp_path / "out"
    smaller = SPEC.replace(action_dim=7)
    assert dict(load_params(tmp_path / "out", smaller)).keys() == warm_params(SPEC).keys()
    history = open_source(tmp_path / "out").history
    assert history == (f"{run} (pi05) to pi05, slice of action_in_proj.weight, action_out_proj.weight, action_out_proj.bias",)


def test_without_a_description_nothing_says_which_model_it_is(run: Path, tmp_path: Path) -> None:
    (tmp_path / "params.safetensors").write_bytes((run / "checkpoints" / "10" / "params.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="has params.safetensors but neither pi05.json nor checkpoint.json"):
        open_source(tmp_path)


def test_a_run_with_adapters_starts_another_one_as_it_is(tmp_path: Path) -> None:
    adapted = dataclasses.replace(SPEC, expert=dataclasses.replace(SPEC.expert, lora=LoRA(2, 4.0)))
    params = warm_params(adapted)
    with open_run(tmp_path / "run", "new") as folder, Checkpointer(folder, adapted) as checkpoints:
        checkpoints.save(TrainState(1, 1, params, {}, {}, None), {})
    weights = load_weights(tmp_path / "run", adapted, seed=0)
    assert weights.report.new == () and all(np.array_equal(array, params[name]) for name, array in weights.tensors)
