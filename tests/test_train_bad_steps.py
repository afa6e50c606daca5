"""A loss that is not finite: logged as such, nothing learned from it, the run stopped, the step computed again by scripts/replay_step.py."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from pi05.batch import Batch
from pi05.errors import NonFiniteLoss
from pi05.metrics import read_log
from pi05.run_folder import list_steps
from tests.training import UNJUDGED, Runs, changed_batches, run_training, same_bits, small_config

ROOT = Path(__file__).resolve().parents[1]


def poison(batch: Batch) -> Batch:
    """The batch with one action of its second sample that is NaN."""
    actions = batch.actions.copy()
    actions[1, 0, 0] = math.nan
    return dataclasses.replace(batch, actions=actions)


def replay(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/replay_step.py", str(folder), *arguments]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_nan_at_a_step_is_logged_stops_the_run_and_is_replayed(runs: Runs, tmp_path: Path, backend: str) -> None:
    config = small_config(tmp_path, backend=backend)
    with (
        changed_batches(lambda step, batch: poison(batch) if step == 3 else batch),
        pytest.raises(NonFiniteLoss, match="Step 3 is not finite: loss nan") as error,
    ):
        run_training(config)
    folder = config.run_dir / "bad_steps" / "step_3"
    assert f"python scripts/replay_step.py {folder}" in str(error.value)
    *good, bad = read_log(config.run_dir / "metrics.jsonl")
    assert [line["step"] for line in good] == [1, 2] and all(line["finite"] for line in good)
    assert [line["loss"] for line in good] == [line["loss"] for line in runs.straight(backend).steps[:2]]
    assert bad["step"] == 3 and math.isnan(bad["loss"]) and not bad["finite"] and bad["sample_ids"] == runs.straight(backend).sample_ids[3]
    assert list_steps(config.run_dir) == [3]  # the weights, for the replay
    assert json.loads((folder / "bad_step.json").read_text())["checkpoint"] == str(config.run_dir / "checkpoints" / "3")
    again = replay(folder)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [int(line.split()[0]) for line in again.stdout.splitlines() if line.endswith("<- not finite")] == [bad["sample_ids"][1]]
    assert "replayed: loss nan, gradient norm nan" in again.stdout


def test_the_run_goes_on_until_max_bad_steps_in_a_row(runs: Runs, tmp_path: Path) -> None:
    config = small_config(tmp_path, backend="torch", max_bad_steps="2", log_interval="2")
    with (
        changed_batches(lambda step, batch: poison(batch) if step in (2, 4, 5) else batch),
        pytest.raises(NonFiniteLoss, match="Step 5 .the last of 2 in a row"),
    ):
        run_training(config)
    lines = read_log(config.run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines if not line["finite"]] == [2, 4, 5] and len(lines) == 5
    assert math.isnan(lines[1]["window"]["loss"]) and math.isfinite(lines[1]["window"]["grad_norm"])  # never averaged away; only norms are
    assert {path.name for path in (config.run_dir / "bad_steps").iterdir()} == {"step_2", "step_4", "step_5"}


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_bad_step_changes_nothing_but_the_count_of_batches(tmp_path: Path, backend: str) -> None:
    fields = {"backend": backend, "max_bad_steps": "2", **UNJUDGED}
    before = run_training(small_config(tmp_path, exp_name="before", num_train_steps="2", **fields)).state()
    with changed_batches(lambda step, batch: poison(batch) if step == 3 else batch):
        after = run_training(small_config(tmp_path, exp_name="after", num_train_steps="3", **fields)).state()
    assert (before.step, before.updates, after.step, after.updates) == (2, 2, 3, 2)
    for part in ("params", "m", "v", "ema"):
        assert same_bits(getattr(before, part), getattr(after, part)), part
    assert all(np.isfinite(array).all() for array in after.params.values())
