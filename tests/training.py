"""Short training runs of the tiny model on a few bundled demonstrations, for the tests of training."""

import contextlib
import dataclasses
import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.console

import pi05.train
from pi05.batch import Batch, Draws
from pi05.checkpoint import load_state
from pi05.config import TrainConfig, get_config
from pi05.config_cli import RunFlags
from pi05.data.loader import Loader
from pi05.metrics import read_log
from pi05.train_state import TrainState

HALF = 3  # steps before a resume
SMALL = {
    "data.datasets.0.episodes": "[0, 1, 5]",  # of one task, and
    "data.discrete_state": "false",  # no state in the prompt: every batch has one length, so JAX compiles once
    "data.holdout_episodes": "[5]",
    "data.num_workers": "0",
    "batch_size": "4",
    "log_interval": "2",
    "num_train_steps": str(2 * HALF),
    "schedule.warmup_steps": "1",
    "schedule.peak_lr": "2e-3",
    "ema_decay": "0.5",
}
UNJUDGED = {"data__datasets__0__episodes": "[0, 1]", "data__holdout_episodes": "0"}  # the same training data, without the time for an evaluation


def small_config(folder: Path, **fields: str) -> TrainConfig:
    """The shipped tiny config with a few steps; a field's dots are written as two underscores."""
    return get_config("tiny", SMALL | {"checkpoint_dir": str(folder)} | {name.replace("__", "."): value for name, value in fields.items()})


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a run left behind. console: its text. sample_ids: of each step, as the backend was given them."""

    config: TrainConfig
    outcome: pi05.train.Outcome
    console: str
    sample_ids: dict[int, list[int]]

    @property
    def folder(self) -> Path:
        return self.config.run_dir

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The log's lines of steps."""
        return [line for line in read_log(self.folder / "metrics.jsonl") if "loss" in line]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [line for line in read_log(self.folder / "metrics.jsonl") if "evaluation" in line]

    def state(self) -> TrainState:
        """Its newest checkpoint."""
        return load_state(self.outcome.checkpoint, self.config.spec())


def run_training(config: TrainConfig, mode: str = "new") -> Finished:
    """Trains in this process."""
    console = rich.console.Console(file=io.StringIO(), width=200)
    seen: dict[int, list[int]] = {}
    step = pi05.train.Run.step

    def watched(self: pi05.train.Run, number: int, batch: Batch, draws: Draws) -> None:
        seen[number + 1] = batch.sample_ids.tolist()
        step(self, number, batch, draws)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pi05.train.Run, "step", watched)
        outcome = pi05.train.train(config, RunFlags(resume=mode == "resume", overwrite=mode == "overwrite"), console)
    return Finished(config, outcome, console.file.getvalue(), seen)


@contextlib.contextmanager
def changed_batches(change: Callable[[int, Batch], Batch]) -> Iterator[None]:
    """Within, every loader gives change(step, batch) in place of a batch; steps count from 1."""
    batches = Loader.batches

    def changed(self: Loader, *, first: int, last: int) -> Iterator[tuple[Batch, Draws]]:
        for step, (batch, draws) in enumerate(batches(self, first=first, last=last), start=first + 1):
            yield change(step, batch), draws

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "batches", changed)
        yield


class Runs:
    """Runs that several tests look at, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, ...], Finished] = {}

    def straight(self, backend: str) -> Finished:
        """2 * HALF steps in one go."""
        return self._keep(("straight", backend), lambda: run_training(small_config(self._folder / "straight", backend=backend, exp_name=backend)))

    def half(self, backend: str) -> Finished:
        """The first HALF steps."""
        fields = {"backend": backend, "exp_name": backend, "num_train_steps": str(HALF)} | UNJUDGED
        return self._keep(("half", backend), lambda: run_training(small_config(self._folder / "half", **fields)))

    def resumed(self, first: str, second: str) -> Finished:
        """HALF steps in one backend, the other HALF in another, or in the same one again."""

        def make() -> Finished:
            config = small_config(self._folder / "resumed", backend=second, exp_name=f"{first}-{second}", **UNJUDGED)
            shutil.copytree(self.half(first).folder, config.run_dir)
            return run_training(config, "resume")

        return self._keep(("resumed", first, second), make)

    def _keep(self, key: tuple[str, ...], make: Callable[[], Finished]) -> Finished:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Whether two sets of tensors have the same names and the same bytes."""
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)
