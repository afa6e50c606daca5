"""Checkpoints of a run: written in the background and whole or not at all, read by either backend.

A checkpoint is a folder, RUN/checkpoints/STEP/; step k means k batches consumed:

    params.safetensors       the weights to act with, in the published names; its metadata says whether they are a moving average
    train_state.safetensors  params/NAME: what the weights themselves are where the average stands above; m/NAME, v/NAME: AdamW's moments;
                             canonical names
    checkpoint.json          format, step, updates, metric, backend, versions, sizes of the model
    config.yaml, norm_stats.json, tokenizer.model, loader.json   and whatever else the caller gives
"""

import dataclasses
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from pi05.errors import CheckpointError
from pi05.interop.source import Source, table_build, table_places
from pi05.interop.tensor_file import TensorFiles, write_tensors
from pi05.params import shapes, write
from pi05.run_folder import CHECKPOINTS, TEMPORARY, RunFolder, list_steps
from pi05.spec import ModelSpec
from pi05.train_state import TrainState

FORMAT_VERSION = 1
PARAMS, TRAIN_STATE, DESCRIPTION = "params.safetensors", "train_state.safetensors", "checkpoint.json"
RESERVE = 64 << 20  # bytes that are left free on the disk


class Checkpointer:
    """Saves a run's checkpoints and removes those that nobody asked to keep. A context manager: leaving it waits for the last save.

    keep_last: newest ones that stay. keep_period: those of every such step stay for good. keep_best: the one with the lowest metric stays.
    """

    def __init__(self, run: RunFolder, spec: ModelSpec, *, keep_last: int = 1, keep_period: int | None = None, keep_best: bool = False) -> None:
        self._run, self._spec = run, spec
        self._keep_last, self._keep_period, self._keep_best = keep_last, keep_period, keep_best
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(self, state: TrainState, files: Mapping[str, str | bytes], *, metric: float | None = None, **facts: str) -> None:
        """Starts writing `state` with `files` (name -> content) beside it, after the save before has ended; returns before it is written.

        metric: what keep_best compares; lower is better. facts: further entries of checkpoint.json. A step that is saved already is not saved again.

        Raises:
            CheckpointError: the save before failed, or the disk has no room for this one; the checkpoints that are there stay as they are.
        """
        self.wait()
        if state.step in list_steps(self._run.path):
            return
        _check_space(self._run.checkpoints, _size(state) + sum(map(len, files.values())), state.step)
        self._pending = self._writer.submit(self._write, state, dict(files), metric, facts)

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            CheckpointError: the save failed.
        """
        pending, self._pending = self._pending, None
        if pending:
            pending.result()

    def close(self) -> None:
        """Waits for the last save; see `wait`."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _write(self, state: TrainState, files: dict[str, str | bytes], metric: float | None, facts: dict[str, str]) -> None:
        folder = self._run.checkpoints / str(state.step)
        part = folder.with_name(f"{TEMPORARY}{state.step}")
        try:
            part.mkdir()
            _write_state(part, state, self._spec)
            description = {
                "format_version": FORMAT_VERSION,
                "step": state.step,
                "updates": state.updates,
                "ema": state.ema is not None,
                "metric": metric if metric is None or math.isfinite(metric) else None,
                "model": dataclasses.asdict(self._spec),
            }
            for name, content in {**files, DESCRIPTION: json.dumps(description | facts, indent=2) + "\n"}.items():
                _write_file(part / name, content)
            _sync(part)
            part.rename(folder)
            _sync(folder.parent)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else str(error)
            last = list_steps(self._run.path)
            there = f"The checkpoint of step {last[-1]} is intact" if last else "There is none yet"
            raise CheckpointError(f"The checkpoint of step {state.step} could not be written to {folder.parent}: {why}. {there}.") from error
        self._remove_old()

    def _remove_old(self) -> None:
        steps = list_steps(self._run.path)
        keep = set(steps[-self._keep_last :])
        if self._keep_period:
            keep |= {step for step in steps if step % self._keep_period == 0}
        if self._keep_best:
            metrics = {step: load_description(self._run.checkpoints / str(step))["metric"] for step in steps}
            keep |= set(sorted((step for step in steps if metrics[step] is not None), key=lambda step: metrics[step])[:1])
        for step in steps:
            if step not in keep:
                gone = self._run.checkpoints / f"{TEMPORARY}old-{step}"
                (self._run.checkpoints / str(step)).rename(gone)  # so that a half-deleted one is never taken for a whole one
                shutil.rmtree(gone)


def locate_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`: itself, or the newest of the run there.

    Raises:
        CheckpointError: there is neither.
    """
    path = Path(path)
    if (path / DESCRIPTION).is_file():
        return path
    run = path.parent if path.name == CHECKPOINTS else path
    if steps := list_steps(run):
        return run / CHECKPOINTS / str(steps[-1])
    raise CheckpointError(f"{path} is neither a checkpoint (it has no {DESCRIPTION}) nor a run with checkpoints. Give RUN or RUN/{CHECKPOINTS}/STEP.")


def load_description(folder: Path) -> dict[str, Any]:
    """What checkpoint.json says.

    Raises:
        CheckpointError: it is missing, damaged, or of a later release.
    """
    try:
        content = json.loads(read_file(folder, DESCRIPTION))
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder / DESCRIPTION} is damaged ({error}). Copy the checkpoint again.") from error
    if content.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has the format version {content.get('format_version')}; this release reads {FORMAT_VERSION}. Use the one that wrote it."
        )
    return content


def load_state(folder: Path, spec: ModelSpec) -> TrainState:
    """The whole state of a run.

    Raises:
        CheckpointError: a file is missing or damaged. ParamsError: it is of another model; names tensors and shapes.
    """
    description, files = load_description(folder), TensorFiles([_existing(folder, TRAIN_STATE)])
    parts: dict[str, dict[str, np.ndarray]] = {"params": {}, "m": {}, "v": {}}
    for name in files.shapes:
        kind, _, inner = name.partition("/")
        if kind not in parts:
            raise CheckpointError(f"{folder / TRAIN_STATE} holds {name}, which this release does not know. Use the one that wrote it.")
        parts[kind][inner] = files.read(name)
    served = dict(load_params(folder, spec))
    ema = {name: served[name] for name in parts["m"]} if description["ema"] else None
    return TrainState(description["step"], description["updates"], served | parts["params"], parts["m"], parts["v"], ema)


def load_params(folder: Path, spec: ModelSpec) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (canonical name, float32 array) of the weights to act with.

    Raises:
        CheckpointError, ParamsError: as load_state.
    """
    files = TensorFiles([_existing(folder, PARAMS)])
    source = Source("pi05", folder, spec, files.shapes, files.read, table_places(spec, "published"), table_build(spec, "published"))
    return source.tensors()


def read_file(folder: Path, name: str) -> bytes:
    """The content of a file of a checkpoint.

    Raises:
        CheckpointError: it is not there.
    """
    return _existing(folder, name).read_bytes()


def _existing(folder: Path, name: str) -> Path:
    path = Path(folder) / name
    if not path.is_file():
        raise CheckpointError(f"{folder} is no whole checkpoint: it has no {name}. Copy the whole folder again, or take another step.")
    return path


def _write_state(folder: Path, state: TrainState, spec: ModelSpec) -> None:
    served, metadata = state.served_params(), {"format": "pt", "weights": "raw" if state.ema is None else "moving average"}
    write_tensors(folder / PARAMS, shapes(spec, "published"), write(served.items(), spec, "published"), metadata)
    raw = {} if state.ema is None else {name: state.params[name] for name in state.ema}
    rest = {f"{kind}/{name}": array for kind, part in (("params", raw), ("m", state.m), ("v", state.v)) for name, array in part.items()}
    write_tensors(folder / TRAIN_STATE, {name: array.shape for name, array in rest.items()}, rest.items(), {})


def _write_file(path: Path, content: str | bytes) -> None:
    with path.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _size(state: TrainState) -> int:
    parts = (state.params, state.m, state.v, state.ema or {})
    return sum(array.nbytes for part in parts for array in part.values())


def _check_space(folder: Path, needed: int, step: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + RESERVE:
        raise CheckpointError(
            f"The checkpoint of step {step} needs {needed / 1e9:.2f} GB in {folder}, which has {free / 1e9:.2f} GB free. "
            "Nothing was written and nothing was deleted. Make room, or set checkpoint_dir to another disk and start anew."
        )
