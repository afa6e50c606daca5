"""The training loop, once for both backends.

    python -m pi05.train [CONFIG] [--backend jax|torch] [--exp-name NAME] [--resume | --overwrite] [--any.field value]

Without arguments: the tiny model on the bundled demonstrations, on the CPU, in about a minute.
"""

import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

import rich.console

from pi05.backend import Backend, load_backend
from pi05.batch import Batch, Draws
from pi05.checkpoint import Checkpointer, load_state, locate_checkpoint, read_file
from pi05.config import TrainConfig, get_config
from pi05.config_cli import RunFlags, parse_cli
from pi05.data.loader import Loader
from pi05.data.norm_stats import NormStats
from pi05.data.run_data import RunData, open_run_data
from pi05.errors import ConfigError, Pi05Error
from pi05.evaluate import Evaluation
from pi05.interop.sources import load_weights
from pi05.metrics import FILE, RunLog, Sink, read_losses
from pi05.params import count
from pi05.plots import first_batch_sheet, loss_curve_png
from pi05.run_folder import RunFolder, open_run
from pi05.schedule import learning_rate
from pi05.sinks import ConsoleSink, TensorBoardSink, WandbSink
from pi05.spec import ModelSpec
from pi05.stack import check_before_training
from pi05.train_state import TrainState

# Fields that say how often, how long and where, not what is computed; a resumed run may change them without a word.
_FREE_FIELDS = {"num_train_steps", "log_interval", "eval_interval", "save_interval", "keep_last", "keep_period", "keep_best", "max_bad_steps", "backend"}
_FREE_FIELDS |= {"device", "checkpoint_dir", "exp_name", "name", "wandb", "weights"}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended. step: batches consumed. checkpoint: the newest. stopped_by: the signal's name, None if the run is complete."""

    step: int
    checkpoint: Path
    stopped_by: str | None


class StopRequest:
    """Notes SIGINT and SIGTERM instead of dying from them; a second one interrupts at once. A context manager."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name


class Run:
    """One training run, opened by `open_training`: what its steps, evaluations and saves need."""

    def __init__(self, config: TrainConfig, folder: RunFolder, data: RunData, loader: Loader, backend: Backend, console: rich.console.Console) -> None:
        self.config, self.folder, self.data, self.loader, self.backend, self.console = config, folder, data, loader, backend, console
        self.state: Any = None
        self.log: RunLog | None = None
        self.checkpointer: Checkpointer | None = None
        self._evaluation = Evaluation(data) if data.holdout is not None else None

    def step(self, step: int, batch: Batch, draws: Draws) -> None:
        """Trains on one batch; `step` counts from 0."""
        lr = learning_rate(self.config.schedule, step)
        self.state, metrics = self.backend.train_step(self.state, batch, draws, lr, norms=self.log.is_logging_step(step + 1))
        self.log.add(step + 1, metrics, lr=lr, batch=batch, draws=draws, seconds_waited=self.loader.seconds_waited)

    def evaluate(self, done: int) -> float | None:
        """Judges the weights on held-out episodes, if there are some; returns the mean squared error of actions."""
        if self._evaluation is None:
            return None
        with self.log.paused():
            score = self._evaluation(self.backend, self.state)
        joints = {f"rmse {name}": value for name, value in score.joint_rmse.items()}
        values = {"loss": score.loss, "action_mse": score.action_mse, "baseline_mse": score.baseline_mse}
        self.log.add_evaluation(done, values | joints)
        return score.action_mse

    def save(self, metric: float | None = None) -> None:
        """Starts writing a checkpoint of the present state."""
        with self.log.paused():
            state = self.backend.export_state(self.state)
            self.checkpointer.save(state, self._files(state), metric=metric, backend=self.backend.describe())

    def save_now(self) -> Path:
        """Writes a checkpoint of the present state and returns it."""
        self.save()
        self.checkpointer.wait()
        return locate_checkpoint(self.folder.path)

    def _files(self, state: TrainState) -> dict[str, str | bytes]:
        return {
            "config.yaml": self.config.to_yaml(),
            "norm_stats.json": json.dumps(self.data.pipeline.stats.to_dict(), indent=2) + "\n",
            "tokenizer.model": self.data.pipeline.tokenizer.model,
            "loader.json": json.dumps(self.loader.state(state.step), indent=2) + "\n",
        }


def train(config: TrainConfig, flags: RunFlags, console: rich.console.Console) -> Outcome:
    """Trains as `config` says; see the module for what a run leaves behind.

    Raises:
        ConfigError, DataError, CheckpointError, SpecError: something does not fit; before any weight is loaded, where it can be known by then.
        NonFiniteLoss: the loss or the gradient was not finite max_bad_steps times in a row.
    """
    mode = "resume" if flags.resume else "overwrite" if flags.overwrite else "new"
    with open_training(config, mode, console) as run, StopRequest() as stop:
        done = run.log.step
        batches = run.loader.batches(first=done, last=config.num_train_steps)
        for step, (batch, draws) in enumerate(batches, start=done):
            if step == done:
                _save_first_batch(run, batch, draws)
            run.step(step, batch, draws)
            metric, complete = None, step + 1 == config.num_train_steps
            if complete or (config.eval_interval and (step + 1) % config.eval_interval == 0):
                metric = run.evaluate(step + 1)
            if complete or stop.signal_name or (step + 1) % config.save_interval == 0:
                run.save(metric)
            if stop.signal_name:
                break
        run.log.flush()
        run.checkpointer.wait()
        loss_curve_png(run.folder.path / "loss.png", {run.backend.name: read_losses(run.folder.path / FILE)})
        outcome = Outcome(run.log.step, locate_checkpoint(run.folder.path), stop.signal_name if run.log.step < config.num_train_steps else None)
        _report_end(run, outcome)
    return outcome


@contextlib.contextmanager
def open_training(config: TrainConfig, mode: str, console: rich.console.Console) -> Iterator[Run]:
    """Everything a run needs, in the order in which it can fail cheaply: data, backend, folder, weights."""
    say = _Printer(console)
    spec, resumed = config.spec(), None
    if mode == "resume":
        resumed = locate_checkpoint(config.run_dir)
        for line in _changed_fields(get_config(str(resumed / "config.yaml")), config):
            say(f"changed since the checkpoint: {line}")
    with contextlib.ExitStack() as stack:
        data = open_run_data(config, NormStats.load(resumed / "norm_stats.json") if resumed else None)
        for line in data.pipeline.floored:
            say(line)
        backend = load_backend(config.backend, spec, config.compute, config.recipe(), device=config.device)
        for line in check_before_training(config, backend.name, len(data.pipeline.slots), spec.max_token_len):
            say(line, "yellow")
        loader = stack.enter_context(data.make_loader())
        if resumed:
            loader.check_state(json.loads(read_file(resumed, "loader.json")))
        folder = stack.enter_context(open_run(config.run_dir, mode))
        run = Run(config, folder, data, loader, backend, console)
        run.checkpointer = stack.enter_context(
            Checkpointer(folder, spec, keep_last=config.keep_last, keep_period=config.keep_period, keep_best=config.keep_best)
        )
        run.checkpointer.check_space(config.recipe())
        say(f"{config.name}/{config.exp_name}: {len(data.train):,} frames, statistics {data.stats_origin}; backend {backend.name} on {backend.describe()}")
        start = 0
        if resumed:
            saved = load_state(resumed, spec)
            run.state, start = backend.import_state(saved), saved.step
            say(f"resumed {resumed} at step {start}")
        else:
            weights = load_weights(config.weights, spec, seed=config.seed, on_shape_mismatch=config.on_shape_mismatch)
            run.state = backend.init_state(weights.tensors)
            say(str(weights.report))
        if start >= config.num_train_steps:
            raise ConfigError(
                f"The run is complete: its checkpoint is at step {start} of num_train_steps {config.num_train_steps}. Raise num_train_steps to go on."
            )
        say(_describe_parameters(config, spec))
        run.log = stack.enter_context(_open_log(run, start))
        yield run


def main(arguments: Sequence[str]) -> int:
    """`python -m pi05.train`; returns the exit code: 0 complete or stopped by a signal with everything saved, 1 an error that has been printed."""
    console = rich.console.Console(highlight=False, soft_wrap=True)
    if set(arguments) & {"-h", "--help"}:
        console.print(__doc__.strip(), markup=False)
        console.print("\nConfigs: python -m pi05.config list. Fields: docs/configs.md, or python -m pi05.config explain CONFIG.", markup=False)
        return 0
    try:
        train(*parse_cli(arguments), console)
    except Pi05Error as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        return 1
    return 0


class _Printer:
    """Plain lines, whatever brackets they hold."""

    def __init__(self, console: rich.console.Console) -> None:
        self._console = console

    def __call__(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _open_log(run: Run, start: int) -> RunLog:
    config, path = run.config, run.folder.path
    names = run.data.pipeline.robot.action_names
    sinks: list[Sink] = [
        ConsoleSink(run.console, config.num_train_steps, loss_name=f"loss ({config.loss_dims} dims)"),
        TensorBoardSink(path / "tensorboard", loss_dims=config.loss_dims, dim_names=names),
    ]
    if config.wandb.enabled:
        sinks.append(
            WandbSink(
                path / "wandb",
                project=config.wandb.project,
                entity=config.wandb.entity,
                name=f"{config.name}/{config.exp_name}",
                run_id=f"{config.name}-{config.exp_name}",
                config=config.model_dump(mode="json"),
                loss_dims=config.loss_dims,
                dim_names=names,
                warn=_Printer(run.console),
            )
        )
    return RunLog(
        path,
        batch_size=config.batch_size,
        num_train_steps=config.num_train_steps,
        log_interval=config.log_interval,
        config_yaml=config.to_yaml(),
        loss_dims=config.loss_dims,
        resumed_step=start,
        max_bad_steps=config.max_bad_steps,
        delay=0,  # the state is still that of the bad step when it is noticed, so a replay is exact
        sinks=sinks,
        save_weights=run.save_now,
    )


def _save_first_batch(run: Run, batch: Batch, draws: Draws) -> None:
    pipeline = run.data.pipeline
    path = run.folder.path / "first_batch.png"
    first_batch_sheet(path, batch, draws, pipeline.tokenizer.decode, pipeline.slots, dim_names=pipeline.robot.action_names)


def _changed_fields(old: TrainConfig, new: TrainConfig) -> list[str]:
    before, after = (config.model_dump(mode="json") for config in (old, new))
    return [f"{name} was {before[name]}, is {after[name]}" for name in after if name not in _FREE_FIELDS and before[name] != after[name]]


def _describe_parameters(config: TrainConfig, spec: ModelSpec) -> str:
    total, trained = count(spec), count(spec, config.recipe().trains(spec))
    return f"{total:,} parameters: {trained:,} trained, {total - trained:,} frozen"


def _report_end(run: Run, outcome: Outcome) -> None:
    say, peak, name = _Printer(run.console), run.backend.peak_memory(), run.config.name
    memory = "" if peak is None else f"; peak device memory {peak / 2**30:.1f} GiB"
    if outcome.stopped_by:
        say(f"stopped by {outcome.stopped_by} at step {outcome.step}; saved {outcome.checkpoint}{memory}")
        say(f"go on: python -m pi05.train {name} --exp-name {run.config.exp_name} --resume")
        return
    say(f"done: {outcome.step} steps; checkpoint {outcome.checkpoint}{memory}")
    say(f"see {run.folder.path}: loss.png, first_batch.png, metrics.jsonl; tensorboard --logdir {run.folder.path}")
    other = "torch" if run.backend.name == "jax" else "jax"
    say(f"next: python -m pi05.evaluate {run.folder.path}")
    say(f"      python -m pi05.train {name} --backend {other} --exp-name {other}   (the same curve from the other backend)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
