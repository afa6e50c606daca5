"""Initial weights of a model, from the distributions in the parameter table."""

import math
from collections.abc import Container, Iterator

import numpy as np

from pi05.params import Param, axis_sizes, philox, rows, shape
from pi05.spec import ModelSpec


def initial_params(spec: ModelSpec, seed: int, names: Container[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (canonical name, float32 array) of a freshly initialised model, tensor by tensor; with `names`, of these only.

    The distributions are openpi's. Each layer of each tensor has its own Philox key from (seed, name, layer), so the numbers
    depend neither on the order of tensors nor on the backend. At the start the image projection and every adaRMS modulation are zero.
    """
    for row in rows(spec, names):
        if row.stacked:
            whole = np.empty(shape(row, spec), np.float32)
            for layer in range(whole.shape[0]):
                whole[layer] = _draw(row, spec, philox(seed, row.name, layer), whole.shape[1:])
            yield row.name, whole
        else:
            yield row.name, _draw(row, spec, philox(seed, row.name, 0), shape(row, spec))


def _draw(row: Param, spec: ModelSpec, rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    sizes, init = axis_sizes(spec, row.group), row.init

    def product(letters: str) -> int:
        return math.prod(sizes[letter] for letter in letters.split())

    if init.kind == "zeros":
        return np.zeros(size, np.float32)
    if init.kind == "ones":
        return np.ones(size, np.float32)
    if init.kind == "xavier_uniform":
        limit = math.sqrt(6.0 / (product(init.fan_in) + product(init.fan_out)))
        return (rng.random(size, dtype=np.float32) * 2 - 1) * np.float32(limit)
    if init.kind == "lecun_normal":
        # A normal truncated at two standard deviations; 0.87962566... is the standard deviation that truncation leaves.
        return _truncated_normal(rng, size) * np.float32(math.sqrt(1.0 / product(init.fan_in)) / 0.87962566103423978)
    std = 1.0 / math.sqrt(sizes[init.std]) if isinstance(init.std, str) else init.std
    return rng.standard_normal(size, dtype=np.float32) * np.float32(std)


def _truncated_normal(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    values = rng.standard_normal(size, dtype=np.float32)
    while (outside := np.flatnonzero(np.abs(values) > 2)).size:
        values.reshape(-1)[outside] = rng.standard_normal(outside.size, dtype=np.float32)
    return values
