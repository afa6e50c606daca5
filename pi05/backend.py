"""What a training run, an evaluation or a policy asks of a backend; the only way in which they reach one.

Everything that crosses this border is NumPy, so nothing above it knows which framework computes.
"""

import importlib
from collections.abc import Iterable
from typing import Any, Literal, Protocol

import numpy as np

from pi05.batch import Batch, Draws, LossParts, Observation
from pi05.errors import ConfigError
from pi05.recipe import Recipe
from pi05.spec import Compute, ModelSpec
from pi05.train_state import StepMetrics, TrainState

BackendName = Literal["jax", "torch"]
BACKENDS: tuple[BackendName, ...] = ("jax", "torch")
Device = Literal["auto", "cpu", "cuda"]


class Backend(Protocol):
    """One framework, made for one model and one recipe by `load_backend`. A state is whatever it likes; a used-up state must not be used again."""

    name: BackendName
    spec: ModelSpec
    recipe: Recipe

    def describe(self) -> str:
        """The device and the framework's version, for a person."""

    def peak_memory(self) -> int | None:
        """Bytes of device memory in use at the worst moment so far; None where the device does not say."""

    def init_state(self, tensors: Iterable[tuple[str, np.ndarray]]) -> Any:
        """The state at step 0 from (canonical name, float32 array) weights, taken one at a time."""

    def init_policy(self, tensors: Iterable[tuple[str, np.ndarray]]) -> Any:
        """A state to act with and evaluate only: these weights, no moments and no average; train_step and export_state refuse it."""

    def train_step(self, state: Any, batch: Batch, draws: Draws, lr: float, *, norms: bool = False) -> tuple[Any, StepMetrics]:
        """One step of the recipe at learning rate `lr`; uses up `state`. norms: also the parameters' norm."""

    def eval_step(self, state: Any, batch: Batch, draws: Draws) -> LossParts:
        """The loss with the weights to act with (the moving average where there is one)."""

    def sample_actions(self, state: Any, observation: Observation, noise: np.ndarray, num_steps: int = 10) -> np.ndarray:
        """Action chunks float32[B, A, M], normalised, from noise float32[B, A, M], with the weights to act with."""

    def export_state(self, state: Any) -> TrainState:
        """The state as plain NumPy."""

    def import_state(self, saved: TrainState) -> Any:
        """The state that `export_state` of either backend has read."""


def load_backend(name: str, spec: ModelSpec, compute: Compute, recipe: Recipe, *, device: Device = "auto") -> Backend:
    """The backend `name` for a model.

    device: "auto" takes the GPU where there is one; "cpu" and "cuda" take no other.

    Raises:
        ConfigError: no such backend, no such device on this machine, or a recipe that does not fit the model.
        SpecError: the backend cannot honour `compute` there.
    """
    if name not in BACKENDS:
        raise ConfigError(f"There is no backend {name!r}; there are {' and '.join(BACKENDS)}.")
    return importlib.import_module(f"pi05.{name}_backend.backend").Backend(spec, compute, recipe, device=device)
