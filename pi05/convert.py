"""Converts a checkpoint from any of the published forms to any other.

    python -m pi05.convert SRC DST --to jax|torch|lerobot|pi05

SRC is a folder, owner/name of the Hub, or a URL such as gs://openpi-assets/checkpoints/pi05_base. The model is read off the tensors.
The exit code is 2 if a tensor, or something a robot needs, would be lost.
"""

import dataclasses
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from rich.console import Console

from pi05.data.norm_stats import NormStats
from pi05.errors import CheckpointError, Pi05Error
from pi05.interop import lerobot, openpi_orbax, openpi_torch, own
from pi05.interop.assets import Assets, read_norm_stats
from pi05.interop.infer import describe
from pi05.interop.source import Source, has_lora, merge_lora, without_lora
from pi05.interop.sources import ShapePolicy, fit, fitted, open_source
from pi05.params import rows, shape
from pi05.spec import ModelSpec

Target = Literal["jax", "torch", "lerobot", "pi05"]
Writer = Callable[[Path, Iterator[tuple[str, np.ndarray]], ModelSpec, Assets, tuple[str, ...]], None]

WRITERS: dict[Target, Writer] = {
    "jax": openpi_orbax.write_orbax,
    "torch": openpi_torch.write_torch,
    "lerobot": lerobot.write_lerobot,
    "pi05": own.write_own,
}
NEEDS_ROBOT: tuple[Target, ...] = ("lerobot", "pi05")


@dataclasses.dataclass(frozen=True)
class Options:
    """What a conversion may be told.

    merge_lora: adapters go into the weights they belong to. action_dim: another size of the action vector; on_shape_mismatch says how to get there.
    action_horizon: steps of a chunk, which no tensor tells. lora_alpha: NAME=ALPHA for openpi's adapters, whose tree does not hold it.
    config: a training config with the model's sizes, for sizes of no preset. seed: of what "reinit" draws.
    norm_stats, asset_id, tokenizer, robot: what the source does not say or should not decide. weights_only: nothing a robot needs, only weights.
    """

    merge_lora: bool = False
    action_dim: int | None = None
    on_shape_mismatch: ShapePolicy = "error"
    action_horizon: int | None = None
    lora_alpha: tuple[str, ...] = ()
    config: str | None = None
    seed: int = 0
    norm_stats: Path | None = None
    asset_id: str | None = None
    tokenizer: str | None = None
    robot: str | None = None
    weights_only: bool = False


def convert(source: str, target: Path, to: Target, options: Options = Options(), *, say: Callable[[str], None] = lambda line: None) -> ModelSpec:
    """Converts a checkpoint and returns its model; `say` gets one line for each thing a person should know. The folder `target` appears when it is whole.

    Raises:
        CheckpointError: the source is none, the target exists, or something a robot needs is missing.
        ParamsError: the tensors do not come out even.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists already. Name another folder, or remove it.")
    opened = open_source(source, like=_like(options.config), lora_alpha=_alphas(options.lora_alpha), asset_id=options.asset_id)
    say(f"{opened.where}: {opened.kind}, {describe(opened.spec)}")
    for note in opened.notes:
        say(note)
    total = opened.audit()
    assets = _assets(opened, to, options)
    spec, changed = opened.spec, ()
    if options.action_dim is not None and options.action_dim != spec.action_dim:
        spec, changed = fit(opened, spec.replace(action_dim=options.action_dim), options.on_shape_mismatch)
        say(f"action_dim {opened.spec.action_dim} to {spec.action_dim} by {options.on_shape_mismatch}: {', '.join(changed) or 'no tensor changes'}")
    spec = spec if options.action_horizon is None else spec.replace(action_horizon=options.action_horizon)
    tensors = fitted(opened, spec, options.seed, changed, options.on_shape_mismatch)
    if options.merge_lora and has_lora(spec):
        tensors, spec = merge_lora(tensors, spec), without_lora(spec)
        say("adapters merged into their weights")
    line = f"{source} ({opened.kind}) to {to}" + (f", {options.on_shape_mismatch} of {', '.join(changed)}" if changed else "")
    _write(target, WRITERS[to], tensors, spec, assets, (*opened.history, line + (", adapters merged" if options.merge_lora else "")))
    numbers = sum(math.prod(shape(row, spec)) for row in rows(spec))
    say(f"loaded {total}/{total} tensors, wrote {numbers:,} parameters to {target}")
    return spec


def _write(target: Path, writer: Writer, tensors: Iterator, spec: ModelSpec, assets: Assets, history: tuple[str, ...]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        writer(part, tensors, spec, assets, history)
        part.chmod(0o755)  # mkdtemp lets nobody else in
        part.replace(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _assets(opened: Source, to: Target, options: Options) -> Assets:
    """What travels along, with everything that `to` has a place for.

    Raises:
        CheckpointError: something is missing, or the robot does not fit.
    """
    stats: NormStats | None = None
    if options.norm_stats is not None and (stats := read_norm_stats(options.norm_stats)) is None:
        raise CheckpointError(f"There is no statistics file {options.norm_stats}.")
    assets = opened.assets.replace(norm_stats=stats, tokenizer=options.tokenizer, robot=options.robot, asset_id=options.asset_id)
    if options.weights_only:
        return Assets()
    assets.require(opened.where, robot=to in NEEDS_ROBOT)
    if assets.robot is not None:
        assets.load_robot()
    return assets


def _like(config: str | None) -> ModelSpec | None:
    if config is None:
        return None
    from pi05.config import get_config

    return get_config(config).spec()


def _alphas(pairs: tuple[str, ...]) -> dict[str, float]:
    try:
        return {group: float(alpha) for group, alpha in (pair.split("=") for pair in pairs)}
    except ValueError as error:
        raise CheckpointError(f"lora_alpha is {' '.join(pairs)!r}; write it like trunk=16 expert=32.") from error


def main(
    source: Annotated[str, tyro.conf.Positional], target: Annotated[Path, tyro.conf.Positional], to: Target, options: Annotated[Options, tyro.conf.arg(name="")]
) -> int:
    """Converts a checkpoint; returns the exit code."""
    console, errors = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        convert(source, target, to, options, say=lambda line: console.print(line, markup=False))
    except Pi05Error as error:
        errors.print(f"{type(error).__name__}: {error}", markup=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
