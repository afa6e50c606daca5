"""Training from the bundled demonstrations to a checkpoint, in both backends, with nothing standing in for anything."""

import json

import jax
import numpy as np
import pytest

from pi05.backend import load_backend
from pi05.checkpoint import load_state
from pi05.errors import CheckpointError, ConfigError
from pi05.initial import initial_params
from pi05.run_folder import list_steps
from pi05.schedule import learning_rate
from pi05.train import main
from tests.training import HALF, Finished, Runs, run_training, same_bits, small_config

each_backend = pytest.mark.parametrize("backend", ["jax", "torch"])
ADAPTED = {"model__lora__trunk": "{rank: 2, alpha: 4.0}", "groups__trunk": "lora", "groups__vision": "freeze"}


@each_backend
def test_a_run_leaves_everything_behind(runs: Runs, backend: str) -> None:
    run = runs.straight(backend)
    assert run.outcome.step == 2 * HALF and run.outcome.stopped_by is None
    assert run.outcome.checkpoint == run.folder / "checkpoints" / str(2 * HALF) and list_steps(run.folder) == [2 * HALF]
    files = {path.name for path in run.outcome.checkpoint.iterdir()}
    assert files >= {"params.safetensors", "train_state.safetensors", "checkpoint.json", "config.yaml", "norm_stats.json", "tokenizer.model", "loader.json"}
    for picture in ("loss.png", "first_batch.png"):
        assert (run.folder / picture).read_bytes().startswith(b"\x89PNG")
    (events,) = (run.folder / "tensorboard").iterdir()
    assert events.stat().st_size > 0
    assert json.loads((run.outcome.checkpoint / "loader.json").read_text())["position"] == 2 * HALF * run.config.batch_size


@each_backend
def test_every_step_is_logged_and_the_loss_falls(runs: Runs, backend: str) -> None:
    run = runs.straight(backend)
    assert [line["step"] for line in run.steps] == list(range(1, 2 * HALF + 1))
    assert [line["lr"] for line in run.steps] == [learning_rate(run.config.schedule, step) for step in range(2 * HALF)]
    assert [line["step"] for line in run.steps if "param_norm" in line] == [2, 4, 6]  # log_interval
    losses = [line["loss"] for line in run.steps]
    assert np.isfinite(losses).all() and np.mean(losses[HALF:]) < 0.9 * np.mean(losses[:HALF])
    (evaluation,) = run.evaluations
    assert evaluation["step"] == 2 * HALF and {"loss", "action_mse", "baseline_mse"} < evaluation["evaluation"].keys()
    assert sum(name.startswith("rmse ") for name in evaluation["evaluation"]) == 4  # the robot's joints


@each_backend
def test_the_console_says_what_runs_where_and_what_to_do_next(runs: Runs, backend: str) -> None:
    run, other = runs.straight(backend), {"jax": "torch", "torch": "jax"}[backend]
    lines = run.console.splitlines()
    assert any(f"tiny/{backend}: 114 frames" in line and f"backend {backend} on CPU, {backend} " in line for line in lines)
    assert "615,803 parameters: 615,803 trained, 0 frozen" in lines
    assert any("55 tensors, 615,803 parameters, drawn with seed 42" in line for line in lines)
    assert sum(line.startswith("step ") and "loss (model dims)" in line for line in lines) == HALF
    assert f"done: 6 steps; checkpoint {run.outcome.checkpoint}" in lines and f"next: python -m pi05.evaluate {run.folder}" in lines
    assert f"--backend {other}" in lines[-1]


def test_both_backends_are_given_the_same_and_learn_the_same(runs: Runs) -> None:
    one, other = runs.straight("jax"), runs.straight("torch")
    assert one.sample_ids == other.sample_ids and len({tuple(ids) for ids in one.sample_ids.values()}) == 2 * HALF
    for ours, theirs in zip(one.steps, other.steps, strict=True):
        assert ours["lr"] == theirs["lr"] and abs(ours["loss"] - theirs["loss"]) <= 1e-4 * theirs["loss"]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """Three steps in each backend: adapters in the trunk, the vision tower frozen."""
    folder = tmp_path_factory.mktemp("adapted")
    fields = ADAPTED | {"data__holdout_episodes": "0", "num_train_steps": "3", "ema_decay": "null"}
    return {backend: run_training(small_config(folder, backend=backend, exp_name=backend, **fields)) for backend in ("jax", "torch")}


@each_backend
def test_what_is_frozen_keeps_its_bytes_and_has_no_moments(adapted: dict[str, Finished], backend: str) -> None:
    run = adapted[backend]
    spec, state = run.config.spec(), run.state()
    learned = run.config.recipe().trains(spec)
    before = dict(initial_params(spec, run.config.seed))
    frozen = before.keys() - learned
    assert any(name.startswith("vision.") for name in frozen) and any(name.startswith("trunk.") and ".lora_" not in name for name in frozen)
    assert any(name.startswith("trunk.") for name in learned) and all(".lora_" in name for name in learned if name.startswith("trunk."))
    assert same_bits({name: state.params[name] for name in frozen}, {name: before[name] for name in frozen})
    assert state.m.keys() == state.v.keys() == learned and state.updates == 3
    moved = {name for name in learned if (state.params[name] != before[name]).any()}
    assert any(".lora_b" in name for name in moved) and any(name.startswith("expert.") for name in moved)


def test_both_backends_count_the_same_parameters_as_trained(adapted: dict[str, Finished]) -> None:
    counts = [next(line for line in run.console.splitlines() if " trained, " in line) for run in adapted.values()]
    assert counts[0] == counts[1] and not counts[0].endswith(" 0 frozen")
    states = [load_state(run.outcome.checkpoint, run.config.spec()) for run in adapted.values()]
    assert sum(array.size for array in states[0].m.values()) == sum(array.size for array in states[1].m.values())
    assert f" {sum(array.size for array in states[0].m.values()):,} trained" in counts[0]


def test_a_run_is_not_written_over_and_a_complete_one_not_resumed(runs: Runs) -> None:
    run = runs.straight("torch")
    with pytest.raises(CheckpointError, match="--resume"):
        run_training(run.config)
    with pytest.raises(ConfigError, match="is complete: its checkpoint is at step 6"):
        run_training(run.config, "resume")
    assert len(run.steps) == 2 * HALF


def test_jax_compiles_its_step_once(runs: Runs) -> None:
    """What a step is given first has to be placed as what it returns, or the second step is compiled anew."""
    run = runs.straight("torch")
    engine = load_backend("jax", run.config.spec(), run.config.compute, run.config.recipe(), device="cpu")
    for state in (engine.init_state(initial_params(run.config.spec(), 0)), engine.import_state(run.state())):
        arrays = jax.tree.leaves((state.learned, state.frozen, state.optimizer))
        assert len(arrays) > 55 * 4 and all(array.committed for array in arrays)


def test_an_error_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture) -> None:
    assert main(["tiny", "--bath_size", "4"]) == 1
    assert "batch_size" in capsys.readouterr().out
    assert main(["--help"]) == 0
