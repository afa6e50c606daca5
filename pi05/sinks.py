"""Where a run's numbers are shown: the terminal, TensorBoard, and Weights & Biases (see metrics.Sink)."""

import contextlib
import math
import queue
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console
import rich.progress

from pi05.errors import ConfigError
from pi05.metrics import Record, Window

WAIT_WARNING = 0.1  # share of the time spent waiting for data from which on the user is told
WANDB_INIT_SECONDS, WANDB_FINISH_SECONDS = 60, 30  # how long wandb, in its thread, may try; the run does not wait, its end does
POLL_SECONDS = 0.2
WANDB_QUEUE = 10_000  # records; a run is never held up by what wandb has not taken yet


class ConsoleSink:
    """A progress bar in a terminal; elsewhere (a file, a batch system) a line every logging step. Bad steps and evaluations are lines in both.

    console: print through it while the bar is shown. num_train_steps: the last step. loss_name: what the loss counts, such as "loss (model dims)".
    """

    def __init__(self, console: rich.console.Console, num_train_steps: int, *, loss_name: str = "loss") -> None:
        self._console, self._last, self._loss_name = console, num_train_steps, loss_name
        self._warned, self._window, self._bar = False, None, None

    def start(self, history: Sequence[Mapping[str, Any]]) -> None:
        if not self._console.is_terminal:
            return
        columns = (rich.progress.BarColumn(bar_width=24), rich.progress.TextColumn("{task.description}"))
        self._bar = rich.progress.Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task("first step: compiling", total=self._last, completed=max((line["step"] for line in history), default=0))
        self._bar.start()

    def write(self, record: Record) -> None:
        self._window = record.window or self._window
        if self._bar:
            self._bar.update(self._task, completed=record.step, description=self._describe(record, record.loss))
        elif record.window:
            self._print(self._describe(record, record.window.loss))
        if not record.finite:
            self._print(f"step {record.step}: not finite, nothing was learned from it: loss {record.loss}, gradient norm {record.grad_norm}", style="bold red")
        if record.window and record.window.data_wait > WAIT_WARNING and not self._warned:
            self._warned = True
            self._print(
                f"{record.window.data_wait:.0%} of the time is spent waiting for data: raise data.num_workers if there are idle cores; "
                "scripts/bench_loader.py shows which stage is slow.",
                style="yellow",
            )

    def write_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._print(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))

    def close(self) -> None:
        if self._bar:
            self._bar.stop()

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _describe(self, record: Record, loss: float) -> str:
        """`loss` is this step's in the bar, the window's mean in a line; rates are the last window's."""
        window = self._window or Window(1, record.loss, record.grad_norm, record.step_seconds, record.samples_per_s, record.data_wait)
        left = format_seconds((self._last - record.step) * window.step_seconds)
        return (
            f"step {record.step}/{self._last}  {self._loss_name} {loss:.4f}  lr {record.lr:.2e}  {window.samples_per_s:.1f} samples/s  "
            f"data wait {window.data_wait:.0%}  ETA {left}"
        )


class TensorBoardSink:
    """Event files in `folder`, always the same numbers as metrics.jsonl: those of an earlier start are replaced by the log's lines.

    loss_dims: part of the loss's tag, so that curves of different losses are not laid over each other. dim_names: of the action dims, for
    their own losses; without, numbers.
    """

    def __init__(self, folder: Path, *, loss_dims: str, dim_names: Sequence[str] | None = None) -> None:
        self._folder, self._loss_dims, self._dim_names = folder, loss_dims, tuple(dim_names or ())
        self._writer: Any = None

    def start(self, history: Sequence[Mapping[str, Any]]) -> None:
        import tensorboard.summary

        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = tensorboard.summary.Writer(str(self._folder))
        for line in history:
            if "evaluation" in line:
                self._write_evaluation(line["step"], line["evaluation"], line["wall_time"])
            else:
                self._write(line)

    def write(self, record: Record) -> None:
        self._write(record.to_line())
        if record.window:
            self._writer.flush()

    def write_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._write_evaluation(step, values, time.time())
        self._writer.flush()

    def close(self) -> None:
        if self._writer:
            self._writer.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        for tag, value in make_scalars(line, self._loss_dims, self._dim_names).items():
            self._writer.add_scalar(tag, value, line["step"], wall_time=line["wall_time"])

    def _write_evaluation(self, step: int, values: Mapping[str, float], wall_time: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"evaluation/{name}", value, step, wall_time=wall_time)


class WandbSink:
    """Weights & Biases, in a thread of its own: the run neither waits for it nor stops with it; what fails is a warning.

    Offline: WANDB_MODE=offline, and `wandb sync` later. run_id: of the run there; with the same one a resumed run goes on in the same curve.
    config: shown beside it. warn: called with a text for the user, in the run's thread.
    """

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        entity: str | None,
        name: str,
        run_id: str,
        config: Mapping[str, Any],
        loss_dims: str,
        dim_names: Sequence[str] | None = None,
        warn: Callable[[str], None] = warnings.warn,
        finish_seconds: float = WANDB_FINISH_SECONDS,
    ) -> None:
        self._options = {"project": project, "entity": entity, "name": name, "id": run_id, "config": dict(config), "dir": str(folder), "resume": "allow"}
        self._folder, self._loss_dims, self._dim_names = folder, loss_dims, tuple(dim_names or ())
        self._warn, self._finish_seconds = warn, finish_seconds
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue(WANDB_QUEUE)
        self._thread = threading.Thread(target=self._run, name="wandb", daemon=True)
        self._failure: str | None = None
        self._failed, self._closing, self._dropped = threading.Event(), threading.Event(), 0

    def start(self, history: Sequence[Mapping[str, Any]]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        self._put({"step": record.step} | make_scalars(record.to_line(), self._loss_dims, self._dim_names))

    def write_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._put({"step": step} | {f"evaluation/{name}": value for name, value in values.items()})

    def close(self) -> None:
        """Waits a while for the upload, and says so if it did not end."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(self._finish_seconds)
        self._report()
        if self._thread.is_alive():
            self._warn(f"wandb has not taken everything within {self._finish_seconds:g} s; metrics.jsonl has every number.")
        if self._dropped:
            self._warn(f"wandb was too slow: {self._dropped} records are missing there; metrics.jsonl has them.")

    def _put(self, values: dict[str, Any]) -> None:
        self._report()
        if not self._failed.is_set():
            try:
                self._queue.put_nowait(values)
            except queue.Full:
                self._dropped += 1

    def _report(self) -> None:
        failure, self._failure = self._failure, None
        if failure:
            self._warn(f"wandb is off for this run ({failure}). The run goes on; TensorBoard and metrics.jsonl have every number.")

    def _run(self) -> None:
        try:
            self._upload()
        except Exception as error:  # whatever a service does, it must not touch the run; the user is told by _report
            self._failure = f"{type(error).__name__}: {error}".splitlines()[0]
            self._failed.set()

    def _upload(self) -> None:
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):  # init() would ask in the terminal, and wait
            raise ConfigError("nobody is logged in: run `wandb login`, or set WANDB_MODE=offline and upload later with `wandb sync`")
        limits = {"init_timeout": WANDB_INIT_SECONDS, "finish_timeout": WANDB_FINISH_SECONDS}
        run = wandb.init(**self._options, settings=wandb.Settings(silent=True, console="off", **limits))
        run.define_metric("*", step_metric="step")  # and not wandb's own step, which a resumed run may not repeat
        while not (self._closing.is_set() and self._queue.empty()):
            with contextlib.suppress(queue.Empty):
                run.log(self._queue.get(timeout=POLL_SECONDS))
        run.finish()


def make_scalars(line: Mapping[str, Any], loss_dims: str, dim_names: Sequence[str] = ()) -> dict[str, float]:
    """Tag -> number of a log line, the same for TensorBoard and wandb."""
    scalars = {f"loss/{loss_dims}": line["loss"], "optimizer/lr": line["lr"], "optimizer/grad_norm": line["grad_norm"]}
    if "param_norm" in line:
        scalars["optimizer/param_norm"] = line["param_norm"]
    if "window" in line:
        scalars |= {f"speed/{name}": line["window"][name] for name in ("step_seconds", "samples_per_s", "data_wait")}
    for i, value in enumerate(line.get("per_dim", ())):
        scalars[f"loss_by_dim/{i:02d}" + (f"_{dim_names[i]}" if i < len(dim_names) else "")] = value
    return scalars


def format_seconds(seconds: float) -> str:
    """1:02:03 or 2:03; "?" where it is not known."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
