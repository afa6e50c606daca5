"""Our own checkpoints: params.safetensors in the published names, adapters included, and what the tensors cannot say beside it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pi05.errors import CheckpointError
from pi05.interop.assets import NORM_STATS, Assets, Sidecar, read_norm_stats
from pi05.interop.source import Source, table_build, table_places
from pi05.interop.tensor_file import TensorFiles, write_tensors
from pi05.params import shapes, write
from pi05.spec import ModelSpec

FILE = "params.safetensors"
CONFIG = "config.yaml"


def open_own(folder: Path) -> Source:
    """Opens a checkpoint of a training run, or what `write_own` wrote.

    Raises:
        CheckpointError: nothing beside the tensors says which model they are.
    """
    files = TensorFiles([folder / FILE])
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
    )


def write_own(folder: Path, tensors: Iterator[tuple[str, np.ndarray]], spec: ModelSpec, assets: Assets, history: tuple[str, ...]) -> None:
    """Writes a checkpoint of ours, with the adapters as they are."""
    write_tensors(folder / FILE, shapes(spec, "published"), write(tensors, spec, "published"), {"format": "pt"})
    Sidecar(spec, assets, history).save(folder)


def _from_run(folder: Path) -> Sidecar:
    """What a training run's own files say."""
    from pi05.config import get_config

    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} has {FILE} but neither pi05.json nor {CONFIG}, so nothing says which model that is. Copy the whole folder.")
    config = get_config(str(path))
    data = config.data
    assets = Assets(
        read_norm_stats(folder / NORM_STATS),
        normalization=data.normalization,
        floor=data.floor,
        tokenizer=data.tokenizer,
        discrete_state=data.discrete_state,
        robot=data.robot,
        cameras=dict(data.cameras),
    )
    return Sidecar(config.spec(), assets)
