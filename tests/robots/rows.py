"""Made-up rows and client observations of any robot, within its limits."""

from typing import Any

import numpy as np

from pi05.data.transforms import matrix_to_rotation6d
from pi05.robots import Dim, Robot

HORIZON = 5


def make_row(robot: Robot, seed: int, *, horizon: int = HORIZON, edge: tuple[int, int] = (12, 20)) -> dict[str, Any]:
    """A dataset row: what data/dataset.py promises."""
    rng = np.random.default_rng(seed)
    numbers = {robot.state_column: make_numbers(robot.state, rng), robot.action_column: make_numbers(robot.actions, rng, horizon)}
    images = {column: rng.integers(0, 256, (*edge, 3), np.uint8) for column in robot.cameras.values()}
    ids = {"action_is_pad": np.arange(horizon) >= horizon - 1, "index": 1000 + seed, "episode_index": 3, "dataset_index": 0}
    return images | numbers | ids | {robot.prompt_column: "put the cup on the plate"}


def make_numbers(dims: tuple[Dim, ...], rng: np.random.Generator, *lead: int) -> np.ndarray:
    """float32[*lead, D], uniform within the limits, rotations orthonormal."""
    out = rng.uniform([dim.low for dim in dims], [dim.high for dim in dims], (*lead, len(dims)))
    starts = [i for i, dim in enumerate(dims) if dim.kind == "rotation6d"][::6]
    for start in starts:
        out[..., start : start + 6] = matrix_to_rotation6d(random_rotation(rng, *lead))
    return out.astype(np.float32)


def random_rotation(rng: np.random.Generator, *lead: int) -> np.ndarray:
    """float64[*lead, 3, 3], proper rotations."""
    matrix, _ = np.linalg.qr(rng.standard_normal((*lead, 3, 3)))
    return matrix * np.linalg.det(matrix)[..., None, None]


def frozen(tree: dict[str, Any]) -> dict[str, Any]:
    """A copy whose arrays refuse to be written, as a client's decoded message or a cached sample."""
    out = {key: frozen(value) if isinstance(value, dict) else np.copy(value) if isinstance(value, np.ndarray) else value for key, value in tree.items()}
    for value in out.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    return out
