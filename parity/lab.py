"""Runs every implementation on a scene and hands out NumPy arrays under the same names, whatever framework they came from.

Implementations: "jax", "torch" (ours) and "reference" (parity/reference.py; in float64 it is the truth, in a low precision it is
the naive implementation that ours must not be much worse than).
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import numpy as np

from parity.cases import Scene, scene
from pi05.params import read, write
from pi05.spec import Compute, ModelSpec

Implementation = Literal["jax", "torch", "reference"]
BACKENDS: tuple[Implementation, ...] = ("jax", "torch")
NUM_STEPS = 10


@dataclasses.dataclass(frozen=True)
class Results:
    """What one implementation says about one scene, in NumPy.

    activations: every named intermediate, one entry a layer, in execution order; the last is the velocity.
    per_sample, per_dim: the loss [B] and [M]. logits: token logits [B, T, V]. actions: x after each Euler step [steps, B, A, M].
    gradients: of the mean loss, by torch-layout name.
    """

    activations: dict[str, np.ndarray]
    per_sample: np.ndarray
    per_dim: np.ndarray
    logits: np.ndarray
    actions: np.ndarray
    gradients: dict[str, np.ndarray]


class Lab:
    """Caches results by (implementation, dtype, scene); `borrow` shares another lab's results of implementations that are not under test."""

    def __init__(self, borrow: "Lab | None" = None, under_test: str | None = None):
        self._results: dict[tuple[str, str, str], Results] = {}
        if borrow is not None:
            self._results = {key: value for key, value in borrow._results.items() if key[0] != under_test}
        self._borrow, self._under_test = borrow, under_test

    def results(self, implementation: Implementation, dtype: str, scene_name: str) -> Results:
        """Results of an implementation computing in `dtype`."""
        key = (implementation, dtype, scene_name)
        if key not in self._results:
            if self._borrow is not None and implementation != self._under_test:
                self._results[key] = self._borrow.results(implementation, dtype, scene_name)
            else:
                self._results[key] = RUNNERS[implementation](scene(scene_name), Compute(dtype))
        return self._results[key]

    def truth(self, scene_name: str) -> Results:
        """The reference in float64."""
        return self.results("reference", "float64", scene_name)


def run_jax(case: Scene, compute: Compute, **options: str) -> Results:
    """Runs the JAX backend, compiled; float64 in a scope of its own, so that everything else runs as users run it."""
    import jax
    from flax import nnx

    from pi05.jax_backend.model import from_numpy, make_model
    from pi05.jax_backend.sampling import sample_actions
    from pi05.jax_backend.step import loss_and_gradients

    with jax.enable_x64(compute.dtype == "float64"):
        graph, state = nnx.split(make_model(case.spec, compute, _parameters(case, compute)))

        @jax.jit
        def analyse(state, batch, draws):
            model = nnx.merge(graph, state)
            x_t, _, counted = model.flow(batch, draws, padded_steps=options.get("padded_steps", "ignore"))
            _, taps = model(batch.observation, x_t, draws.time, counted, capture=True)
            parts, gradients = loss_and_gradients(model, batch, draws, **options)
            _, steps = sample_actions(model, batch.observation, draws.noise, NUM_STEPS)
            return taps, parts.per_sample, parts.per_dim, model.token_logits(batch.observation), steps, gradients

        out = analyse(state, from_numpy(case.batch), from_numpy(case.draws))
        taps, per_sample, per_dim, logits, steps, gradients = jax.tree.map(_jax_to_numpy, out)
    canonical = dict(read(gradients, case.spec, "jax"))
    return Results(_by_layer(taps, case.spec), per_sample, per_dim, logits, steps, dict(write(canonical.items(), case.spec, "torch")))


def run_torch(case: Scene, compute: Compute, **options: str) -> Results:
    """Runs the PyTorch backend, eagerly."""
    import torch

    from pi05.torch_backend.model import from_numpy, make_model
    from pi05.torch_backend.sampling import sample_actions
    from pi05.torch_backend.step import loss_and_gradients

    model = make_model(case.spec, compute, _parameters(case, compute))
    batch, draws = from_numpy(case.batch), from_numpy(case.draws)
    parts, gradients = loss_and_gradients(model, batch, draws, **options)
    with torch.no_grad():
        x_t, _, counted = model.flow(batch, draws, padded_steps=options.get("padded_steps", "ignore"))
        _, taps = model(batch.observation, x_t, draws.time, counted, capture=True)
        _, steps = sample_actions(model, batch.observation, draws.noise, NUM_STEPS)
        logits = model.token_logits(batch.observation)
    numpy = {name: _torch_to_numpy(tap) for name, tap in taps.items()}
    grads = {name: _torch_to_numpy(gradient) for name, gradient in gradients.items()}
    return Results(_by_layer(numpy, case.spec), *(_torch_to_numpy(x) for x in (parts.per_sample, parts.per_dim, logits, steps)), grads)


def run_reference(case: Scene, compute: Compute, **options: str) -> Results:
    """Runs the reference: float64 in NumPy (its gradients, and every other precision, through torch)."""
    import torch

    from parity import reference

    ops = reference.TorchOps(getattr(torch, compute.dtype))
    full = getattr(torch, compute.full_dtype)
    params = {name: torch.tensor(value, dtype=full, requires_grad=True) for name, value in case.params.items()}
    steps_option = {"padded_steps": options.get("padded_steps", "ignore")}
    parts = reference.loss(params, case.spec, case.batch, case.draws, ops=ops, **options)
    parts["loss"].backward()
    zeros = {name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in params.items()}
    gradients = dict(write(((name, _torch_to_numpy(value)) for name, value in zeros.items()), case.spec, "torch"))
    if compute.dtype == "float64":
        ops, params = reference.NumpyOps(np.float64), {name: value.astype(np.float64) for name, value in case.params.items()}
    with torch.no_grad():
        taps = reference.forward(params, case.spec, case.batch, case.draws, ops=ops, **steps_option)
        logits = reference.token_logits(params, case.spec, case.batch.observation, ops=ops)
        steps = reference.sample_actions(params, case.spec, case.batch.observation, case.draws.noise, NUM_STEPS, ops=ops)
        parts = reference.loss(params, case.spec, case.batch, case.draws, ops=ops, **options)
    numpy = {name: _to_numpy(tap) for name, tap in taps.items()}
    actions = np.stack([_to_numpy(step) for step in steps])
    return Results(_by_layer(numpy, case.spec), _to_numpy(parts["per_sample"]), _to_numpy(parts["per_dim"]), _to_numpy(logits), actions, gradients)


RUNNERS = {"jax": run_jax, "torch": run_torch, "reference": run_reference}


def execution_order(spec: ModelSpec) -> Iterator[str]:
    """Names of the activations in the order in which a forward pass makes them."""
    yield "vision.embedded"
    for layer in range(spec.vision.depth):
        yield from (f"vision.layers.{layer}.attn", f"vision.layers.{layer}.out")
    yield from ("vision.tokens", "prefix.embedded", "prefix.valid", "prefix.positions")
    yield from ("time.embedding", "time.cond", "suffix.embedded", "suffix.positions")
    for layer in range(spec.trunk.depth):
        for tower in ("trunk", "expert"):
            yield from (f"{tower}.layers.{layer}.{part}" for part in ("q", "k", "v", "attn", "out"))
    yield from ("trunk.final", "expert.final", "velocity")


def _parameters(case: Scene, compute: Compute) -> Iterator[tuple[str, np.ndarray]]:
    return ((name, value.astype(compute.full_dtype)) for name, value in case.params.items())


def _by_layer(taps: dict[str, np.ndarray], spec: ModelSpec) -> dict[str, np.ndarray]:
    out = {}
    for name in execution_order(spec):
        tower, _, rest = name.partition(".layers.")
        layer, _, part = rest.partition(".")
        out[name] = taps[f"{tower}.layers.{part}"][int(layer)] if rest else taps[name]
    return out


def _jax_to_numpy(array: object) -> np.ndarray:
    array = np.asarray(array)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _torch_to_numpy(tensor: object) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype.itemsize == 2 else tensor).numpy().copy()


def _to_numpy(array: object) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else _torch_to_numpy(array)
