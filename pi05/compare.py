"""How two arrays are compared: errors on whole tensors, the rule for low precision, the first module that left its band.

Nothing here is elementwise-relative (meaningless near zero), signed, averaged over elements or scaled by the size of an array;
a shape mismatch or a non-finite value is an infinite error, never a skipped element.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from pi05.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison: what was compared, its error, and the limit it must not exceed."""

    name: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return bool(self.error <= self.limit)

    @property
    def margin(self) -> float:
        """Error in units of the limit; above 1 is a failure."""
        return self.error / self.limit if self.limit else (0.0 if self.error == 0 else np.inf)

    def __str__(self) -> str:
        return f"{self.name}: error {self.error:.2e}, limit {self.limit:.2e}"


def max_error(got: np.ndarray, want: np.ndarray) -> float:
    """max |got - want|; infinite for different shapes or where either is not finite."""
    got, want = _comparable(got, want)
    return np.inf if got is None else float(np.abs(got - want).max(initial=0.0))


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """max |got - want| / max |want|: the largest error in units of the tensor's largest element."""
    return _ratio(max_error(got, want), _largest(want))


def relative_l2_error(got: np.ndarray, want: np.ndarray) -> float:
    """||got - want|| / ||want||, Frobenius."""
    first, second = _comparable(got, want)
    return np.inf if first is None else _ratio(float(np.linalg.norm(first - second)), float(np.linalg.norm(second)))


def ulp(dtype: str) -> float:
    """Spacing of numbers just above 1 in `dtype`."""
    return {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}[dtype]


def first_failure(checks: Iterable[Check]) -> Check | None:
    """The first failed check of a sequence in execution order: where to look, when everything behind it fails too."""
    return next((check for check in checks if not check.passed), None)


def execution_order(spec: ModelSpec) -> Iterator[tuple[str, str, int | None]]:
    """Activations in the order in which a forward pass makes them: name, name of the stacked array it is in, and its layer there."""

    def layers(tower: str, layer: int, parts: tuple[str, ...]) -> Iterator[tuple[str, str, int]]:
        return ((f"{tower}.layers.{layer}.{part}", f"{tower}.layers.{part}", layer) for part in parts)

    yield "vision.embedded", "vision.embedded", None
    for layer in range(spec.vision.depth):
        yield from layers("vision", layer, ("attn", "out"))
    for name in ("vision.tokens", "prefix.embedded", "prefix.valid", "prefix.positions"):
        yield name, name, None
    for name in ("time.embedding", "time.cond", "suffix.embedded", "suffix.positions"):
        yield name, name, None
    for layer in range(spec.trunk.depth):
        for tower in ("trunk", "expert"):
            yield from layers(tower, layer, ("q", "k", "v", "attn", "out"))
    for name in ("trunk.final", "expert.final", "velocity"):
        yield name, name, None


def _comparable(got: np.ndarray, want: np.ndarray) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        return None, None
    got, want = got.astype(np.float64), want.astype(np.float64)
    return (got, want) if np.isfinite(got).all() and np.isfinite(want).all() else (None, None)


def _largest(array: np.ndarray) -> float:
    return float(np.abs(np.asarray(array).astype(np.float64)).max(initial=0.0))


def _ratio(error: float, scale: float) -> float:
    return 0.0 if error == 0 else (error / scale if scale else np.inf)
