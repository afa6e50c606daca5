"""Checkpoints of a run: written in the background and whole or not at all, read by either backend.

A checkpoint is a folder, RUN/checkpoints/STEP/; step k means k batches consumed:

    params.safetensors       the weights to act with, in the published names; its metadata says which model that is, and whether the weights are
                             a moving average
    train_state.safetensors  params/NAME: what the weights themselves are where the average stands above; m/NAME, v/NAME: AdamW's moments;
                             canonical names
    checkpoint.json          format, step, updates, metric, backend, versions, sizes of the model
    config.yaml, norm_stats.json, tokenizer.model, loader.json   and whatever else the caller gives
"""

import concurrent.futures
import dataclasses
import errno
import importlib.metadata
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from pi05.errors import CheckpointError, ConfigError, ParamsError
from pi05.interop.source import Source, table_build, table_places
from pi05.interop.tensor_file import TensorFiles, write_tensors
from pi05.params import shapes, write
from pi05.recipe import Recipe
from pi05.run_folder import CHECKPOINTS, DESCRIPTION, TEMPORARY, RunFolder, delete, list_steps, sync_folder
from pi05.spec import ModelSpec
from pi05.train_state import TrainState

FORMAT_VERSION = 1
PARAMS, TRAIN_STATE = "params.safetensors", "train_state.safetensors"
RESERVE = 64 << 20  # bytes that are left free on the disk
PACKAGES = ("pi05", "numpy", "jax", "torch")  # whose versions a checkpoint tells


class Checkpointer:
    """Saves a run's checkpoints and removes those that nobody asked to keep. A context manager: leaving it waits for the last save.

    keep_last: newest ones that stay. keep_period: those of every such step stay for good. keep_best: so many with the lowest metric stay.

    Raises:
        ConfigError: keep_last is below 1.
    """

    def __init__(self, run: RunFolder, spec: ModelSpec, *, keep_last: int = 1, keep_period: int | None = None, keep_best: int = 0) -> None:
        if keep_last < 1:
            raise ConfigError(f"keep_last is {keep_last}; at least the newest checkpoint has to stay.")
        self._run, self._spec = run, spec
        self._keep_last, self._keep_period, self._keep_best = keep_last, keep_period, keep_best
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, ascending."""
        return list_steps(self._run.path)

    def latest(self) -> Path | None:
        """The newest checkpoint that is whole, or None."""
        return _newest_whole(self._run.path)

    def check_space(self, recipe: Recipe) -> None:
        """Whether one checkpoint of the run would fit now; for the start of a run, when nothing is lost yet.

        Raises:
            CheckpointError: it would not.
        """
        sizes = {name: 4 * math.prod(shape) for name, shape in shapes(self._spec).items()}
        learned = sum(sizes[name] for name in recipe.trains(self._spec))
        self._check_space(sum(sizes.values()) + learned * (2 if recipe.ema_decay is None else 3), "A checkpoint of this run")

    def save(self, state: TrainState, files: Mapping[str, str | bytes | dict], *, metric: float | None = None, **facts: str) -> None:
        """Starts writing `state` with `files` (name -> content, a dict as JSON) beside it, after the save before; returns before it is written.

        The arrays must not change any more. A step that is saved already is not saved again.
        metric: what keep_best compares; lower is better. facts: further entries of checkpoint.json.

        Raises:
            CheckpointError: the save before failed, or the disk has no room for this one; the checkpoints that are there stay as they are.
        """
        self.wait()
        if _is_whole(self._run.checkpoints / str(state.step)):
            return
        description = {
            "format_version": FORMAT_VERSION,
            "step": state.step,
            "updates": state.updates,
            "ema": state.ema is not None,
            "metric": float(metric) if metric is not None and math.isfinite(metric) else None,
            "model": dataclasses.asdict(self._spec),
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        }
        contents = {_file_name(name): _to_bytes(content) for name, content in files.items()}
        contents[DESCRIPTION] = _to_bytes(facts | description)  # last: a folder without it is no checkpoint
        arrays = (array for part in (state.params, state.m, state.v, state.ema or {}) for array in part.values())
        self._check_space(sum(array.nbytes for array in arrays) + sum(map(len, contents.values())), f"The checkpoint of step {state.step}")
        self._pending = self._writer.submit(self._write, state, contents)

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            CheckpointError: the save failed.
        """
        if self._pending is not None:
            concurrent.futures.wait([self._pending])  # a Ctrl-C in here leaves it pending, and so its error is not lost
            done, self._pending = self._pending, None
            done.result()

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

    def _check_space(self, needed: int, what: str) -> None:
        folder = self._run.checkpoints
        free = shutil.disk_usage(folder).free
        if free < needed + RESERVE:
            raise CheckpointError(
                f"{what} needs {needed / 1e9:.2f} GB in {folder}, which has {free / 1e9:.2f} GB free. Nothing was written and nothing was deleted; "
                f"{_intact(self._run.path)}. Make room and go on with --resume, or choose another checkpoint_dir."
            )

    def _write(self, state: TrainState, contents: dict[str, bytes]) -> None:
        folder = self._run.checkpoints / str(state.step)
        part = folder.with_name(f"{TEMPORARY}{state.step}")
        try:
            part.mkdir()
            _write_state(part, state, self._spec)
            for name, content in contents.items():
                _write_file(part / name, content)
            sync_folder(part)
            if folder.exists():
                delete(folder)  # a damaged one, see save
            part.rename(folder)
            sync_folder(folder.parent)
        except OSError as error:
            why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else str(error)
            raise CheckpointError(
                f"The checkpoint of step {state.step} could not be written to {folder.parent}: {why}; {_intact(self._run.path)}. "
                "Make room or mend the disk, and go on with --resume."
            ) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        try:
            self._remove_old(state.step)
        except OSError as error:
            raise CheckpointError(f"The checkpoint of step {state.step} is written, but an older one could not be removed: {error}.") from error

    def _remove_old(self, written: int) -> None:
        steps = self.steps()
        keep = {written, *steps[-self._keep_last :]}
        if self._keep_period:
            keep |= {step for step in steps if step % self._keep_period == 0}
        if self._keep_best:
            metrics = {step: _read_description(self._run.checkpoints / str(step)).get("metric") for step in steps}
            keep |= set(sorted((step for step in steps if metrics[step] is not None), key=lambda step: metrics[step])[: self._keep_best])
        for step in steps:
            if step not in keep:
                delete(self._run.checkpoints / str(step))


def locate_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`: itself (or the folder of one of its files), or the newest whole one of the run there.

    Raises:
        CheckpointError: there is neither.
    """
    path = Path(path)
    folder = path.parent if path.is_file() else path
    if (folder / DESCRIPTION).is_file():
        return folder
    run = folder.parent if folder.name == CHECKPOINTS else folder
    if newest := _newest_whole(run):
        return newest
    if steps := list_steps(run):
        raise CheckpointError(f"No checkpoint of {run} is whole (steps {', '.join(map(str, steps))}). Copy them again.")
    what = "does not exist" if not path.exists() else f"is neither a checkpoint (it has no {DESCRIPTION}) nor a run with checkpoints"
    raise CheckpointError(f"{path} {what}. Give RUN or RUN/{CHECKPOINTS}/STEP.")


def load_description(path: Path) -> dict[str, Any]:
    """What checkpoint.json says. This and what follows take the folder of a checkpoint, or of a run for its newest one.

    Raises:
        CheckpointError: it is missing, damaged, or of another release.
    """
    folder = locate_checkpoint(path)
    content = _read_description(folder)
    if content["format_version"] != FORMAT_VERSION:
        raise CheckpointError(f"{folder} has the format version {content['format_version']}; this release reads {FORMAT_VERSION}. Use the one that wrote it.")
    return content


def load_state(path: Path, spec: ModelSpec) -> TrainState:
    """The whole state of a run.

    Raises:
        CheckpointError: a file is missing or damaged, or the checkpoint is of another model; names tensors and both shapes.
    """
    folder = locate_checkpoint(path)
    description, file = load_description(folder), _open(folder, TRAIN_STATE)
    served = dict(load_params(folder, spec))
    parts: dict[str, dict[str, np.ndarray]] = {"params": {}, "m": {}, "v": {}}
    for name, shape in file.shapes.items():
        kind, _, inner = name.partition("/")
        if kind not in parts or inner not in served:
            raise CheckpointError(f"{folder / TRAIN_STATE} holds {name}, which the model has not. Use the config.yaml beside it.")
        if shape != served[inner].shape:
            raise CheckpointError(f"{folder / TRAIN_STATE}: {name} has shape {shape}, the model {served[inner].shape}. Use the config.yaml beside it.")
        parts[kind][inner] = file.read(name)
    learned = parts["m"].keys()
    for kind, names in {"v": learned, "params": learned if description["ema"] else set()}.items():
        if odd := sorted(parts[kind].keys() ^ names):
            raise CheckpointError(f"{folder / TRAIN_STATE} has m/ and {kind}/ of different tensors, such as {odd[0]}. Copy it again, or take another step.")
    ema = {name: served[name] for name in learned} if description["ema"] else None
    return TrainState(description["step"], description["updates"], served | parts["params"], parts["m"], parts["v"], ema)


def load_params(path: Path, spec: ModelSpec) -> Iterator[tuple[str, np.ndarray]]:
    """(canonical name, float32 array) of the weights to act with; checked now, read one at a time as they are taken.

    Raises:
        CheckpointError: as load_state.
    """
    folder = locate_checkpoint(path)
    load_description(folder)
    file = _open(folder, PARAMS)
    source = Source("pi05", folder, spec, file.shapes, file.read, table_places(spec, "published"), table_build(spec, "published"))
    try:
        source.audit()
    except ParamsError as error:
        raise CheckpointError(f"{folder} does not hold the model that was asked for: {error} Use the config.yaml beside it.") from error
    return source.tensors()


def read_file(path: Path, name: str) -> bytes:
    """The content of a file of a checkpoint.

    Raises:
        CheckpointError: it is not there or cannot be read.
    """
    file = _existing(locate_checkpoint(path), name)
    try:
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error


def _existing(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{folder} is no whole checkpoint: it has no {name}. Copy the whole folder again, or take another step.")
    return path


def _open(folder: Path, name: str) -> TensorFiles:
    return TensorFiles([_existing(folder, name)])


def _read_description(folder: Path) -> dict[str, Any]:
    """checkpoint.json of any release.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        content = json.loads(read_file(folder, DESCRIPTION))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / DESCRIPTION} is damaged ({error}). Copy the checkpoint again, or take another step.") from error
    if not isinstance(content, dict) or (missing := {"format_version", "step", "updates", "ema", "model"} - content.keys()):
        what = f"it has no {min(missing)}" if isinstance(content, dict) else "it is no table"
        raise CheckpointError(f"{folder / DESCRIPTION} is damaged ({what}). Copy the checkpoint again, or take another step.")
    return content


def _is_whole(folder: Path) -> bool:
    """Whether all that a run needs is there and nothing is cut short; whether a release can read it is another question."""
    if not (folder / DESCRIPTION).is_file():
        return False
    try:
        _read_description(folder)
        _open(folder, PARAMS), _open(folder, TRAIN_STATE)
    except CheckpointError:
        return False
    return True


def _newest_whole(run: Path) -> Path | None:
    folders = (run / CHECKPOINTS / str(step) for step in reversed(list_steps(run)))
    return next((folder for folder in folders if _is_whole(folder)), None)


def _intact(run: Path) -> str:
    newest = _newest_whole(run)
    return f"the checkpoint of step {newest.name} is intact" if newest else "there is no checkpoint yet"


def _write_state(folder: Path, state: TrainState, spec: ModelSpec) -> None:
    metadata = {
        "format": "pt",
        "format_version": str(FORMAT_VERSION),
        "step": str(state.step),
        "weights": "raw" if state.ema is None else "moving average",
        "model": json.dumps(dataclasses.asdict(spec)),
    }
    write_tensors(folder / PARAMS, shapes(spec, "published"), write(state.served_params().items(), spec, "published"), metadata)
    raw = {} if state.ema is None else {name: state.params[name] for name in state.ema}
    rest = {f"{kind}/{name}": array for kind, part in (("params", raw), ("m", state.m), ("v", state.v)) for name, array in part.items()}
    write_tensors(folder / TRAIN_STATE, {name: array.shape for name, array in rest.items()}, rest.items(), {})


def _file_name(name: str) -> str:
    if Path(name).name != name or name in (PARAMS, TRAIN_STATE, DESCRIPTION):
        raise CheckpointError(f"{name!r} cannot be the name of a further file of a checkpoint: it is taken, or no plain name.")
    return name


def _to_bytes(content: str | bytes | dict) -> bytes:
    if isinstance(content, dict):
        content = json.dumps(content, indent=2) + "\n"
    return content.encode() if isinstance(content, str) else content


def _write_file(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
