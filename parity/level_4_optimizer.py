"""Level 4: what an update does to weights, moments and average, against the formulas in float64.

A toy tree, so that a thousand updates cost nothing: a tensor with plain gradients, one whose gradients are as small as eps, one
without any gradient, one whose gradient comes and goes. AdamW as in Loshchilov and Hutter 2019, algorithm 2.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pi05.compare import Check, max_error
from pi05.params import philox
from pi05.recipe import AdamW, Recipe
from pi05.schedule import Schedule, learning_rate

from .cases import SEED
from .lab import BACKENDS, to_numpy
from .record import Record
from .tolerances import DECAY_LIMIT, OPTIMIZER_LIMIT

each_backend = pytest.mark.parametrize("backend", BACKENDS)
SHAPES = {"plain": (7, 5), "tiny": (11,), "still": (3, 2), "sometimes": (13,)}
SCHEDULE = Schedule(peak_lr=3e-3, warmup_steps=10, decay_steps=80, decay_lr=1e-4)
RECIPES = {
    "clip never": Recipe(optimizer=AdamW(clip_norm=1e6), ema_decay=0.9),
    "clip sometimes": Recipe(optimizer=AdamW(clip_norm=6.0), ema_decay=None),
    "no clip, decay": Recipe(optimizer=AdamW(weight_decay=0.01, clip_norm=None), ema_decay=0.99),
    "published": Recipe(),
}


@dataclasses.dataclass
class Truth:
    """The state in float64."""

    params: dict[str, np.ndarray]
    m: dict[str, np.ndarray]
    v: dict[str, np.ndarray]
    ema: dict[str, np.ndarray]
    updates: int = 0

    def update(self, gradients: dict[str, np.ndarray], lr: float, recipe: Recipe) -> float:
        """One update; returns the norm before clipping."""
        rule, self.updates = recipe.optimizer, self.updates + 1
        norm = math.sqrt(sum(float((gradient.astype(np.float64) ** 2).sum()) for gradient in gradients.values()))
        scale = 1.0 if rule.clip_norm is None else min(1.0, rule.clip_norm / norm)
        for name, gradient in gradients.items():
            gradient = scale * gradient.astype(np.float64)
            self.m[name] = rule.b1 * self.m[name] + (1 - rule.b1) * gradient
            self.v[name] = rule.b2 * self.v[name] + (1 - rule.b2) * gradient**2
            m, v = self.m[name] / (1 - rule.b1**self.updates), self.v[name] / (1 - rule.b2**self.updates)
            self.params[name] = self.params[name] - lr * (m / (np.sqrt(v) + rule.eps) + rule.weight_decay * self.params[name])
            if recipe.ema_decay is not None:
                self.ema[name] = recipe.ema_decay * self.ema[name] + (1 - recipe.ema_decay) * self.params[name]
        return norm


def start() -> dict[str, np.ndarray]:
    return {name: philox(SEED, "optimizer", *name.encode()).standard_normal(size).astype(np.float32) for name, size in SHAPES.items()}


def gradients(step: int) -> dict[str, np.ndarray]:
    """Gradients of one step, float32; their norm lies around 6."""
    out = {name: philox(SEED, "gradient", step, *name.encode()).standard_normal(size) for name, size in SHAPES.items()}
    out["tiny"] = out["tiny"] * 1e-8
    out["still"] = out["still"] * 0.0
    out["sometimes"] = out["sometimes"] * (step % 3 == 0)
    return {name: value.astype(np.float32) for name, value in out.items()}


class Updates:
    """A backend's optimizer on the toy tree."""

    def __init__(self, backend: str, recipe: Recipe):
        self.module, self.model = (importlib.import_module(f"pi05.{backend}_backend.{name}") for name in ("optimizer", "model"))
        self.recipe, self.params = recipe, self.model.from_numpy(start())
        self.state = self.module.init_optimizer(self.params, recipe)
        self.apply = _compiled(self.module.apply_gradients) if backend == "jax" else self.module.apply_gradients

    def update(self, gradients: dict[str, np.ndarray], lr: float, loss: float = 1.0) -> tuple[float, bool]:
        """One update; returns the norm before clipping and whether all was finite."""
        loss, lr = self.model.from_numpy((np.float32(loss), np.float32(lr)))
        self.params, self.state, norm, finite = self.apply(self.params, self.model.from_numpy(gradients), loss, self.state, lr, self.recipe)
        return float(norm), bool(finite)

    def tensors(self) -> dict[str, np.ndarray]:
        """Weights, moments and average, by kind and name."""
        _, m, v = self.module.read_moments(self.params, self.state)
        kinds = {"params": self.params, "m": m, "v": v, "ema": self.state.ema or {}}
        return to_numpy({f"{kind} {name}": array for kind, part in kinds.items() for name, array in part.items()})


def _compiled(function: Callable) -> Callable:
    import jax

    return jax.jit(function, static_argnums=5)


def run(backend: str, recipe: Recipe, steps: int) -> Iterator[tuple[Updates, Truth, list[Check]]]:
    """Yields the optimizer, the truth, and the checks of the norm and the count, after every step."""
    mine = Updates(backend, recipe)
    zeros = {name: np.zeros(size) for name, size in SHAPES.items()}
    truth = Truth({name: value.astype(np.float64) for name, value in start().items()}, zeros, dict(zeros), dict(start()) if recipe.ema_decay else {})
    for step in range(steps):
        lr = learning_rate(SCHEDULE, step)
        norm, finite = mine.update(gradients(step), lr)
        wanted = truth.update(gradients(step), lr, recipe)
        updates, _, _ = mine.module.read_moments(mine.params, mine.state)
        yield (
            mine,
            truth,
            [
                Check(f"step {step}: norm", abs(norm - wanted) / wanted, OPTIMIZER_LIMIT),
                Check(f"step {step}: updates", abs(updates - truth.updates), 0.0),
                Check(f"step {step}: not finite", float(not finite), 0.0),
            ],
        )


@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("steps", [1, 100])
@each_backend
def test_weights_moments_and_average_follow_the_formulas(record: Record, backend: str, steps: int, recipe_name: str) -> None:
    """Errors in units of the largest value of each tensor: 100 updates may add up 100 roundings of float32."""
    after = list(run(backend, RECIPES[recipe_name], steps))
    mine, truth, _ = after[-1]
    checks = [check for *_, step_checks in after for check in step_checks]
    kinds = {"params": truth.params, "m": truth.m, "v": truth.v, "ema": truth.ema}
    wanted = {f"{kind} {name}": array for kind, part in kinds.items() for name, array in part.items()}
    got, limit = mine.tensors(), DECAY_LIMIT if RECIPES[recipe_name].optimizer.weight_decay > 1e-3 else OPTIMIZER_LIMIT
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        checks.append(Check(name, max_error(got[name], want) / (np.abs(want).max() or 1.0), limit))
    record.settle("L4", f"{recipe_name}, {steps} updates {backend}", checks)


@each_backend
def test_clipping_has_no_hidden_epsilon(record: Record, backend: str) -> None:
    """A norm as small as such an epsilon, twice the limit: every gradient is halved."""
    mine, small = Updates(backend, Recipe(optimizer=AdamW(clip_norm=1e-6))), gradients(0)
    norm = math.sqrt(sum(float((gradient.astype(np.float64) ** 2).sum()) for gradient in small.values()))
    small = {name: (gradient * 2e-6 / norm).astype(np.float32) for name, gradient in small.items()}
    mine.update(small, 1e-3)
    tensors, checks = mine.tensors(), []
    for name, gradient in small.items():
        want = 0.1 * 0.5 * gradient.astype(np.float64)
        checks.append(Check(f"m {name}", max_error(tensors[f"m {name}"], want) / (np.abs(want).max() or 1.0), OPTIMIZER_LIMIT))
    record.settle("L4", f"clip of a small norm {backend}", checks)


@each_backend
def test_a_tensor_that_never_has_a_gradient_moves_by_its_decay_only(record: Record, backend: str) -> None:
    *_, (mine, _, _) = run(backend, RECIPES["no clip, decay"], 20)
    want = start()["still"].astype(np.float64) * np.prod([1 - 0.01 * learning_rate(SCHEDULE, step) for step in range(20)])
    record.settle("L4", f"decay alone {backend}", [Check("params still", max_error(mine.tensors()["params still"], want), OPTIMIZER_LIMIT)])


@pytest.mark.parametrize("fault", ["loss", "gradient"])
@each_backend
def test_a_step_that_is_not_finite_changes_no_bit(record: Record, backend: str, fault: str) -> None:
    mine, bad = Updates(backend, RECIPES["published"]), gradients(3)
    mine.update(gradients(0), 1e-2)
    before = mine.tensors()
    if fault == "gradient":
        bad["sometimes"][4] = np.nan
    norm, finite = mine.update(bad, 1e-2, loss=np.nan if fault == "loss" else 1.0)
    changed = [Check(name, float((mine.tensors()[name].view(np.uint32) != array.view(np.uint32)).sum()), 0.0) for name, array in before.items()]
    updates, _, _ = mine.module.read_moments(mine.params, mine.state)
    record.settle("L4", f"{fault} not finite {backend}", [Check("taken as finite", float(finite), 0.0), Check("updates", abs(updates - 1), 0.0), *changed])
    assert math.isnan(norm) == (fault == "gradient")


@each_backend
def test_a_restored_optimizer_goes_on_bit_for_bit(record: Record, backend: str) -> None:
    recipe, first = RECIPES["published"], Updates(backend, RECIPES["published"])
    for step in range(5):
        first.update(gradients(step), 1e-2)
    updates, m, v = first.module.read_moments(first.params, first.state)
    second = Updates(backend, recipe)
    copies = [first.model.from_numpy(to_numpy(part)) for part in (first.params, m, v, first.state.ema)]
    second.params, second.state = copies[0], first.module.restore_optimizer(copies[0], recipe, updates, *copies[1:])
    for step in range(5, 8):
        first.update(gradients(step), 1e-2)
        second.update(gradients(step), 1e-2)
    want = first.tensors()
    record.settle("L4", f"restored {backend}", [Check(name, float((got != want[name]).sum()), 0.0) for name, got in second.tensors().items()])
