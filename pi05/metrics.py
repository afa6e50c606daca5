"""The log of a run: one JSON line a step in RUN/metrics.jsonl, and sinks that show the same numbers (sinks.py).

Every step has its line, and what is not finite stays so: a line says NaN, Infinity or -Infinity without quotes, as Python's json writes and
reads them (strict readers need to be told). A mean over steps is the plain mean, NaN with a NaN in it; only norms have a mean over what is finite.

Keys of a line: step (counted from 1: steps done), loss, lr, grad_norm (before clipping), finite, step_seconds, samples_per_s, data_wait (share
of the step's time spent waiting for data), wall_time (Unix); on logging steps also per_dim, param_norm, loss_dims and window (see Window);
where not finite also sample_ids. An evaluation has a line of its own: step, evaluation {name: value}, wall_time.
"""

import collections
import contextlib
import dataclasses
import json
import math
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from pi05.bad_step import save_bad_step
from pi05.batch import Batch, Draws, LossDims
from pi05.errors import ConfigError, DataError, NonFiniteLoss, Pi05Error
from pi05.train_state import StepMetrics

FILE, BAD_STEPS = "metrics.jsonl", "bad_steps"
MAX_SAVED = 4  # bad steps saved on the way; each is as large as a batch. The one that stops the run is saved besides.
NAMED_IDS = 16  # sample ids in a message; the file has all


@dataclasses.dataclass(frozen=True)
class Window:
    """The steps since the last logging step.

    loss: plain mean. grad_norm: mean of those that are finite; NaN if none is. samples_per_s, data_wait, step_seconds: of the whole time;
    the first step after a start is not counted in it (it compiles), unless it is the only one.
    """

    steps: int
    loss: float
    grad_norm: float
    step_seconds: float
    samples_per_s: float
    data_wait: float


@dataclasses.dataclass(frozen=True)
class Record:
    """One step; fields as the keys of a line (see above). per_dim: float32[M]."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    finite: bool
    step_seconds: float
    samples_per_s: float
    data_wait: float
    wall_time: float
    per_dim: np.ndarray | None = None
    param_norm: float | None = None
    loss_dims: LossDims | None = None
    window: Window | None = None
    sample_ids: tuple[int, ...] | None = None

    def to_line(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        if self.per_dim is not None:
            values["per_dim"] = self.per_dim.astype(float).tolist()
        if self.window is not None:
            values["window"] = vars(self.window)
        return values


class Sink(Protocol):
    """Where records are shown."""

    def start(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Called once, with the lines that the log already has (a resumed run's)."""

    def write(self, record: Record) -> None:
        """Every step, in order."""

    def write_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """The result of an evaluation after `step`."""

    def close(self) -> None:
        """Called once, at the end, and where start() failed."""


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A step whose numbers the device may still be computing. Batch and draws are views that keep the loader's memory; it is never reused."""

    step: int
    metrics: StepMetrics
    lr: float
    batch: Batch
    draws: Draws
    seconds: float
    waited: float
    wall_time: float


class RunLog:
    """Takes the metrics of every step, without waiting for the step; a context manager, whose end writes what is left.

    A step is fetched `delay` steps later, when the device has the next ones to work on. Until then its batch is kept, for the case that
    it was not finite: with a delay of up to 2 the loader's allowance for held batches suffices (loader.HELD_BATCHES).

    step: the last step whose line is written.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        batch_size: int,
        num_train_steps: int,
        log_interval: int,
        config_yaml: str,
        loss_dims: LossDims,
        resumed_step: int = 0,
        max_bad_steps: int = 1,
        delay: int = 1,
        sinks: Sequence[Sink] = (),
        save_weights: Callable[[], Path | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens RUN/metrics.jsonl; lines of steps after `resumed_step` (steps done by the checkpoint; 0: a new run) are removed.

        batch_size: samples of a step, of all processes. num_train_steps: the last step, which is always a logging step.
        config_yaml: kept beside bad steps. loss_dims: which dims the loss counts, for its name.
        max_bad_steps: steps in a row that are not finite, after which NonFiniteLoss is raised.
        save_weights: called when that happens; saves the present weights and returns where, for the replay. At most `delay` updates are
            newer than the bad step. None: the replay starts from the config's weights unless it is told otherwise.

        Raises:
            ConfigError: an argument is out of range.
            DataError: the file is not such a log.
        """
        if min(batch_size, log_interval, max_bad_steps) < 1 or delay < 0 or not 0 <= resumed_step <= num_train_steps:
            raise ConfigError(f"{batch_size=}, {log_interval=}, {max_bad_steps=}, {delay=}, {resumed_step=}, {num_train_steps=}: out of range.")
        self.step = resumed_step
        self._run_dir, self._batch_size, self._last, self._interval = run_dir, batch_size, num_train_steps, log_interval
        self._config_yaml, self._loss_dims, self._max_bad, self._delay, self._clock = config_yaml, loss_dims, max_bad_steps, delay, clock
        self._sinks, self._save_weights = tuple(sinks), save_weights
        self._pending: collections.deque[_Pending] = collections.deque()
        self._window: list[Record] = []
        self._bad_in_a_row, self._saved, self._stopped, self._fresh = 0, 0, False, True
        run_dir.mkdir(parents=True, exist_ok=True)
        history = truncate_log(run_dir / FILE, resumed_step)
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context((run_dir / FILE).open("a", buffering=1))  # line by line: a killed run has its log
            for sink in self._sinks:
                stack.callback(sink.close)
                sink.start(history)
            self._open = stack.pop_all()
        self._since, self._waited = clock(), 0.0

    def is_logging_step(self, step: int) -> bool:
        """Whether `step` (counted from 1) should ask for norms."""
        return step % self._interval == 0 or step == self._last

    def add(self, step: int, metrics: StepMetrics, *, lr: float, batch: Batch, draws: Draws, seconds_waited: float) -> None:
        """The metrics of `step` (counted from 1), which has been handed to the device; steps come one after the other.

        lr, batch, draws: what it was given. seconds_waited: the loader's, a running total.

        Raises:
            NonFiniteLoss: this is the last of max_bad_steps steps in a row that were not finite.
        """
        expected = self._pending[-1].step + 1 if self._pending else self.step + 1
        if step != expected:
            raise ValueError(f"add() got step {step} after step {expected - 1}; steps come in order, none is left out.")
        now = self._clock()
        seconds, waited = now - self._since, seconds_waited - self._waited
        self._since, self._waited = now, seconds_waited
        self._pending.append(_Pending(step, metrics, lr, batch, draws, seconds, waited, time.time()))
        while len(self._pending) > self._delay:
            self._write(self._pending.popleft())

    def flush(self) -> None:
        """Waits for the device and writes every step so far. Call it before a checkpoint, so that the log reaches as far.

        Raises:
            NonFiniteLoss: as add().
        """
        while self._pending:
            self._write(self._pending.popleft())

    def add_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """The result of an evaluation after `step`, name -> value; written behind the steps so far.

        Raises:
            NonFiniteLoss: as add().
        """
        self.flush()
        self._write_line({"step": step, "evaluation": {name: float(value) for name, value in values.items()}, "wall_time": time.time()})
        for sink in self._sinks:
            sink.write_evaluation(step, values)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time within (an evaluation, a save) is no step's time."""
        started = self._clock()
        try:
            yield
        finally:
            self._since += self._clock() - started

    def close(self) -> None:
        """Writes what is left and closes file and sinks, whatever happens.

        Raises:
            NonFiniteLoss: as add(), unless it has been raised before.
        """
        if self._file.closed:
            return
        with self._open:
            try:
                self.flush()
            except NonFiniteLoss:
                self.flush()  # the steps behind it; it is raised once
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _write(self, pending: _Pending) -> None:
        fetched = pending.metrics.fetch()
        finite = bool(fetched["finite"]) and math.isfinite(fetched["loss"])
        record = Record(
            step=pending.step,
            loss=fetched["loss"],
            lr=pending.lr,
            grad_norm=fetched["grad_norm"],
            finite=finite,
            step_seconds=pending.seconds,
            samples_per_s=self._batch_size / pending.seconds if pending.seconds > 0 else math.nan,
            data_wait=min(1.0, pending.waited / pending.seconds) if pending.seconds > 0 else 0.0,
            wall_time=pending.wall_time,
            param_norm=fetched.get("param_norm"),
            sample_ids=None if finite else tuple(pending.batch.sample_ids.tolist()),
        )
        self._window.append(record)
        if self.is_logging_step(record.step):
            record = dataclasses.replace(record, per_dim=fetched["per_dim"], loss_dims=self._loss_dims, window=self._close_window())
        self.step = record.step
        self._write_line(record.to_line())
        for sink in self._sinks:
            sink.write(record)
        self._bad_in_a_row = 0 if finite else self._bad_in_a_row + 1
        if not finite:
            self._handle_bad(pending, record)

    def _write_line(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(values) + "\n")

    def _close_window(self) -> Window:
        records, self._window = self._window, []
        timed = records[1:] if self._fresh and len(records) > 1 else records
        self._fresh = False
        seconds = sum(record.step_seconds for record in timed)
        norms = [record.grad_norm for record in records if math.isfinite(record.grad_norm)]
        return Window(
            steps=len(records),
            loss=sum(record.loss for record in records) / len(records),
            grad_norm=sum(norms) / len(norms) if norms else math.nan,
            step_seconds=seconds / len(timed),
            samples_per_s=self._batch_size * len(timed) / seconds if seconds > 0 else math.nan,
            data_wait=sum(record.data_wait * record.step_seconds for record in timed) / seconds if seconds > 0 else 0.0,
        )

    def _handle_bad(self, pending: _Pending, record: Record) -> None:
        """Saves the step, and stops the run if it is one too many. A run that has been stopped only logs."""
        if self._stopped:
            return
        self._stopped = self._bad_in_a_row >= self._max_bad
        if not self._stopped:
            if self._bad_in_a_row == 1 and self._saved < MAX_SAVED:  # the weights did not change since: the first of a row stands for all
                self._saved += 1
                self._save(pending, record, None)
            return
        problems: list[str] = []
        checkpoint = folder = None
        try:
            checkpoint = self._save_weights() if self._save_weights else None
        except (OSError, Pi05Error) as error:
            problems.append(f"The weights could not be saved: {error}")
        try:
            folder = self._save(pending, record, checkpoint)
        except OSError as error:
            problems.append(f"The batch could not be saved, so there is nothing to replay: {error}")
        raise NonFiniteLoss(_describe(record, self._bad_in_a_row, folder, problems))

    def _save(self, pending: _Pending, record: Record, checkpoint: Path | None) -> Path:
        return save_bad_step(
            self._run_dir / BAD_STEPS / f"step_{record.step}",
            record.step,
            pending.batch,
            pending.draws,
            record.lr,
            self._config_yaml,
            loss=record.loss,
            grad_norm=record.grad_norm,
            checkpoint=checkpoint,
        )


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, in order. A last line that was cut off (the run was killed) is left out.

    Raises:
        DataError: there is no such file, or a line before the last is not one of ours.
    """
    if not path.is_file():
        raise DataError(f"There is no log {path}.")
    texts = path.read_text().split("\n")
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            if number == len(texts):  # what follows the last newline: nothing, or a line that was cut off
                break
            line = None
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            raise DataError(f"{path}, line {number} is not a step of a run: {text[:80]!r}. Move the file away, or restore it.")
        lines.append(line)
    return lines


def read_losses(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Steps int64[n] and their losses float64[n], what is NaN included, of a metrics.jsonl.

    Raises:
        DataError: as read_log.
    """
    lines = [line for line in read_log(path) if "loss" in line]
    return np.array([line["step"] for line in lines], np.int64), np.array([line["loss"] for line in lines], np.float64)


def truncate_log(path: Path, step: int) -> list[dict[str, Any]]:
    """Removes the lines after `step` from a metrics.jsonl, atomically, and returns the others; no file is an empty log.

    Raises:
        DataError: as read_log.
    """
    if not path.exists():
        return []
    kept = [line for line in read_log(path) if line["step"] <= step]
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
    temporary.replace(path)
    return kept


def _describe(record: Record, in_a_row: int, folder: Path | None, problems: Sequence[str]) -> str:
    ids = record.sample_ids or ()
    named = ", ".join(map(str, ids[:NAMED_IDS])) + (f" and {len(ids) - NAMED_IDS} more" if len(ids) > NAMED_IDS else "")
    streak = f" (the last of {in_a_row} in a row)" if in_a_row > 1 else ""
    lines = [f"Step {record.step}{streak} is not finite: loss {record.loss}, gradient norm {record.grad_norm}, lr {record.lr:g}. Samples: {named}."]
    if folder is not None:
        lines += [f"Its batch and draws are in {folder}. To compute it again:", f"    python scripts/replay_step.py {shlex.quote(str(folder))}"]
    return "\n".join([*lines, *problems])
