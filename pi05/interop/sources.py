"""Any checkpoint from anywhere: opened by what it holds, not by its name; and its tensors fitted to the model of a training run."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from pi05.checkpoint import PARAMS
from pi05.errors import CheckpointError, ParamsError
from pi05.initial import initial_params
from pi05.interop import lerobot, openpi_orbax, openpi_torch, own
from pi05.interop.assets import Assets
from pi05.interop.infer import describe
from pi05.interop.ledger import listed
from pi05.interop.locate import locate
from pi05.interop.source import Source, without_lora
from pi05.params import GROUPS, ROWS, Param, count, rows, shape
from pi05.spec import ModelSpec

RANDOM = "random"  # what `weights:` says in order to start from nothing
# How a checkpoint of another action_dim becomes the model's. "pad_data": the model takes the checkpoint's action_dim, and data are padded to it.
# "slice": its first dims are kept. "reinit": the tensors with that axis start anew.
ShapePolicy = Literal["error", "pad_data", "slice", "reinit"]


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of a checkpoint's tensors.

    loaded: tensors read, all that it has. parameters: numbers in the model that came from it. new: canonical names of adapters that it does not
    have and the model asks for. changed: canonical names that a ShapePolicy sliced or reinitialised. notes: lines for a person.
    """

    source: str
    kind: str
    loaded: int
    total: int
    parameters: int
    new: tuple[str, ...] = ()
    policy: ShapePolicy = "error"
    changed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.source} ({self.kind}): loaded {self.loaded}/{self.total} tensors, {self.parameters:,} parameters; new: [{_joined(self.new)}]"]
        lines += [f"  {self.policy}: [{', '.join(self.changed)}]"] if self.changed else []
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights of a model, none of them read yet.

    spec: the model; not the one that was asked for if the policy is "pad_data". tensors: (canonical name, float32 array) in the table's order, once.
    assets: what the checkpoint says about acting.
    """

    spec: ModelSpec
    tensors: Iterator[tuple[str, np.ndarray]]
    report: Report
    assets: Assets = Assets()


def open_source(source: str | Path, *, like: ModelSpec | None = None, lora_alpha: Mapping[str, float] | None = None, asset_id: str | None = None) -> Source:
    """Opens a checkpoint of openpi (JAX or PyTorch), of LeRobot or of ours; a folder, a file in it, owner/name of the Hub, or a URL.

    like: see infer.infer_spec. lora_alpha, asset_id: see openpi_orbax.open_orbax.

    Raises:
        CheckpointError: there is no checkpoint; says what was looked for.
    """
    folder = locate(source)
    if (ours := own.find_own(folder)) is not None:
        return own.open_own(ours)
    if openpi_orbax.find_params(folder) is not None:
        return openpi_orbax.open_orbax(folder, like=like, lora_alpha=lora_alpha, asset_id=asset_id)
    if openpi_torch.find_files(folder):
        return lerobot.open_lerobot(folder, like=like) if lerobot.is_lerobot(folder) else openpi_torch.open_torch(folder, like=like, asset_id=asset_id)
    inside = sorted(path.name for path in folder.iterdir())
    looked_for = f"{PARAMS} (pi05), {openpi_torch.FILE} (openpi's PyTorch, LeRobot), params/{openpi_orbax.METADATA} or {openpi_orbax.METADATA} (openpi's JAX)"
    steps = [name for name in inside if name.isdigit()]
    hint = f"Its folders {', '.join(steps[-3:])} look like steps: name one of them." if steps else "Name the folder that holds one of these."
    raise CheckpointError(f"{folder} is no checkpoint: there is no {looked_for}, but {listed(inside)}. {hint}")


def load_weights(
    source: str | Path, spec: ModelSpec, *, seed: int, on_shape_mismatch: ShapePolicy = "error", lora_alpha: Mapping[str, float] | None = None
) -> Weights:
    """The weights that a run of `spec` starts from; everything is checked here, and the numbers are read as they are taken.

    source: what open_source takes, or "random". seed: of what is drawn: everything for "random", else only adapters that the checkpoint lacks.

    Raises:
        CheckpointError: there is no such checkpoint, or it is of another model; says both sizes and what can be done.
        ParamsError: the checkpoint's tensors do not come out even.
    """
    if on_shape_mismatch not in get_args(ShapePolicy):
        raise CheckpointError(f"on_shape_mismatch is {on_shape_mismatch!r}; it is one of {', '.join(get_args(ShapePolicy))}.")
    if str(source) == RANDOM:
        names = tuple(row.name for row in rows(spec))
        report = Report(RANDOM, "drawn", 0, 0, 0, notes=(f"{len(names)} tensors, {count(spec):,} parameters, drawn with seed {seed}",))
        return Weights(spec, initial_params(spec, seed), report)
    opened = open_source(source, like=spec, lora_alpha=lora_alpha)
    loaded = opened.audit()
    spec, changed = fit(opened, spec, on_shape_mismatch)
    new = _new_adapters(opened, spec)
    notes = list(opened.notes)
    if opened.spec.action_horizon != spec.action_horizon:
        notes.append(f"action_horizon {opened.spec.action_horizon} there, {spec.action_horizon} here: no tensor depends on it")
    kept = sum(math.prod(shape(row, spec)) for row in rows(spec) if row.name not in new and not (row.name in changed and on_shape_mismatch == "reinit"))
    report = Report(str(source), opened.kind, loaded, loaded, kept, new, on_shape_mismatch if changed else "error", changed, tuple(notes))
    return Weights(spec, fitted(opened, spec, seed, changed, on_shape_mismatch), report, opened.assets)


def fit(opened: Source, spec: ModelSpec, policy: ShapePolicy) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model that results, and the canonical names of the tensors that `policy` changes.

    Raises:
        CheckpointError: the two are different models, or of another action_dim and the policy is "error".
    """
    ours, theirs = without_lora(spec), without_lora(opened.spec)
    different = [row for row in rows(ours) if shape(row, ours) != shape(row, theirs)]
    if not different:
        return spec, ()
    if foreign := [row for row in different if "a" not in row.axes.split()] or [row for row in different if _other_axes(row, ours, theirs)]:
        lines = [f"  {row.name}: {shape(row, theirs)} in the checkpoint, {shape(row, ours)} in the model" for row in foreign[:8]]
        raise CheckpointError(
            "\n".join([f"{opened.where} is another model, {len(foreign)} tensors have other sizes:", *lines, f"The checkpoint is {describe(opened.spec)}."])
        )
    have, want = theirs.action_dim, ours.action_dim
    names = tuple(row.name for row in different)
    if policy == "pad_data":
        return spec.replace(action_dim=have), ()
    if policy == "error" or (policy == "slice" and want > have):
        shapes = "; ".join(f"{row.name} is {shape(row, theirs)} there and {shape(row, ours)} here" for row in different)
        cannot = "slice cannot make more dims than there are. " if policy == "slice" else ""
        raise CheckpointError(
            f"{opened.where} has action_dim {have}, the model {want}: {shapes}. {cannot}Choose: pad_data, which is action_dim {have} for the model "
            f"(actions are padded with zeros to it); or on_shape_mismatch slice (keep the first {want} dims) or reinit (these tensors start anew)."
        )
    return spec, names


def fitted(opened: Source, spec: ModelSpec, seed: int, changed: Sequence[str], policy: ShapePolicy) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (canonical name, float32 array) of `spec` in the table's order, from the checkpoint, sliced or drawn as `fit` decided."""
    stream = opened.tensors()
    have = {row.name for row in rows(opened.spec)}
    for row in rows(spec):
        if row.name not in have:
            yield from initial_params(spec, seed, {row.name})
            continue
        name, array = next(stream)
        if name != row.name:
            raise ParamsError(f"The checkpoint gives {name} where {row.name} is due.")
        if name in changed and policy == "reinit":
            yield from initial_params(spec, seed, {name})
        else:
            yield name, array[tuple(slice(size) for size in shape(row, spec))] if name in changed else array
    for name, _ in stream:
        raise ParamsError(f"The checkpoint has {name}, which the model does not have.")


def _new_adapters(opened: Source, spec: ModelSpec) -> tuple[str, ...]:
    """Names of the adapters that the model has and the checkpoint lacks.

    Raises:
        CheckpointError: the checkpoint has adapters and the model has none, or others.
    """
    for group in GROUPS:
        theirs, ours = opened.spec.lora(group), spec.lora(group)
        if theirs is not None and theirs != ours:
            told = "none" if ours is None else f"rank {ours.rank}, alpha {ours.alpha:g}"
            raise CheckpointError(
                f"{opened.where} has adapters in {group} of rank {theirs.rank}, alpha {theirs.alpha:g}; the model has {told}. "
                f"Set model.lora.{group} to {{rank: {theirs.rank}, alpha: {theirs.alpha:g}}}, or merge them first: python -m pi05.convert ... --merge-lora."
            )
    return tuple(row.name for row in rows(spec) if row.adapter and opened.spec.lora(row.group) is None)


def _other_axes(row: Param, ours: ModelSpec, theirs: ModelSpec) -> bool:
    """Whether a tensor with an action axis differs along another one too."""
    return any(a != b and axis != "a" for axis, a, b in zip(row.axes.split(), shape(row, ours), shape(row, theirs), strict=True))


def _joined(names: Sequence[str]) -> str:
    """The names, those of one group's adapters as one entry."""
    stems = dict.fromkeys(_stem(name) if ROWS[name].adapter else name for name in names)
    return ", ".join(f"{stem} ({sum(1 for name in names if _stem(name) == stem)})" if "*" in stem else stem for stem in stems)


def _stem(name: str) -> str:
    return f"{name.split('.')[0]}.*.{name.rsplit('.', 1)[-1]}"
