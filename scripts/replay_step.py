"""Computes a training step again whose loss or gradient was not finite, and says which samples and which tensors are to blame.

    python scripts/replay_step.py RUN/bad_steps/step_123 [--checkpoint DIR] [--backend jax|torch] [--device auto|cpu|cuda]

The folder holds batch, draws, learning rate and config; the weights are those that the run saved when it stopped, else those of --checkpoint,
else those that the run began with. The other backend, the CPU, or --override compute.dtype=float32 tell where it comes from.
Exit code: 0 it is not finite again, 1 it is finite, 2 it could not be computed.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import rich.console

from pi05.backend import BACKENDS, load_backend
from pi05.bad_step import BadStep, load_bad_step
from pi05.checkpoint import load_state, locate_checkpoint
from pi05.config import TrainConfig, get_config
from pi05.errors import CheckpointError, Pi05Error
from pi05.interop.sources import load_weights
from pi05.params import Param, read, rows, shapes
from pi05.spec import ModelSpec

SHOWN = 8  # tensors of a group that are named


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="a run, one of its checkpoints, or published weights")
    parser.add_argument("--backend", choices=BACKENDS, help="default: the run's")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="default: the run's")
    parser.add_argument("--override", action="append", default=[], metavar="FIELD=VALUE", help="of the config; may be repeated")
    args = parser.parse_args(arguments)
    console = rich.console.Console(highlight=False, markup=False, soft_wrap=True)
    overrides = dict(text.partition("=")[::2] for text in args.override)
    overrides |= {name: value for name in ("backend", "device") if (value := getattr(args, name)) is not None}
    try:
        bad = load_bad_step(args.folder)
        return 0 if replay(bad, get_config(str(bad.config), overrides), args.checkpoint or bad.checkpoint, console) else 1
    except Pi05Error as error:
        console.print(f"error: {error}", style="bold red")
        return 2


def replay(bad: BadStep, config: TrainConfig, checkpoint: Path | None, console: rich.console.Console) -> bool:
    """Whether the step is not finite again; prints what there is to know."""
    spec, recipe = config.spec(), dataclasses.replace(config.recipe(), ema_decay=None)  # without an average, eval_step judges the weights themselves
    console.print(f"step {bad.step}, {len(bad.batch.sample_ids)} samples, lr {bad.lr:g}; weights of {checkpoint or config.weights}")
    for name, array in weights(config, spec, checkpoint):
        if not np.isfinite(array).all():
            console.print(f"weights: {name} has {(~np.isfinite(array)).sum()} values that are not finite")
    backend = load_backend(config.backend, spec, config.compute, recipe, device=config.device)
    console.print(f"backend {backend.name}: {backend.describe()}, compute.dtype {config.compute.dtype}, attention {config.compute.attention}")
    state = backend.init_state(weights(config, spec, checkpoint))
    losses = np.asarray(backend.eval_step(state, bad.batch, bad.draws).per_sample)
    console.print("\nsample id        loss")
    for sample_id, loss in zip(bad.batch.sample_ids, losses, strict=True):
        console.print(f"{sample_id:>9} {loss:>11.5g}{'' if math.isfinite(loss) else '   <- not finite'}")
    state, metrics = backend.train_step(state, bad.batch, bad.draws, bad.lr)
    fetched = metrics.fetch()
    del state
    console.print(f"\nthe run:  loss {bad.loss:.6g}, gradient norm {bad.grad_norm:.6g}")
    console.print(f"replayed: loss {fetched['loss']:.6g}, gradient norm {fetched['grad_norm']:.6g}")
    if fetched["finite"]:
        console.print("Finite here: the weights, the backend, the device or the config differ from the run's, or its kernels are not deterministic.")
        return False
    if np.isfinite(losses).all():
        print_samples(bad, config, checkpoint, console)
    print_gradients(bad, config, checkpoint, console)
    return True


def weights(config: TrainConfig, spec: ModelSpec, checkpoint: Path | None) -> Iterator[tuple[str, np.ndarray]]:
    """(canonical name, float32 array) of the weights to start from; those that were trained, not their average.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    if checkpoint is None:
        return load_weights(config.weights, spec, seed=config.seed).tensors
    if not checkpoint.exists():
        raise CheckpointError(f"{checkpoint} is not there (any more: a run keeps its newest keep_last checkpoints). Name one with --checkpoint.")
    try:
        folder = locate_checkpoint(checkpoint)
    except CheckpointError:  # not one of ours
        return load_weights(checkpoint, spec, seed=config.seed).tensors
    return iter(load_state(folder, spec).params.items())


def print_samples(bad: BadStep, config: TrainConfig, checkpoint: Path | None, console: rich.console.Console) -> None:
    """Which samples have, alone, a gradient that is not finite."""
    spec, recipe = config.spec(), dataclasses.replace(config.recipe(), ema_decay=None, grad_accum_steps=1)
    backend = load_backend(config.backend, spec, config.compute, recipe, device=config.device)
    state, guilty = backend.init_state(weights(config, spec, checkpoint)), []
    for index, sample_id in enumerate(bad.batch.sample_ids):
        state, metrics = backend.train_step(state, *bad.sample(index), 0.0)  # at rate 0 the weights stay
        if not metrics.fetch()["finite"]:
            guilty.append(str(sample_id))
    console.print(f"Every loss is finite, a gradient is not. Samples whose own gradient is not finite: {', '.join(guilty) or 'none, only their sum'}.")


def print_gradients(bad: BadStep, config: TrainConfig, checkpoint: Path | None, console: rich.console.Console) -> None:
    """Which tensors have a gradient that is not finite, by group, in the order of the model."""
    spec, learned = config.spec(), config.recipe().trains(config.spec())
    compute_gradients = {"jax": jax_gradients, "torch": torch_gradients}[config.backend]
    gradients = dict(read(compute_gradients(bad, config, weights(config, spec, checkpoint)), spec, config.backend, learned))
    console.print("\ntensors whose gradient is not finite:")
    learning = [row for row in rows(spec) if row.name in learned]
    for group in dict.fromkeys(row.group for row in learning):
        members = [row for row in learning if row.group == group]
        found = [describe_bad(row, ~np.isfinite(gradients[row.name])) for row in members if not np.isfinite(gradients[row.name]).all()]
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        console.print(f"  {group}: {len(found)} of {len(members)}{': ' if found else ''}{', '.join(found[:SHOWN])}{more}")


def describe_bad(row: Param, bad: np.ndarray) -> str:
    """Name of a tensor, how many of its values are `bad`, in which layers."""
    where = ""
    if row.stacked:
        layers = np.flatnonzero(bad.reshape(len(bad), -1).any(1))
        where = f", layers {layers[0]} to {layers[-1]}"
    return f"{row.name} ({bad.sum()} of {bad.size}{where})"


def jax_gradients(bad: BadStep, config: TrainConfig, tensors: Iterator[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The gradient of every tensor that learns, by its name in JAX's layout."""
    import jax
    from flax import nnx

    from pi05.jax_backend.model import from_numpy, make_model
    from pi05.jax_backend.step import accumulate_gradients

    spec, recipe = config.spec(), config.recipe()
    learned = frozenset(shapes(spec, "jax", recipe.trains(spec)))
    with jax.default_device(jax.devices()[0] if config.device == "auto" else jax.devices(config.device)[0]):
        graph, state = nnx.split(make_model(spec, config.compute, tensors))
        compute = jax.jit(lambda state, batch, draws: accumulate_gradients(nnx.merge(graph, state), batch, draws, recipe, learned)[1])
        return {name: np.asarray(array) for name, array in compute(state, from_numpy(bad.batch), from_numpy(bad.draws)).items()}


def torch_gradients(bad: BadStep, config: TrainConfig, tensors: Iterator[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The same for PyTorch."""
    import torch

    from pi05.torch_backend.model import from_numpy, make_model
    from pi05.torch_backend.step import accumulate_gradients

    spec, recipe = config.spec(), config.recipe()
    learned = frozenset(shapes(spec, "torch", recipe.trains(spec)))
    with torch.device("cuda" if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()) else "cpu"):
        model = make_model(spec, config.compute, tensors)
        _, gradients = accumulate_gradients(model, from_numpy(bad.batch), from_numpy(bad.draws), recipe, learned)
        return {name: gradient.cpu().numpy() for name, gradient in gradients.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
