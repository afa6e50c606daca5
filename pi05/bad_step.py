"""A training step whose loss or gradient was not finite, as a folder: everything that scripts/replay_step.py needs to compute it again.

Files: bad_step.json (what happened; NaN and Infinity are written so, as Python's json does), batch.safetensors (batch and draws, NumPy),
config.yaml (the run's config).
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from pi05.batch import AugmentDraws, Batch, Draws, Observation
from pi05.errors import DataError

FORMAT_VERSION = 1
RECORD, ARRAYS, CONFIG = "bad_step.json", "batch.safetensors", "config.yaml"


@dataclasses.dataclass(frozen=True)
class BadStep:
    """What load_bad_step reads.

    step: number of the step, counted from 1. lr: its learning rate. loss, grad_norm: as the run had them; not finite, at least one.
    config: path of the run's config. checkpoint: weights close to those of the step, as the run knew them; None: it had none.
    """

    step: int
    lr: float
    loss: float
    grad_norm: float
    batch: Batch
    draws: Draws
    config: Path
    checkpoint: Path | None

    def sample(self, index: int) -> tuple[Batch, Draws]:
        """Batch and draws of one sample alone, number `index` of the batch."""
        return _take(self.batch, index), _take(self.draws, index)


def save_bad_step(
    folder: Path,
    step: int,
    batch: Batch,
    draws: Draws,
    lr: float,
    config_yaml: str,
    *,
    loss: float = float("nan"),
    grad_norm: float = float("nan"),
    checkpoint: Path | None = None,
) -> Path:
    """Writes the step (see BadStep) as `folder`, which appears whole or not at all; one that exists is replaced. Returns it.

    Raises:
        OSError: it cannot be written.
    """
    arrays = dict(_flatten(batch, "batch")) | dict(_flatten(draws, "draws"))
    record = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "lr": lr,
        "loss": loss,
        "grad_norm": grad_norm,
        "sample_ids": batch.sample_ids.tolist(),
        "checkpoint": None if checkpoint is None else str(checkpoint.absolute()),
    }
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        safetensors.numpy.save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary / ARRAYS)
        (temporary / CONFIG).write_text(config_yaml)
        (temporary / RECORD).write_text(json.dumps(record, indent=1) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def load_bad_step(folder: Path) -> BadStep:
    """Reads what save_bad_step wrote.

    Raises:
        DataError: `folder` is not, or not wholly, such a folder.
    """
    if missing := [name for name in (RECORD, ARRAYS, CONFIG) if not (folder / name).is_file()]:
        raise DataError(f"{folder} has no {missing[0]}: it is not a bad step that a run has saved (those are RUN/bad_steps/step_N).")
    try:
        record = json.loads((folder / RECORD).read_text())
        if record["format_version"] != FORMAT_VERSION:
            raise DataError(f"{folder / RECORD} has format version {record['format_version']}; this pi05 reads {FORMAT_VERSION}. Use the one that wrote it.")
        arrays = safetensors.numpy.load_file(folder / ARRAYS)
        augment = _part(arrays, "draws.augment")
        return BadStep(
            **{name: record[name] for name in ("step", "lr", "loss", "grad_norm")},
            batch=Batch(observation=Observation(**_part(arrays, "batch.observation")), **_part(arrays, "batch")),
            draws=Draws(**_part(arrays, "draws"), augment=AugmentDraws(**augment) if augment else None),
            config=folder / CONFIG,
            checkpoint=None if record["checkpoint"] is None else Path(record["checkpoint"]),
        )
    except (KeyError, TypeError, json.JSONDecodeError, safetensors.SafetensorError) as error:
        raise DataError(f"{folder} is damaged ({type(error).__name__}: {error}); it cannot be replayed.") from error


def _flatten(value: Any, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """(dotted name, array) of every array in nested dataclasses; None is left out."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _flatten(getattr(value, field.name), f"{name}.{field.name}")
    elif value is not None:
        yield name, value


def _take(value: Any, index: int) -> Any:
    """Sample `index` of every array in nested dataclasses, as a batch of one."""
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **{field.name: _take(getattr(value, field.name), index) for field in dataclasses.fields(value)})
    return None if value is None else value[index : index + 1]


def _part(arrays: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """The arrays directly below the dotted `name`, by their last part."""
    return {key.rpartition(".")[2]: array for key, array in arrays.items() if key.rpartition(".")[0] == name}
