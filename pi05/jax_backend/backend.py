"""This framework behind the protocol of pi05/backend.py.

Dtypes: parameters, moments and averages float32.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pi05.batch import Batch, Draws, LossParts, Observation
from pi05.errors import ConfigError
from pi05.jax_backend.attention import check_kernels
from pi05.jax_backend.model import Pi05, abstract_model, map_arrays, with_params
from pi05.jax_backend.optimizer import OptimizerState, apply_gradients, global_norm, init_optimizer, read_moments, restore_optimizer
from pi05.jax_backend.sampling import sample_actions
from pi05.jax_backend.step import accumulate_gradients
from pi05.params import read, shapes, write
from pi05.recipe import Recipe
from pi05.spec import Compute, ModelSpec
from pi05.train_state import StepMetrics, TrainState


@dataclasses.dataclass
class State:
    """A run's state on the device; arrays by their name in this backend's layout.

    learned, frozen: the parameters. optimizer: moments and average of the learned ones. step: batches consumed.
    """

    step: int
    learned: dict[str, Array]
    frozen: dict[str, Array]
    optimizer: OptimizerState


class Backend:
    """See pi05.backend.Backend."""

    name = "jax"

    def __init__(self, spec: ModelSpec, compute: Compute, recipe: Recipe, *, device: str = "auto"):
        self.spec, self.compute, self.recipe = spec, compute, recipe
        self._learned_names = recipe.trains(spec)  # canonical
        self._learned = frozenset(shapes(spec, "jax", self._learned_names))
        self._device = _find_device(device)
        _keep_compiled()
        check_kernels(compute.strategy, (spec.vision.head_dim, spec.trunk.head_dim), on_gpu=self._device.platform == "gpu")
        self._shell = abstract_model(spec, compute)

    def describe(self) -> str:
        kind = self._device.device_kind if self._device.platform != "cpu" else "CPU"
        return f"{kind}, jax {jax.__version__}"

    def peak_memory(self) -> int | None:
        return (self._device.memory_stats() or {}).get("peak_bytes_in_use")

    def init_state(self, tensors: Iterable[tuple[str, np.ndarray]]) -> State:
        arrays = {name: self._own(array) for name, array in write(tensors, self.spec, "jax")}
        learned, frozen = self._split(arrays)
        return State(0, learned, frozen, self._keep(init_optimizer(learned, self.recipe)))

    def init_policy(self, tensors: Iterable[tuple[str, np.ndarray]]) -> State:
        arrays = {name: self._own(array) for name, array in write(tensors, self.spec, "jax")}
        return State(0, {}, arrays, OptimizerState(None, None))

    def train_step(self, state: State, batch: Batch, draws: Draws, lr: float, *, norms: bool = False) -> tuple[State, StepMetrics]:
        batch, draws = map_arrays(self._put, (batch, draws))
        learned, optimizer, metrics = self._train(state.learned, state.frozen, state.optimizer, batch, draws, jnp.float32(lr))
        metrics = dataclasses.replace(metrics, param_norm=self._norm(learned) if norms else None)
        return State(state.step + 1, learned, state.frozen, optimizer), metrics

    def eval_step(self, state: State, batch: Batch, draws: Draws) -> LossParts:
        batch, draws = map_arrays(self._put, (batch, draws))
        return map_arrays(np.asarray, self._evaluate(self._served(state), batch, draws))

    def sample_actions(self, state: State, observation: Observation, noise: np.ndarray, num_steps: int = 10) -> np.ndarray:
        observation, noise = map_arrays(self._put, (observation, noise))
        return np.asarray(self._sample(self._served(state), observation, noise, num_steps=num_steps))

    def export_state(self, state: State) -> TrainState:
        updates, m, v = read_moments(state.learned, state.optimizer)
        ema = state.optimizer.ema
        return TrainState(
            step=state.step,
            updates=updates,
            params=self._canonical(state.learned | state.frozen, None),
            m=self._canonical(m, self._learned_names),
            v=self._canonical(v, self._learned_names),
            ema=None if ema is None else self._canonical(ema, self._learned_names),
        )

    def import_state(self, saved: TrainState) -> State:
        learned, frozen = self._split(self._native(saved.params, None))
        m, v = (self._native(moments, self._learned_names) for moments in (saved.m, saved.v))
        ema = None if self.recipe.ema_decay is None else self._native({name: saved.served_params()[name] for name in self._learned_names}, self._learned_names)
        return State(saved.step, learned, frozen, self._keep(restore_optimizer(learned, self.recipe, saved.updates, m, v, ema)))

    @functools.cached_property
    def _train(self) -> Callable:
        def step(learned: dict, frozen: dict, optimizer: OptimizerState, batch: Batch, draws: Draws, lr: Array) -> tuple[dict, OptimizerState, StepMetrics]:
            parts, gradients = accumulate_gradients(self._model(learned | frozen), batch, draws, self.recipe, self._learned)
            learned, optimizer, norm, finite = apply_gradients(learned, gradients, parts.loss, optimizer, lr, self.recipe)
            return learned, optimizer, StepMetrics(parts.loss, parts.per_dim, norm, finite)

        return jax.jit(step, donate_argnums=(0, 2))

    @functools.cached_property
    def _norm(self) -> Callable:
        return jax.jit(global_norm)

    @functools.cached_property
    def _evaluate(self) -> Callable:
        options = {"padded_steps": self.recipe.padded_steps, "loss_dims": self.recipe.loss_dims}
        return jax.jit(lambda params, batch, draws: self._model(params).loss(batch, draws, **options))

    @functools.cached_property
    def _sample(self) -> Callable:
        def sample(params: dict, observation: Observation, noise: Array, num_steps: int) -> Array:
            return sample_actions(self._model(params), observation, noise, num_steps)[0]

        return jax.jit(sample, static_argnames="num_steps")

    def _model(self, params: dict[str, Array]) -> Pi05:
        return with_params(self._shell, params)

    def _served(self, state: State) -> dict[str, Array]:
        return state.frozen | (state.learned if state.optimizer.ema is None else state.optimizer.ema)

    def _split(self, arrays: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        learned = {name: array for name, array in arrays.items() if name in self._learned}
        return learned, {name: array for name, array in arrays.items() if name not in self._learned}

    def _native(self, tensors: dict[str, np.ndarray], names: frozenset[str] | None) -> dict[str, Array]:
        return {name: self._own(array) for name, array in write(tensors.items(), self.spec, "jax", names)}

    def _canonical(self, arrays: dict[str, Array], names: frozenset[str] | None) -> dict[str, np.ndarray]:
        return dict(read({name: np.array(array) for name, array in arrays.items()}, self.spec, "jax", names))

    def _keep(self, optimizer: OptimizerState) -> OptimizerState:
        """On the device for good, as a step's results are; counts that are not yet would have the second step compiled anew."""
        return jax.device_put(optimizer, self._device)

    def _put(self, array: np.ndarray) -> Array:
        return jax.device_put(array, self._device)

    def _own(self, array: np.ndarray) -> Array:
        return jnp.array(array, device=self._device)  # a copy: a state's arrays are given away to the next step


def _keep_compiled() -> None:
    """Compiled steps are kept on disk, unless the user has said where or that they should not be (JAX_COMPILATION_CACHE_DIR)."""
    if jax.config.jax_compilation_cache_dir is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pi05" / "jax"
        jax.config.update("jax_compilation_cache_dir", str(cache))


def _find_device(device: str) -> jax.Device:
    if device == "auto":
        return jax.devices()[0]
    try:
        return jax.devices(device)[0]
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}, which JAX does not find here ({error}). Use device cpu, or install the cuda extra of pi05.") from None
