"""Level 10: code that is not ours. transformers' SigLIP and Gemma modules and LeRobot's Pi0.5 network judge both backends.

In float64, where an honest second writing differs by 1e-13 and any difference of meaning by more than 1e-7, and in float32, which
is what LeRobot's users run. LeRobot counts padded action steps, so its scene has none.
"""

import dataclasses
import functools

import numpy as np
import pytest

from pi05.batch import make_draws, synthetic_batch
from pi05.compare import Check
from pi05.params import dead_params, philox, read, write
from pi05.spec import Compute, ModelSpec

from . import oracles
from .cases import SEED, Scene, scene, warm_params
from .lab import BACKENDS, NUM_STEPS, RUNS
from .level_3_gradients import gradient_checks
from .record import Record
from .tolerances import judge

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_precision = pytest.mark.parametrize("dtype", ["float64", "float32"])


@functools.cache
def lerobot_scene(num_kv_heads: int) -> Scene:
    """Missing cameras and padded prompts, but whole chunks."""
    spec = oracles.LEROBOT_SPEC.replace(trunk__num_kv_heads=num_kv_heads, expert__num_kv_heads=num_kv_heads)
    batch = synthetic_batch(spec, 3, seed=SEED, token_len=23, padded_actions=False)
    return Scene(f"lerobot, {num_kv_heads} kv heads", spec, warm_params(spec, sharpness=2.0), batch, make_draws(spec, SEED, 0, np.arange(3)), "everything")


@functools.cache
def lerobot_says(num_kv_heads: int, dtype: str) -> oracles.LeRobotOutput:
    case = lerobot_scene(num_kv_heads)
    return oracles.lerobot(case.spec, case.params, case.batch, case.draws, NUM_STEPS, dtype)


# Two key heads cost JAX one more compilation and test only their order, which the other levels compare between the backends.
@pytest.mark.parametrize(
    ("backend", "dtype", "num_kv_heads"), [("jax", "float64", 1), ("torch", "float64", 1), ("torch", "float64", 2), ("torch", "float32", 1)]
)
def test_lerobot_agrees_on_velocity_loss_gradients_and_actions(record: Record, backend: str, dtype: str, num_kv_heads: int) -> None:
    case, theirs = lerobot_scene(num_kv_heads), lerobot_says(num_kv_heads, dtype)
    ours = RUNS[backend](case, Compute(dtype), padded_steps="count")
    loss = theirs["loss_per_element"]
    checks = [
        judge("L10", "velocity", ours.activations["velocity"], theirs["velocity"], dtype),
        judge("L10", "per_sample", ours.loss["per_sample"], loss.mean((1, 2)), dtype),
        judge("L10", "per_dim", ours.loss["per_dim"], loss.mean((0, 1)), dtype),
        judge("L10", "actions", ours.actions[-1], theirs["actions"], dtype),
    ]
    want = dict(write(theirs["grads"].items(), case.spec, "torch"))
    record.settle("L10", f"LeRobot {num_kv_heads} kv {dtype} {backend}", checks + gradient_checks(ours.gradients, want, dead_params(case.spec), dtype))


def test_lerobot_itself_has_no_gradient_where_the_table_says_so(record: Record) -> None:
    case, theirs = lerobot_scene(1), lerobot_says(1, "float64")
    cut = {name for name, reason in dead_params(case.spec).items() if reason == "no path to the loss"}
    joint = {"trunk.layers.2.q_proj.weight"}  # attention is one joint call there, so this one gets exact zeros instead of none
    record.settle("L10", "LeRobot's missing gradients", [Check("names that differ", float(len(set(theirs["no_grad"]) ^ (cut - joint))), 0.0)])


@each_precision
@each_backend
def test_transformers_siglip_agrees_on_tokens_and_gradients(record: Record, backend: str, dtype: str) -> None:
    case, rng = scene("peaky"), philox(SEED, "siglip")
    images = rng.uniform(-1, 1, (4, case.spec.vision.image_size, case.spec.vision.image_size, 3)).astype(np.float32)
    cotangent = rng.standard_normal((4, case.spec.vision.num_patches, case.spec.trunk.width))
    want, want_gradients = oracles.siglip(case.spec, case.params, images, cotangent, dtype)
    got, gradients = PULLBACKS[backend](case, dtype, lambda model, to, _: model.vision(to(images)[:, None])[0][:, 0], cotangent)
    checks = [judge("L10", "vision.tokens", got, want, dtype)] + layer_checks(case.spec, gradients, want_gradients, dtype)
    record.settle("L10", f"transformers SigLIP {dtype} {backend}", checks)


@each_precision
@each_backend
def test_transformers_gemma_agrees_on_every_trunk_layer(record: Record, backend: str, dtype: str) -> None:
    """Positions up to 900 with gaps, invalid keys at both ends, grouped key heads, sharp attention."""
    case, rng = scene("peaky"), philox(SEED, "gemma")
    case = dataclasses.replace(case, spec=case.spec.replace(vision__image_size=224, max_token_len=200))
    x, cotangent = (rng.standard_normal((2, 19, case.spec.trunk.width)).astype(np.float32) for _ in range(2))
    valid = np.ones((2, 19), bool)
    valid[0, :4], valid[1, 11:] = False, False
    positions = np.cumsum(rng.integers(1, 48, (2, 19)), 1)
    checks = []
    for layer in range(case.spec.trunk.depth):
        want, want_gradients = oracles.gemma_layer(case.spec, case.params, layer, x, positions, valid, cotangent, dtype)

        def forward(model, to, backend_modules, layer=layer):
            layers, gemma = backend_modules
            angles = layers.rotation(to(positions), case.spec.trunk.head_dim, case.spec.num_positions, to(x).dtype)
            stream = gemma.Stream(to(x), angles, to(valid))
            one = nth_layer(model.trunk.layers, layer)
            return gemma.block((one, None), (stream.x, None), stream, None, None, None, Compute(dtype))[0][0]

        got, gradients = PULLBACKS[backend](case, dtype, forward, cotangent, image_free=True)
        ours = {name: gradients[name][layer] for name in want_gradients}
        checks += [judge("L10", f"trunk.layers.{layer}.out", got, want, dtype)]
        checks += [judge("L10", f"{name}[{layer}]", ours[name], want_gradients[name], dtype) for name in want_gradients]
    record.settle("L10", f"transformers Gemma {dtype} {backend}", checks)


def layer_checks(spec: ModelSpec, got: dict[str, np.ndarray], want: dict[str, np.ndarray], dtype: str) -> list[Check]:
    """Gradient checks of the canonical tensors in `want`, layer by layer."""
    zeros = {name: np.zeros_like(value) for name, value in got.items()}
    first, second = (dict(write((zeros | {name: side[name] for name in want}).items(), spec, "torch")) for side in (got, want))
    names = [name for name in first if second[name].any() or first[name].any()]
    return gradient_checks({name: first[name] for name in names}, {name: second[name] for name in names}, dead_params(spec), dtype)


def nth_layer(layers: object, index: int) -> object:
    """One layer of a backend's stack."""
    if hasattr(layers, "__getitem__"):
        return layers[index]
    import jax
    from flax import nnx

    graph, state = nnx.split(layers)
    return nnx.merge(graph, jax.tree.map(lambda array: array[index], state))


def _parameters(case: Scene, dtype: str, image_free: bool) -> dict[str, np.ndarray]:
    params = dict(case.params)
    if image_free:  # the spec was given more positions; the position embedding follows, unused
        params["vision.pos_embed"] = np.zeros((case.spec.vision.num_patches, case.spec.vision.width), np.float32)
    return {name: value.astype(dtype) for name, value in params.items()}


def _jax_pullback(case, dtype, forward, cotangent, *, image_free=False):
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from pi05.jax_backend import gemma, layers
    from pi05.jax_backend.model import make_model

    with jax.enable_x64(dtype == "float64"):
        graph, state = nnx.split(make_model(case.spec, Compute(dtype), _parameters(case, dtype, image_free).items()))
        to = lambda array: jnp.array(array, dtype if array.dtype.kind == "f" else None)  # noqa: E731
        out, pull = jax.vjp(lambda state: forward(nnx.merge(graph, state), to, (layers, gemma)), state)
        (gradients,) = pull(to(cotangent).astype(out.dtype))
        named = {".".join(path): np.asarray(value[...]) for path, value in nnx.to_flat_state(gradients)}
        return np.asarray(out), dict(read(named, case.spec, "jax"))


def _torch_pullback(case, dtype, forward, cotangent, *, image_free=False):
    import torch

    from pi05.torch_backend import gemma, layers
    from pi05.torch_backend.model import make_model

    model = make_model(case.spec, Compute(dtype), _parameters(case, dtype, image_free).items())
    to = lambda array: torch.tensor(array, dtype=getattr(torch, dtype) if array.dtype.kind == "f" else None)  # noqa: E731
    out = forward(model, to, (layers, gemma))
    out.backward(to(cotangent))
    named = {name: (torch.zeros_like(p) if p.grad is None else p.grad).cpu().numpy() for name, p in model.named_parameters()}
    return out.detach().cpu().numpy(), dict(read(named, case.spec, "torch"))


PULLBACKS = {"jax": _jax_pullback, "torch": _torch_pullback}
