"""Level 4: a whole training step of both backends, for every way to train: all tensors, groups frozen, adapters, accumulated gradients.

The loss and the update come from the same code as in a run (pi05/backend.py); here both backends are given the same weights, batches
and learning rates, and must end at the same weights, moments and average.
"""

import dataclasses

import numpy as np
import pytest

from pi05.backend import Backend, load_backend
from pi05.batch import make_draws, synthetic_batch
from pi05.compare import Check, max_error, relative_error
from pi05.params import rows
from pi05.recipe import AdamW, Groups, Recipe
from pi05.spec import Compute, LoRA, ModelSpec
from pi05.train_state import TrainState

from .cases import SEED, warm_params
from .lab import BACKENDS, Lab
from .record import Record
from .tolerances import F32_LIMIT, STEPS_LIMIT

TINY = ModelSpec.tiny()
ADAPTED = TINY.replace(vision__lora=LoRA(2, 2.0), trunk__lora=LoRA(4, 8.0), expert__lora=LoRA(3, 6.0))
ALL_LORA = Groups(vision="lora", trunk="lora", expert="lora", heads="train")
NOISE = {"vision.layers.k_proj.bias"}  # softmax ignores it: its gradient is rounding alone (level 3)
STEPS, BATCH, LR = 3, 4, 1e-3


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to train."""

    spec: ModelSpec
    recipe: Recipe


# AdamW turns a gradient that is only rounding noise into a step of full size: eps lies above that noise here, so that weights can be compared.
# Nothing is clipped: clipping and AdamW would both hide a gradient that is too large by a factor.
_RULE = AdamW(eps=1e-4, clip_norm=None)
WAYS = {
    "all": Way(TINY, Recipe(optimizer=_RULE)),
    "accumulated": Way(TINY, Recipe(optimizer=_RULE, grad_accum_steps=2, ema_decay=None)),
    "frozen": Way(TINY, Recipe(optimizer=_RULE, groups=Groups(vision="freeze", trunk="freeze"))),
    "lora": Way(ADAPTED, Recipe(optimizer=_RULE, groups=ALL_LORA)),
}
each_way = pytest.mark.parametrize("way", WAYS)


class Trained:
    """Trains each way in each backend once a session."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, str], tuple[list[float], TrainState]] = {}

    def run(self, backend: str, way: str) -> tuple[list[float], TrainState]:
        """The losses of a few steps, and the state after them."""
        if (backend, way) not in self._states:
            engine = make_backend(backend, way)
            state, losses = engine.init_state(warm_params(engine.spec).items()), []
            for step in range(STEPS):
                batch = synthetic_batch(engine.spec, BATCH, seed=step, token_len=23)
                state, metrics = engine.train_step(state, batch, make_draws(engine.spec, SEED, step, np.arange(BATCH)), LR)
                losses.append(metrics.fetch()["loss"])
            self._states[backend, way] = losses, engine.export_state(state)
        return self._states[backend, way]


def make_backend(backend: str, way: str) -> Backend:
    return load_backend(backend, WAYS[way].spec, Compute("float32"), WAYS[way].recipe, device="cpu")


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained()


@each_way
def test_both_backends_take_the_same_steps(trained: Trained, record: Record, way: str) -> None:
    (jax_losses, jax_state), (torch_losses, torch_state) = (trained.run(backend, way) for backend in BACKENDS)
    checks = [Check(f"loss {step}", abs(a - b) / b, F32_LIMIT) for step, (a, b) in enumerate(zip(jax_losses, torch_losses, strict=True))]
    for kind in ("params", "m", "v", "ema"):
        first, second = getattr(jax_state, kind) or {}, getattr(torch_state, kind) or {}
        assert first.keys() == second.keys()
        checks += [Check(f"{kind} {name}", _error(kind, first[name], second[name]), STEPS_LIMIT) for name in first if name not in NOISE]
    record.settle("L4", f"{STEPS} steps, {way}", checks)
    assert (jax_state.step, jax_state.updates) == (torch_state.step, torch_state.updates) == (STEPS, STEPS)


@each_way
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_learn_keeps_every_bit_and_has_no_moments(trained: Trained, record: Record, backend: str, way: str) -> None:
    before, (_, state) = warm_params(WAYS[way].spec), trained.run(backend, way)
    learned = WAYS[way].recipe.trains(WAYS[way].spec)
    assert state.m.keys() == state.v.keys() == learned
    assert (state.ema or {}).keys() == (learned if WAYS[way].recipe.ema_decay is not None else set())
    checks = [Check(f"{name} (bits)", float((state.params[name] != before[name]).sum()), 0.0) for name in before if name not in learned]
    still = [name for name in learned if name not in NOISE and not (state.params[name] != before[name]).any()]
    assert set(still) <= {row.name for row in rows(TINY) if row.name.startswith(("trunk.final_norm", "trunk.layers."))}, still
    record.settle("L4", f"frozen, {way} {backend}", [*checks, Check("tensors with moments", float(len(state.m) - len(learned)), 0.0)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_accumulation_is_the_whole_batch(trained: Trained, record: Record, backend: str) -> None:
    whole, parts = (trained.run(backend, way) for way in ("all", "accumulated"))
    checks = [Check(f"loss {step}", abs(a - b) / b, F32_LIMIT) for step, (a, b) in enumerate(zip(whole[0], parts[0], strict=True))]
    for kind in ("m", "v", "params"):
        checks += [
            Check(f"{kind} {name}", _error(kind, getattr(parts[1], kind)[name], array), STEPS_LIMIT)
            for name, array in getattr(whole[1], kind).items()
            if name not in NOISE
        ]
    record.settle("L4", f"accumulation {backend}", checks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_are_the_product_added_to_their_weight(lab: Lab, record: Record, backend: str) -> None:
    """A model with adapters has the loss of the model whose weights are W + (alpha / rank) A B (Hu et al. 2022, eq. 3)."""
    params = warm_params(ADAPTED)
    merged = {name: array for name, array in params.items() if ".lora_" not in name}
    for row in rows(TINY):
        if row.lora:
            stem, array = row.name.removesuffix(".weight"), merged[row.name]
            a, b = params[f"{stem}.lora_a"], params[f"{stem}.lora_b"]
            rank = a.shape[-1]
            product = np.einsum("lit,lto->lio", a.reshape(len(a), -1, rank).astype(np.float64), b.reshape(len(b), rank, -1).astype(np.float64))
            merged[row.name] = array + (ADAPTED.lora(row.group).scale * product).reshape(array.shape).astype(np.float32)
    batch, draws = synthetic_batch(TINY, BATCH, seed=SEED, token_len=23), make_draws(TINY, SEED, 0, np.arange(BATCH))
    losses = []
    for way, tensors in (("lora", params), ("all", merged)):
        engine = make_backend(backend, way)
        losses.append(engine.eval_step(engine.init_state(tensors.items()), batch, draws).per_sample)
    plain = make_backend(backend, "all").eval_step(make_backend(backend, "all").init_state({n: params[n] for n in merged}.items()), batch, draws).per_sample
    assert relative_error(losses[1], plain) > 0.01, "the adapters change nothing: this test shows nothing"
    record.settle("L4", f"adapters merged {backend}", [Check("per-sample loss", relative_error(losses[0], losses[1]), F32_LIMIT)])


def _error(kind: str, got: np.ndarray, want: np.ndarray) -> float:
    """Weights and averages in units of what three full-size steps move them; moments in units of their largest value."""
    return max_error(got, want) / LR if kind in ("params", "ema") else max_error(got, want) / max(float(np.abs(want).max()), 1e-7)
