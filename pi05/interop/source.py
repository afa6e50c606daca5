"""An opened checkpoint: what model it is, and its tensors in the canonical form, one at a time."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from einops import rearrange

from pi05.errors import ParamsError
from pi05.interop.assets import Assets
from pi05.interop.ledger import Ledger
from pi05.params import ROWS, TABLE, Layout, Param, read, rows, shapes
from pi05.spec import ModelSpec

Kind = Literal["openpi-jax", "openpi-torch", "lerobot", "pi05"]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint opened for reading; nothing of its weights has been read yet.

    spec: the model, with the adapters that are there. sizes: shape of every tensor in the file, under its name in the layout.
    places: the tensors that a row is read from, and their shapes. build: the canonical array out of them.
    read: one tensor, any floating dtype. dropped: tensors that no Pi0.5 uses, with the reason. notes: lines for a person.
    """

    kind: Kind
    where: Path
    spec: ModelSpec
    sizes: Mapping[str, Shape]
    read: Callable[[str], np.ndarray]
    places: Callable[[Param], dict[str, Shape]]
    build: Callable[[Param, Mapping[str, np.ndarray]], np.ndarray]
    packed: Mapping[str, int] = dataclasses.field(default_factory=dict)
    dropped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    assets: Assets = Assets()
    history: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def audit(self) -> int:
        """Goes through the ledger with names and shapes only, before a number is read; returns the number of tensors that will be.

        Raises:
            ParamsError: tensors that no parameter reads, parameters without a tensor, or tensors of a wrong shape; lists them.
        """
        ledger, wrong = self._ledger(), []
        for row in rows(self.spec):
            places = self.places(row)
            there = {name: shape for name, shape in places.items() if name in self.sizes}
            wrong += [f"{name} has shape {self.sizes[name]} instead of {shape}" for name, shape in there.items() if tuple(self.sizes[name]) != tuple(shape)]
            for name in there:
                ledger.consume(name, row.name)
                ledger.fill(_target(row, name))
        ledger.close()
        if wrong:
            raise ParamsError(f"{len(wrong)} tensors of {self.where} have the wrong shape: {'; '.join(wrong[:5])}.")
        return len(self.sizes) - len(self.dropped)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (canonical name, float32 array) in the table's order; holds what one row is read from. The ledger is closed behind the last."""
        self.audit()
        ledger, held = self._ledger(), {}
        for row in rows(self.spec):
            held = {name: held[name] if name in held else self.read(name) for name in self.places(row)}
            for name in held:
                ledger.consume(name, row.name)
                ledger.fill(_target(row, name))
            array = np.asarray(self.build(row, held), np.float32)
            held = {name: tensor for name, tensor in held.items() if name in self.packed}
            yield row.name, array
        ledger.close()

    def _ledger(self) -> Ledger:
        wanted = [_target(row, name) for row in rows(self.spec) for name in self.places(row)]
        ledger = Ledger({name: self.packed.get(name, 1) for name in self.sizes}, wanted)
        for name, reason in self.dropped.items():
            ledger.drop(name, reason)
        return ledger


def table_places(spec: ModelSpec, layout: Layout) -> Callable[[Param], dict[str, Shape]]:
    """Source.places of a layout that the table knows."""
    return lambda row: shapes(spec, layout, {row.name})


def table_build(spec: ModelSpec, layout: Layout) -> Callable[[Param, Mapping[str, np.ndarray]], np.ndarray]:
    """Source.build of a layout that the table knows."""
    return lambda row, tensors: next(read(tensors, spec, layout, {row.name}))[1]


def packed_counts(layout: Layout) -> dict[str, int]:
    """How many rows share each packed tensor of a layout."""
    names = [row.place(layout)[0] for row in TABLE]
    return {name: names.count(name) for name in names if names.count(name) > 1}


def without_lora(spec: ModelSpec) -> ModelSpec:
    """The spec without adapters."""
    return spec.replace(vision__lora=None, trunk__lora=None, expert__lora=None)


def has_lora(spec: ModelSpec) -> bool:
    """Whether any group has adapters."""
    return spec != without_lora(spec)


def merge_lora(tensors: Iterator[tuple[str, np.ndarray]], spec: ModelSpec) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of the model without adapters, W + (alpha / rank) A B in float64, rounded once.

    The stream has each weight right before its adapters, as in the table's order.
    """
    waiting: dict[str, np.ndarray] = {}
    stem = ""
    for name, array in tensors:
        row = ROWS[name]
        if not row.adapter:
            if row.lora and spec.lora(row.group) is not None:
                stem, waiting = name.removesuffix("weight"), {name: array}
            else:
                yield name, array
            continue
        waiting[name] = array
        if len(waiting) == 3:
            weight = stem + "weight"
            yield weight, _merged(ROWS[weight], waiting[weight], waiting[stem + "lora_a"], waiting[stem + "lora_b"], spec.lora(row.group).scale)
            waiting = {}


def _merged(row: Param, weight: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    out = np.array(weight, order="C")
    matrices = rearrange(out, f"{row.axes} -> {row.jax}")  # a view, as the joined axes lie side by side
    a, b = a.reshape(len(a), -1, a.shape[-1]), b.reshape(len(b), b.shape[1], -1)
    for layer in range(len(matrices)):
        matrices[layer] = matrices[layer].astype(np.float64) + scale * (a[layer].astype(np.float64) @ b[layer].astype(np.float64))
    return out


def _target(row: Param, name: str) -> str:
    return f"{row.name} (from {name})"
