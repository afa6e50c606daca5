"""Runs every implementation on a scene and hands out NumPy arrays under the same names, whatever framework they came from.

Implementations: "jax", "torch" (ours) and "reference" (parity/reference.py; in float64 it is the truth, in a low precision it is
the naive implementation that ours must not be much worse than).
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from pi05.compare import execution_order
from pi05.params import read, write
from pi05.spec import Compute

from .cases import Scene, scene

Implementation = Literal["jax", "torch", "reference"]
BACKENDS: tuple[Implementation, ...] = ("jax", "torch")
NUM_STEPS = 10


class Run:
    """What one implementation says about one scene. Each part is computed when it is first asked for, then kept.

    options: those of the loss, padded_steps and loss_dims.
    """

    def __init__(self, case: Scene, compute: Compute, **options: str):
        self.case, self.compute, self.options = case, compute, options
        self.steps_option = {name: value for name, value in options.items() if name == "padded_steps"}

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """The scene's parameters in the dtype they have in this run."""
        return ((name, value.astype(self.compute.full_dtype)) for name, value in self.case.params.items())

    @functools.cached_property
    def activations(self) -> dict[str, np.ndarray]:
        """Every named intermediate, one entry a layer, in execution order; the last is the velocity."""
        taps = self._activations()
        return {name: taps[stacked] if layer is None else taps[stacked][layer] for name, stacked, layer in execution_order(self.case.spec)}

    @functools.cached_property
    def training(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The loss {"per_sample" [B], "per_dim" [M]}, and the gradient of the mean loss by torch-layout name."""
        return self._training()

    @functools.cached_property
    def logits(self) -> np.ndarray:
        """Token logits [B, T, V]."""
        return self._logits()

    @functools.cached_property
    def actions(self) -> np.ndarray:
        """x after each Euler step, [steps, B, A, M]."""
        return self._actions()

    @property
    def loss(self) -> dict[str, np.ndarray]:
        return self.training[0]

    @property
    def gradients(self) -> dict[str, np.ndarray]:
        return self.training[1]


# float64 judges what the code means, which no optimisation may change, so it takes the fastest compilation. In bfloat16, XLA hands CPU
# products to YNNPACK kernels, some of which accumulate in bfloat16: long sums stick at powers of two, and single elements of weight
# gradients are off by 10 % (jaxlib 0.11.2). No accelerator does that, and it is not our arithmetic that it shows.
COMPILER_OPTIONS: dict[str, dict[str, object]] = {
    "float64": {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
    "float32": {},
    "bfloat16": {"xla_cpu_experimental_ynn_fusion_type": ""},
}


@functools.cache
def compiler_options(dtype: str) -> dict[str, object]:
    """Those of COMPILER_OPTIONS that the installed XLA knows; one that lacks an option is taken as it comes."""
    import jax

    known = {}
    for name, value in COMPILER_OPTIONS[dtype].items():
        try:
            jax.jit(lambda x: x, compiler_options={name: value})(0.0)
            known[name] = value
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
    return known


class BackendRun(Run):
    """A run of one of our backends: the same calls, by the same names."""

    backend: str

    def module(self, name: str) -> Any:
        """The backend's module `name`."""
        return importlib.import_module(f"pi05.{self.backend}_backend.{name}")

    def call(self, function: Callable) -> Any:
        """The value of function(model, batch, draws) in this backend, with every array in NumPy."""
        raise NotImplementedError

    def _activations(self) -> dict[str, np.ndarray]:
        def forward(model, batch, draws):
            x_t, _, counted = model.flow(batch, draws, **self.steps_option)
            return model(batch.observation, x_t, draws.time, counted, capture=True)[1]

        return self.call(forward)

    def _training(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        def train(model, batch, draws):
            parts, gradients = self.module("step").loss_and_gradients(model, batch, draws, **self.options)
            return dict(vars(parts)), gradients

        loss, gradients = self.call(train)
        return loss, dict(write(read(gradients, self.case.spec, self.backend), self.case.spec, "torch"))

    def _logits(self) -> np.ndarray:
        return self.call(lambda model, batch, draws: model.token_logits(batch.observation))

    def _actions(self) -> np.ndarray:
        return self.call(lambda model, batch, draws: self.module("sampling").sample_actions(model, batch.observation, draws.noise, NUM_STEPS)[1])


class JaxRun(BackendRun):
    """The JAX backend, compiled; float64 in a scope of its own, so that everything else runs as users run it."""

    backend = "jax"

    def call(self, function: Callable) -> Any:
        import jax
        from flax import nnx

        model = self.module("model")
        with jax.enable_x64(self.compute.dtype == "float64"):
            graph, state = nnx.split(model.make_model(self.case.spec, self.compute, self.parameters()))
            options = compiler_options(self.compute.dtype)
            compiled = jax.jit(lambda state, batch, draws: function(nnx.merge(graph, state), batch, draws), compiler_options=options)
            return jax.tree.map(_from_jax, compiled(state, model.from_numpy(self.case.batch), model.from_numpy(self.case.draws)))


class TorchRun(BackendRun):
    """The PyTorch backend, eagerly."""

    backend = "torch"

    def call(self, function: Callable) -> Any:
        model = self.module("model")
        out = function(model.make_model(self.case.spec, self.compute, self.parameters()), model.from_numpy(self.case.batch), model.from_numpy(self.case.draws))
        return to_numpy(out)


def _on_the_cpu(method: Callable) -> Callable:
    """Runs a method with torch's default device on the CPU, whatever the session's is."""

    @functools.wraps(method)
    def wrapped(self: Run) -> Any:
        import torch

        with torch.device("cpu"):
            return method(self)

    return wrapped


class ReferenceRun(Run):
    """The reference: its forward pass in NumPy for float64; every other precision, and the gradients, through torch."""

    def _ops(self) -> tuple[Any, dict[str, Any]]:
        import torch

        from . import reference

        if self.compute.dtype == "float64":
            return reference.NumpyOps(np.float64), dict(self.parameters())
        return reference.TorchOps(getattr(torch, self.compute.dtype)), {name: torch.tensor(value) for name, value in self.parameters()}

    @_on_the_cpu
    def _activations(self) -> dict[str, np.ndarray]:
        from . import reference

        ops, params = self._ops()
        taps = reference.forward(params, self.case.spec, self.case.batch, self.case.draws, ops=ops, **self.steps_option)
        return {name: _to_numpy(tap) for name, tap in taps.items()}

    @_on_the_cpu
    def _training(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        import torch

        from . import reference

        params = {name: torch.tensor(value, requires_grad=True) for name, value in self.parameters()}
        ops = reference.TorchOps(getattr(torch, self.compute.dtype))
        parts = reference.loss(params, self.case.spec, self.case.batch, self.case.draws, ops=ops, **self.options)
        parts["loss"].backward()
        zeros = ((name, np.zeros(value.shape) if value.grad is None else _to_numpy(value.grad)) for name, value in params.items())
        return {name: _to_numpy(parts[name]) for name in ("per_sample", "per_dim")}, dict(write(zeros, self.case.spec, "torch"))

    @_on_the_cpu
    def _logits(self) -> np.ndarray:
        from . import reference

        ops, params = self._ops()
        return _to_numpy(reference.token_logits(params, self.case.spec, self.case.batch.observation, ops=ops))

    @_on_the_cpu
    def _actions(self) -> np.ndarray:
        from . import reference

        ops, params = self._ops()
        steps = reference.sample_actions(params, self.case.spec, self.case.batch.observation, self.case.draws.noise, NUM_STEPS, ops=ops)
        return np.stack([_to_numpy(step) for step in steps])


RUNS: dict[str, type[Run]] = {"jax": JaxRun, "torch": TorchRun, "reference": ReferenceRun}


class Lab:
    """Keeps the runs of a session by (implementation, dtype, scene); one that borrows from another shares all but what is under test."""

    def __init__(self, borrow: "Lab | None" = None, under_test: str | None = None):
        self._runs: dict[tuple[str, str, str], Run] = {}
        self._borrow, self._under_test = borrow, under_test

    def results(self, implementation: Implementation, dtype: str, scene_name: str) -> Run:
        """The run of an implementation computing in `dtype`."""
        if self._borrow is not None and implementation != self._under_test:
            return self._borrow.results(implementation, dtype, scene_name)
        key = (implementation, dtype, scene_name)
        if key not in self._runs:
            self._runs[key] = RUNS[implementation](scene(scene_name), Compute(dtype))
        return self._runs[key]

    def truth(self, scene_name: str) -> Run:
        """The reference in float64."""
        return self.results("reference", "float64", scene_name)


def _from_jax(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def to_numpy(tree: Any) -> Any:
    """Tuples and dicts of tensors of either framework, with every tensor in NumPy, copied."""
    if isinstance(tree, dict):
        return {name: to_numpy(part) for name, part in tree.items()}
    return tuple(map(to_numpy, tree)) if isinstance(tree, tuple) else _to_numpy(tree)


def _to_numpy(array: Any) -> np.ndarray:
    if not hasattr(array, "detach"):
        return np.array(array)
    array = array.detach().cpu()
    return (array.float() if array.element_size() == 2 else array).numpy().copy()
