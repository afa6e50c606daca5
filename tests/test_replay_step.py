"""scripts/replay_step.py: what was not finite is so again, and the culprits are named."""

import dataclasses
import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pi05.bad_step import save_bad_step
from pi05.batch import Batch, Draws, LossParts, make_draws, synthetic_batch
from pi05.checkpoint import Checkpointer
from pi05.config import get_config
from pi05.initial import initial_params
from pi05.run_folder import open_run
from pi05.train_state import StepMetrics, TrainState

ROOT = Path(__file__).resolve().parents[1]
CONFIG = get_config("tiny")
SPEC = CONFIG.spec()
HUGE = 3e38  # float32 holds it, but not its square


@pytest.fixture(scope="module")
def script() -> ModuleType:
    found = importlib.util.spec_from_file_location("replay_step", ROOT / "scripts" / "replay_step.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def save_step(folder: Path, *, action: float | None = None, checkpoint: Path | None = None) -> Path:
    batch = dataclasses.replace(synthetic_batch(SPEC, 3, token_len=16), sample_ids=np.array([7, 8, 9]))
    if action is not None:
        batch.actions[1, 0, 0] = action
    draws = make_draws(SPEC, 0, 0, np.arange(3))
    return save_bad_step(folder, 5, batch, draws, 1e-3, CONFIG.to_yaml(), checkpoint=checkpoint)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_loss_that_is_not_finite_is_reproduced_and_blamed(tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture, backend: str) -> None:
    code = script.main([str(save_step(tmp_path / "step_5", action=HUGE)), "--backend", backend])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines if "<- not finite" in line] == ["8"]
    assert f"backend {backend}" in "\n".join(lines) and any(line.startswith("replayed: loss inf, gradient norm ") for line in lines)
    groups = {line.split(":")[0].strip(): line for line in lines[lines.index("tensors whose gradient is not finite:") + 1 :]}
    assert list(groups) == ["vision", "trunk", "expert", "heads"] and "heads: 8 of 8: action_in_proj.weight (" in groups["heads"]
    assert "(1 of 11)" in groups["heads"]  # of action_out_proj.bias, the dim that was huge


def test_a_finite_step_is_no_reproduction(tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture) -> None:
    assert script.main([str(save_step(tmp_path / "step_5")), "--backend", "torch"]) == 1
    assert "Finite here" in capsys.readouterr().out


def test_the_weights_are_those_that_the_run_saved(tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture) -> None:
    params = dict(initial_params(SPEC, 1))
    params["action_out_proj.bias"] = params["action_out_proj.bias"] + np.float32([math.inf] + [0] * (SPEC.action_dim - 1))
    moments = {name: np.zeros_like(array) for name, array in params.items()}
    with open_run(tmp_path / "run", "new") as run, Checkpointer(run, SPEC) as checkpointer:
        checkpointer.save(TrainState(4, 4, params, moments, moments, None), {"config.yaml": CONFIG.to_yaml()})
    checkpoint = tmp_path / "run" / "checkpoints" / "4"
    for folder, options in ((save_step(tmp_path / "a", checkpoint=checkpoint), []), (save_step(tmp_path / "b"), ["--checkpoint", str(tmp_path / "run")])):
        assert script.main([str(folder), "--backend", "torch", *options]) == 0
        assert "weights: action_out_proj.bias has 1 values that are not finite" in capsys.readouterr().out
    assert script.main([str(save_step(tmp_path / "c", checkpoint=tmp_path / "gone")), "--backend", "torch"]) == 2
    assert "gone is not there" in capsys.readouterr().out


class Fake:
    """A backend whose losses are finite, and whose gradient is not where a batch holds an action above 100."""

    name, rates = "torch", []

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def describe(self) -> str:
        return "fake"

    def init_state(self, tensors: Any) -> int:
        return len(list(tensors))

    def eval_step(self, state: int, batch: Batch, draws: Draws) -> LossParts:
        return LossParts(np.ones(len(batch.actions), np.float32), np.ones(SPEC.action_dim, np.float32))

    def train_step(self, state: int, batch: Batch, draws: Draws, lr: float) -> tuple[int, StepMetrics]:
        self.rates.append((len(batch.actions), len(draws.noise), lr))
        bad = bool((batch.actions > 100).any())
        return state, StepMetrics(1.0, np.ones(SPEC.action_dim), math.nan if bad else 1.0, not bad)


def test_where_every_loss_is_finite_each_sample_is_tried_alone(
    tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(script, "load_backend", Fake)
    monkeypatch.setattr(script, "print_gradients", lambda *_: None)
    assert script.main([str(save_step(tmp_path / "step_5", action=200.0)), "--backend", "torch"]) == 0
    assert "Samples whose own gradient is not finite: 8." in capsys.readouterr().out
    assert Fake.rates == [(3, 3, 1e-3), (1, 1, 0.0), (1, 1, 0.0), (1, 1, 0.0)]


def test_what_cannot_be_computed_is_an_error(tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture) -> None:
    assert script.main([str(tmp_path)]) == 2
    assert script.main([str(save_step(tmp_path / "step_5")), "--override", "compute.dtyp=float32"]) == 2
    assert "compute.dtype" in capsys.readouterr().out  # the nearest name
