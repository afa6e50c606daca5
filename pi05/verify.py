"""Whether two checkpoints, or two backends, act alike: the same observation and noise through both, compared step by step and layer by layer.

    python -m pi05.verify A B [--backends jax torch]

A and B are what pi05.convert reads, and may be one and the same. The exit code is 0 if they agree, 1 if not, 2 if they cannot be compared.
"""

import dataclasses
import importlib
import sys
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from pi05.backend import BackendName
from pi05.batch import Batch, Draws, make_draws, synthetic_batch
from pi05.compare import Check, execution_order, first_failure, max_error, relative_error
from pi05.errors import CheckpointError, Pi05Error
from pi05.interop.source import Source, without_lora
from pi05.interop.sources import open_source
from pi05.params import shapes
from pi05.spec import Compute, ModelSpec

TOLERANCE = 1e-4  # of a tensor's largest element; float32 leaves about 1e-5 over the published depth
NUM_STEPS = 10
TOKENS = 32  # of the prompts, or fewer where the model's limit is below


@dataclasses.dataclass(frozen=True)
class Trace:
    """What one side computes. steps: x after each denoise step, float32[S, B, A, M]. layers: named intermediates at time 1, in execution order."""

    steps: np.ndarray
    layers: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """steps: largest absolute difference after each denoise step. checks: of the intermediates, in execution order, and of the actions at last."""

    steps: tuple[float, ...]
    checks: tuple[Check, ...]

    @property
    def first_difference(self) -> Check | None:
        """The first intermediate that is not alike; None if the two agree."""
        return first_failure(self.checks)


def verify(
    a: str, b: str, backends: tuple[BackendName, BackendName] = ("jax", "torch"), *, like: ModelSpec | None = None, seed: int = 0, tolerance: float = TOLERANCE
) -> Comparison:
    """Compares two checkpoints, one after the other in memory, in float32.

    like: the model's sizes, where a checkpoint's tensors do not tell them; else the first one's serve for the second.

    Raises:
        CheckpointError: there is no such checkpoint, or the two have different sizes.
    """
    first = open_source(a, like=like)
    second = open_source(b, like=like or without_lora(first.spec))
    _check_same_sizes(first, second)
    spec = first.spec
    batch = synthetic_batch(spec, 2, seed=seed, token_len=min(TOKENS, spec.max_token_len), padded_actions=False)
    draws = make_draws(spec, seed, 0, np.arange(2))
    sizes = {"action_horizon": spec.action_horizon, "max_token_len": spec.max_token_len, "cameras": spec.cameras}
    traces = (run(source, source.spec.replace(**sizes), backend, batch, draws) for source, backend in zip((first, second), backends, strict=True))
    one, two = traces
    checks = [Check(name, relative_error(two.layers[name], array), tolerance) for name, array in one.layers.items()]
    checks.append(Check("actions", relative_error(two.steps[-1], one.steps[-1]), tolerance))
    return Comparison(tuple(max_error(y, x) for x, y in zip(one.steps, two.steps, strict=True)), tuple(checks))


def run(source: Source, spec: ModelSpec, backend: BackendName, batch: Batch, draws: Draws) -> Trace:
    """The denoise steps from `draws.noise`, and every intermediate of the first velocity, with the weights of `source`."""
    model_file, sampling = (importlib.import_module(f"pi05.{backend}_backend.{name}") for name in ("model", "sampling"))
    model = model_file.make_model(spec, Compute("float32"), source.tensors())
    observation, noise = model_file.from_numpy((batch.observation, draws.noise))
    time, valid = model_file.from_numpy((np.ones(len(draws.noise), np.float32), np.ones(draws.noise.shape[:2], bool)))
    taps = model(observation, noise, time, valid, capture=True)[1]
    steps = sampling.sample_actions(model, observation, noise, NUM_STEPS)[1]
    order = execution_order(spec)
    return Trace(_to_numpy(steps), {name: _to_numpy(taps[stacked] if layer is None else taps[stacked][layer]) for name, stacked, layer in order})


def _check_same_sizes(first: Source, second: Source) -> None:
    ours, theirs = shapes(without_lora(first.spec)), shapes(without_lora(second.spec))
    if different := [name for name, shape in ours.items() if theirs[name] != shape]:
        name = different[0]
        raise CheckpointError(
            f"The two are different models: {name} is {ours[name]} in {first.where} and {theirs[name]} in {second.where}, and {len(different) - 1} more."
        )


def _to_numpy(array: Any) -> np.ndarray:
    return array.detach().cpu().numpy() if hasattr(array, "detach") else np.asarray(array)


@dataclasses.dataclass(frozen=True)
class Options:
    """backends: of A and of B. config: a training config with the model's sizes. tolerance: largest error, in units of a tensor's largest element."""

    backends: tuple[BackendName, BackendName] = ("jax", "torch")
    config: str | None = None
    seed: int = 0
    tolerance: float = TOLERANCE


def main(a: Annotated[str, tyro.conf.Positional], b: Annotated[str, tyro.conf.Positional], options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Prints the comparison; returns the exit code."""
    console, errors = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        found = verify(a, b, options.backends, like=_sizes(options.config), seed=options.seed, tolerance=options.tolerance)
    except Pi05Error as error:
        errors.print(f"{type(error).__name__}: {error}", markup=False)
        return 2
    table = Table("denoise step", "largest difference")
    for i, error in enumerate(found.steps, 1):
        table.add_row(str(i), f"{error:.2e}")
    console.print(table)
    difference = found.first_difference
    if difference is None:
        worst = max(found.checks, key=lambda check: check.error)
        console.print(f"They agree. Worst of {len(found.checks)} intermediates: {worst}", markup=False)
        return 0
    console.print(f"They differ, first in {difference}", markup=False)
    return 1


def _sizes(config: str | None) -> ModelSpec | None:
    if config is None:
        return None
    from pi05.config import get_config

    return get_config(config).spec()


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
