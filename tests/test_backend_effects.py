"""The other half of test_field_effects.py: what a backend is handed decides its numbers, in each backend.

PyTorch takes two steps with every change. JAX compiles for seconds, so there the loss is computed with what decides the loss, the update with
what decides the update, and what learns is read off the state; that its whole steps are PyTorch's is shown by parity/level_4_steps.py.
"""

import dataclasses
import functools
import importlib
from typing import Any

import numpy as np
import pytest

from parity.cases import warm_params
from pi05.backend import load_backend
from pi05.batch import Batch, Draws, make_draws, synthetic_batch
from pi05.recipe import AdamW, Groups, Recipe
from pi05.spec import Compute, LoRA, ModelSpec
from pi05.train_state import TrainState

SPEC = ModelSpec.tiny().replace(vision__depth=1, trunk__depth=1, expert__depth=1)
ADAPTED = SPEC.replace(vision__lora=LoRA(2, 2.0), trunk__lora=LoRA(2, 2.0), expert__lora=LoRA(2, 2.0))
ADAPTERS = Groups("lora", "lora", "lora", "train")
BATCH, LR = 4, 1e-3


@dataclasses.dataclass(frozen=True)
class Setup:
    """All that a backend is made of."""

    spec: ModelSpec = SPEC
    compute: Compute = Compute("float32")
    recipe: Recipe = Recipe()


def rule(**changes: float) -> Setup:
    return Setup(recipe=Recipe(optimizer=AdamW(**changes)))


PLAIN, LORA = Setup(), Setup(ADAPTED, recipe=Recipe(ADAPTERS))
LOSS = {  # decide the loss: the setups that are compared
    "compute.dtype": (PLAIN, Setup(compute=Compute("bfloat16"))),
    "padded_steps": (PLAIN, Setup(recipe=Recipe(padded_steps="count"))),
    "loss_dims": (PLAIN, Setup(recipe=Recipe(loss_dims="real"))),
    **{f"lora.{g}.alpha": (LORA, dataclasses.replace(LORA, spec=ADAPTED.replace(**{f"{g}__lora": LoRA(2, 3.0)}))) for g in ("vision", "trunk", "expert")},
}
UPDATE = {  # decide the update
    **{f"optimizer.{name}": rule(**{name: value}) for name, value in {"b1": 0.5, "b2": 0.5, "eps": 1e-3, "weight_decay": 0.1, "clip_norm": 0.1}.items()},
    "optimizer.clip_norm null": rule(clip_norm=None),
    "ema_decay": Setup(recipe=Recipe(ema_decay=0.5)),
    "ema_decay null": Setup(recipe=Recipe(ema_decay=None)),
}
LEARNS = {f"groups.{group}": Setup(recipe=Recipe(Groups(**{group: "freeze"}))) for group in ("vision", "trunk", "expert", "heads")}  # decide what learns
ROUNDING = {
    "compute.attention": "which kernel computes attention; refused on a CPU, parity/level_8_attention.py",
    "compute.attention_dtype": "of fused attention alone, parity/level_8_attention.py",
    "compute.allow_unsafe": "allows a value of attention_dtype",
    "compute.batch_cameras": "the order of sums; tests/test_batch.py and parity/level_1_activations.py",
    "compute.remat": "memory; what is computed again is equal",
    "grad_accum_steps": "memory; parity/level_4_steps.py shows that the step is the whole batch's",
}


@functools.cache
def inputs() -> tuple[Batch, Draws]:
    """A batch with padded steps and padded dims."""
    return synthetic_batch(SPEC, BATCH, seed=1, token_len=23), make_draws(SPEC, 1, 0, np.arange(BATCH))


@functools.cache
def after_two_steps(setup: Setup) -> TrainState:
    """PyTorch's."""
    engine = load_backend("torch", setup.spec, setup.compute, setup.recipe, device="cpu")
    state = engine.init_state(warm_params(setup.spec).items())
    for lr in (LR, LR / 2):
        state, _ = engine.train_step(state, *inputs(), lr)
    return engine.export_state(state)


@functools.cache
def loss(backend: str, setup: Setup) -> np.ndarray:
    engine = load_backend(backend, setup.spec, setup.compute, setup.recipe, device="cpu")
    return np.asarray(engine.eval_step(engine.init_policy(warm_params(setup.spec).items()), *inputs()).per_sample)


def update(backend: str, recipe: Recipe) -> dict[str, np.ndarray]:
    """A toy tensor and its average after two updates."""
    optimizer = importlib.import_module(f"pi05.{backend}_backend.optimizer")
    if backend == "jax":
        import jax.numpy as lib

        make = scalar = lib.asarray
    else:
        import torch

        make, scalar = (lambda array: torch.nn.Parameter(torch.tensor(array))), torch.tensor
    params: dict[str, Any] = {"w": make(np.linspace(-1, 1, 5, dtype=np.float32))}
    state = optimizer.init_optimizer(params, recipe)
    for scale in (1.0, -0.05):
        gradients = {"w": scalar(scale * np.linspace(0.5, 2, 5, dtype=np.float32))}
        lr = scalar(np.float32(LR)) if backend == "jax" else LR
        params, state, _, _ = optimizer.apply_gradients(params, gradients, scalar(np.float32(1.0)), state, lr, recipe)
    tensors = {"w": params["w"]} | ({} if state.ema is None else {"ema": state.ema["w"]})
    return {name: np.array(array if backend == "jax" else array.detach().numpy()) for name, array in tensors.items()}


def test_every_option_of_a_backend_is_here() -> None:
    names = {f"compute.{field.name}" for field in dataclasses.fields(Compute)} | {f"optimizer.{field.name}" for field in dataclasses.fields(AdamW)}
    names |= {f"groups.{field.name}" for field in dataclasses.fields(Groups)} | {field.name for field in dataclasses.fields(Recipe)} - {"groups", "optimizer"}
    assert names <= LOSS.keys() | UPDATE.keys() | LEARNS.keys() | ROUNDING.keys()


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("name", LOSS)
def test_it_changes_the_loss(backend: str, name: str) -> None:
    before, after = (loss(backend, setup) for setup in LOSS[name])
    assert np.isfinite(after).all() and np.abs(before - after).max() > 1e-4 * np.abs(before).max()


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("name", UPDATE)
def test_it_changes_the_update(backend: str, name: str) -> None:
    before, after = (update(backend, setup.recipe) for setup in (PLAIN, UPDATE[name]))
    assert before.keys() != after.keys() or any(np.abs(before[part] - after[part]).max() > 1e-6 for part in before)


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("name", LEARNS)
def test_it_changes_what_learns(backend: str, name: str) -> None:
    setup = LEARNS[name]
    engine = load_backend(backend, setup.spec, setup.compute, setup.recipe, device="cpu")
    state = engine.export_state(engine.init_state(warm_params(setup.spec).items()))
    assert state.m.keys() == state.v.keys() == state.ema.keys() == setup.recipe.trains(SPEC) != Recipe().trains(SPEC)


@pytest.mark.parametrize("name", [*LOSS, *UPDATE, *LEARNS])
def test_it_changes_two_whole_steps(name: str) -> None:
    before, after = LOSS.get(name) or (PLAIN, (UPDATE | LEARNS)[name])
    ours, theirs = after_two_steps(before), after_two_steps(after)
    served = (ours.served_params(), theirs.served_params())
    assert any((served[0][key] != served[1][key]).any() for key in served[0])
    assert all(np.isfinite(array).all() for array in served[1].values())
