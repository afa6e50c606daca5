"""This framework behind the protocol of pi05/backend.py.

Dtypes: parameters, moments and averages float32.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor as Array

from pi05.batch import Batch, Draws, LossParts, Observation
from pi05.errors import ConfigError
from pi05.params import read, shapes, write
from pi05.recipe import Recipe
from pi05.spec import Compute, ModelSpec
from pi05.torch_backend.attention import check_kernels
from pi05.torch_backend.model import Pi05, abstract_model, map_arrays, with_params
from pi05.torch_backend.optimizer import OptimizerState, apply_gradients, global_norm, init_optimizer, read_moments, restore_optimizer
from pi05.torch_backend.sampling import sample_actions
from pi05.torch_backend.step import accumulate_gradients
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

    name = "torch"

    def __init__(self, spec: ModelSpec, compute: Compute, recipe: Recipe, *, device: str = "auto"):
        self.spec, self.compute, self.recipe = spec, compute, recipe
        self._learned_names = recipe.trains(spec)  # canonical
        self._learned = frozenset(shapes(spec, "torch", self._learned_names))
        self._device = _find_device(device)
        check_kernels(compute.strategy, (spec.vision.head_dim, spec.trunk.head_dim), on_gpu=self._device.type == "cuda")
        self._shell, self._loaded = abstract_model(spec, compute), {}

    def describe(self) -> str:
        kind = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU"
        return f"{kind}, torch {torch.__version__}"

    def peak_memory(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None

    def init_state(self, tensors: Iterable[tuple[str, np.ndarray]]) -> State:
        arrays = {name: self._own(array) for name, array in write(tensors, self.spec, "torch")}
        learned, frozen = self._split(arrays)
        return State(0, learned, frozen, init_optimizer(learned, self.recipe))

    def init_policy(self, tensors: Iterable[tuple[str, np.ndarray]]) -> State:
        arrays = {name: self._own(array) for name, array in write(tensors, self.spec, "torch")}
        return State(0, {}, arrays, OptimizerState(None, None))

    def train_step(self, state: State, batch: Batch, draws: Draws, lr: float, *, norms: bool = False) -> tuple[State, StepMetrics]:
        batch, draws = map_arrays(self._put, (batch, draws))
        parts, gradients = accumulate_gradients(self._model(state.learned | state.frozen), batch, draws, self.recipe, self._learned)
        learned, optimizer, norm, finite = apply_gradients(state.learned, gradients, parts.loss, state.optimizer, lr, self.recipe)
        metrics = StepMetrics(parts.loss, parts.per_dim, norm, finite, global_norm(learned).detach() if norms else None)
        return State(state.step + 1, learned, state.frozen, optimizer), map_arrays(Array.cpu, metrics)

    @torch.no_grad()
    def eval_step(self, state: State, batch: Batch, draws: Draws) -> LossParts:
        batch, draws = map_arrays(self._put, (batch, draws))
        options = {"padded_steps": self.recipe.padded_steps, "loss_dims": self.recipe.loss_dims}
        return map_arrays(_to_numpy, self._model(self._served(state)).loss(batch, draws, **options))

    @torch.no_grad()
    def sample_actions(self, state: State, observation: Observation, noise: np.ndarray, num_steps: int = 10) -> np.ndarray:
        observation, noise = map_arrays(self._put, (observation, noise))
        return _to_numpy(sample_actions(self._model(self._served(state)), observation, noise, num_steps)[0])

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
        return State(saved.step, learned, frozen, restore_optimizer(learned, self.recipe, saved.updates, m, v, ema))

    def _model(self, params: dict[str, Array]) -> Pi05:
        if any(self._loaded.get(name) is not array for name, array in params.items()):
            with_params(self._shell, params)
            self._loaded = params
        return self._shell

    def _served(self, state: State) -> dict[str, Array]:
        return state.frozen | (state.learned if state.optimizer.ema is None else state.optimizer.ema)

    def _split(self, arrays: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        learned = {name: torch.nn.Parameter(array) for name, array in arrays.items() if name in self._learned}
        return learned, {name: array for name, array in arrays.items() if name not in self._learned}

    def _native(self, tensors: dict[str, np.ndarray], names: frozenset[str] | None) -> dict[str, Array]:
        return {name: self._own(array) for name, array in write(tensors.items(), self.spec, "torch", names)}

    def _canonical(self, arrays: dict[str, Array], names: frozenset[str] | None) -> dict[str, np.ndarray]:
        return dict(read({name: _to_numpy(array).copy() for name, array in arrays.items()}, self.spec, "torch", names))

    def _put(self, array: np.ndarray) -> Array:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _own(self, array: np.ndarray) -> Array:
        return torch.tensor(array, device=self._device)


def _to_numpy(array: Array) -> np.ndarray:
    return array.detach().cpu().numpy()


def _find_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', which torch does not find here. Use device cpu, or install a CUDA build of torch and a driver that it knows.")
    return torch.device(device)
