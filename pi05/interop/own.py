"""Our own checkpoints: params.safetensors in the published names, adapters included, and what the tensors cannot say beside it."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pi05.checkpoint import DESCRIPTION, PARAMS, load_description, locate_checkpoint, read_file
from pi05.checkpoint import FORMAT_VERSION as CHECKPOINT_VERSION
from pi05.config import parse_yaml
from pi05.errors import CheckpointError
from pi05.interop.assets import NORM_STATS, SIDECAR, Assets, Sidecar, read_norm_stats, spec_from_dict
from pi05.interop.source import Source, table_build, table_places
from pi05.interop.tensor_file import TensorFiles, write_tensors
from pi05.params import shapes, write
from pi05.run_folder import list_steps
from pi05.spec import ModelSpec

CONFIG, TOKENIZER = "config.yaml", "tokenizer.model"


def find_own(folder: Path) -> Path | None:
    """A checkpoint of ours: `folder`, or the newest of the run there; None if it is neither."""
    if (folder / PARAMS).is_file():
        return folder
    return locate_checkpoint(folder) if list_steps(folder) else None


def open_own(folder: Path) -> Source:
    """Opens a checkpoint of a training run, or what `write_own` wrote.

    Raises:
        CheckpointError: nothing beside the tensors says which model they are.
    """
    files = TensorFiles([folder / PARAMS])
    sidecar = Sidecar.load(folder) or _from_run(folder)
    return Source(
        kind="pi05",
        where=folder,
        spec=sidecar.spec,
        sizes=files.shapes,
        read=files.read,
        places=table_places(sidecar.spec, "published"),
        build=table_build(sidecar.spec, "published"),
        assets=sidecar.assets,
        history=sidecar.history,
        notes=tuple(f"weights: {files.metadata[key]}" for key in ("weights",) if key in files.metadata),
    )


def write_own(folder: Path, tensors: Iterator[tuple[str, np.ndarray]], spec: ModelSpec, assets: Assets, history: tuple[str, ...]) -> None:
    """Writes a checkpoint of ours at step 0, without a training state, with the adapters as they are."""
    write_tensors(folder / PARAMS, shapes(spec, "published"), write(tensors, spec, "published"), {"format": "pt"})
    facts = {"format_version": CHECKPOINT_VERSION, "step": 0, "updates": 0, "ema": False, "metric": None, "model": dataclasses.asdict(spec)}
    (folder / DESCRIPTION).write_text(json.dumps(facts, indent=2) + "\n")
    Sidecar(spec, assets, history).save(folder)


def _from_run(folder: Path) -> Sidecar:
    """What a training run's own files say."""
    if not (folder / DESCRIPTION).is_file():
        raise CheckpointError(f"{folder} has {PARAMS} but neither {SIDECAR} nor {DESCRIPTION}, so nothing says which model that is. Copy the whole folder.")
    spec = spec_from_dict(load_description(folder)["model"])
    if not (folder / CONFIG).is_file():
        return Sidecar(spec, Assets(read_norm_stats(folder / NORM_STATS)))
    data = parse_yaml(read_file(folder, CONFIG).decode(), where=str(folder / CONFIG)).data
    local = data.tokenizer.startswith((".", "/", "~")) and (folder / TOKENIZER).is_file()  # the copy travels, the path does not
    assets = Assets(
        read_norm_stats(folder / NORM_STATS),
        normalization=data.normalization,
        floor=data.floor,
        tokenizer=str((folder / TOKENIZER).resolve()) if local else data.tokenizer,
        discrete_state=data.discrete_state,
        robot=data.robot,
        cameras=dict(data.cameras),
    )
    return Sidecar(spec, assets)
