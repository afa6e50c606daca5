"""A run that was interrupted is the run that was not: in the same backend to the bit, in the other one up to rounding."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from pi05.checkpoint import locate_checkpoint
from pi05.compare import max_error
from pi05.errors import DataError
from pi05.metrics import read_losses
from pi05.run_folder import list_steps
from tests.training import HALF, SMALL, UNJUDGED, Finished, Runs, run_training, same_bits, small_config

BACKENDS = ("jax", "torch")
CROSS_LIMIT = 1e-4  # of issue 4: losses relative, weights absolute
ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_n_and_n_resumed_are_2n_straight_to_the_bit(runs: Runs, backend: str) -> None:
    straight, resumed = runs.straight(backend), runs.resumed(backend, backend)
    assert f"at step {HALF}" in next(line for line in resumed.console.splitlines() if line.startswith("resumed "))
    assert resumed.sample_ids == {step: ids for step, ids in straight.sample_ids.items() if step > HALF}
    for key in ("step", "loss", "lr", "grad_norm"):
        assert [line[key] for line in resumed.steps] == [line[key] for line in straight.steps], key
    ours, theirs = resumed.state(), straight.state()
    assert (ours.step, ours.updates) == (theirs.step, theirs.updates) == (2 * HALF, 2 * HALF)
    for part in ("params", "m", "v", "ema"):
        assert same_bits(getattr(ours, part), getattr(theirs, part)), part


@pytest.mark.parametrize("straight", BACKENDS)
@pytest.mark.parametrize(("first", "second"), [("jax", "torch"), ("torch", "jax")])
def test_n_in_one_backend_and_n_in_the_other_are_2n_in_either(runs: Runs, first: str, second: str, straight: str) -> None:
    mixed, whole = runs.resumed(first, second), runs.straight(straight)
    assert mixed.sample_ids == {step: ids for step, ids in whole.sample_ids.items() if step > HALF}
    for ours, theirs in zip(mixed.steps, whole.steps, strict=True):
        assert ours["lr"] == theirs["lr"] and abs(ours["loss"] - theirs["loss"]) <= CROSS_LIMIT * theirs["loss"]
    assert _distance(mixed, whole) <= CROSS_LIMIT
    assert _distance(mixed, runs.half(straight)) > 10 * CROSS_LIMIT, "training moves too little for the limit to mean anything"


def _distance(a: Finished, b: Finished) -> float:
    """Largest L2 distance of a tensor's weights, relative to its size; what softmax ignores has rounding for a gradient and is left out."""
    ours, theirs = a.state().params, b.state().params
    return max(np.linalg.norm(ours[name] - theirs[name]) / max(np.linalg.norm(theirs[name]), 1.0) for name in theirs if name != "vision.layers.k_proj.bias")


def test_resuming_with_other_data_or_another_order_is_refused(runs: Runs) -> None:
    run = runs.half("torch")
    with pytest.raises(DataError, match="would not continue the order of the data: seed was 42, is 43"):
        run_training(small_config(run.config.checkpoint_dir, backend="torch", exp_name="torch", seed="43", **UNJUDGED), "resume")
    assert len(run.steps) == HALF


@pytest.mark.parametrize("backend", BACKENDS)
def test_sigterm_saves_and_exits_0_and_the_run_goes_on(runs: Runs, tmp_path: Path, backend: str) -> None:
    fields = SMALL | {name.replace("__", "."): value for name, value in UNJUDGED.items()}
    fields |= {"backend": backend, "exp_name": "stopped", "checkpoint_dir": str(tmp_path), "num_train_steps": "100000", "save_interval": "100000"}
    command = [sys.executable, "-m", "pi05.train", "tiny", *(f"--{name}={value}" for name, value in fields.items())]
    folder = tmp_path / "tiny" / "stopped"
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment) as process:
        try:
            while process.poll() is None and not ((folder / "metrics.jsonl").exists() and len(read_losses(folder / "metrics.jsonl")[0]) >= 2):
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            text = process.communicate()[0]
        finally:
            process.kill()
    assert process.returncode == 0, text
    (step,) = list_steps(folder)
    logged = read_losses(folder / "metrics.jsonl")
    assert logged[0].tolist() == list(range(1, step + 1)) and f"stopped by SIGTERM at step {step}; saved {locate_checkpoint(folder)}" in text
    assert "--resume" in text.splitlines()[-1]
    resumed = run_training(small_config(tmp_path, backend=backend, exp_name="stopped", num_train_steps=str(step + 1), **UNJUDGED), "resume")
    assert [line["step"] for line in resumed.steps] == list(range(1, step + 2)) and math.isfinite(resumed.steps[-1]["loss"])
    common = min(step, 2 * HALF)
    straight = np.array([line["loss"] for line in runs.straight(backend).steps[:common]])
    assert max_error(logged[1][:common], straight) <= 1e-5  # two processes need not compile alike
