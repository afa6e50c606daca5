"""What is in the goldens: the truth of every level, by NumPy in float64 and from seeds alone."""

import functools
import hashlib
from collections.abc import Callable, Iterator

import numpy as np

from pi05.kernel_check import Scene as AttentionScene
from pi05.kernel_check import Shape, exact_attention, make_case
from pi05.params import TABLE, philox, shape
from pi05.schedule import learning_rate
from pi05.spec import Compute

from .. import reference, reference_augment
from ..cases import SCENES, SEED, Scene, scene
from ..lab import ReferenceRun
from ..level_0_augment import PRESETS, draw, pictures
from ..level_4_optimizer import RECIPES, SCHEDULE, Truth, gradients, start

WHOLE = 512  # numbers up to which a tensor is stored as it is
PROJECTIONS = 16
DIRECTIONS = 3
GRADIENT_SCENES = ("ragged", "peaky")
UPDATES = (1, 10, 100)
ATTENTION = {"self": Shape(130, 130, 2, 1, 64), "suffix": Shape(10, 138, 2, 1, 256), "vision": Shape(25, 25, 5, 5, 76, padded=False)}
ATTENTION_SCENES = ("gauss", "common key mean", "tiny cotangent")
NOISE = "vision.layers.k_proj.bias"  # softmax ignores it: its gradient is rounding alone

Tensors = dict[str, np.ndarray]


def summarise(name: str, array: np.ndarray) -> Tensors:
    """A tensor under `name` as it is stored: whole, or as "name max", "name norm" and "name projections" [16].

    An error e moves every projection by about ||e||, wherever it is and whatever its mean: a moved row, a swapped axis, a single element.
    """
    array = np.asarray(array)
    if array.size <= WHOLE or array.dtype.kind in "bi":
        return {name: array}
    flat = array.astype(np.float64).ravel()
    signs = np.where(np.unpackbits(np.frombuffer(philox(SEED, "signs", *name.encode()).bytes(PROJECTIONS * -(-flat.size // 8)), np.uint8)), 1.0, -1.0)
    projections = signs.reshape(PROJECTIONS, -1)[:, : flat.size] @ flat
    return {f"{name} max": np.abs(flat).max()[None], f"{name} norm": np.linalg.norm(flat)[None], f"{name} projections": projections}


def summaries(tensors: Tensors) -> Tensors:
    """`summarise` of each tensor."""
    return {key: value for name, array in tensors.items() for key, value in summarise(name, array).items()}


def thin(images: np.ndarray) -> np.ndarray:
    """Every sixth pixel of images [B, C, Y, X, 3] in both directions."""
    return images[:, :, ::6, ::6]


def directions(name: str, size: tuple[int, ...]) -> Iterator[np.ndarray]:
    """The directions along which the gradient of the canonical tensor `name` is stored."""
    for index in range(DIRECTIONS):
        yield philox(SEED, "golden direction", index, *name.encode()).standard_normal(size)


def attention_cases() -> Iterator[tuple[str, AttentionScene, Tensors]]:
    """Name, inputs and what plain bfloat16 attention makes of them."""
    for kind, size in ATTENTION.items():
        for scene_name in ATTENTION_SCENES:
            case, _, plain = make_case(scene_name, size)
            yield f"{kind}, {scene_name}", case, plain


def _augmentation() -> Iterator[tuple[str, np.ndarray]]:
    for preset in PRESETS:
        yield preset, thin(reference_augment.augment(pictures(), **vars(draw(preset))))


def _activations() -> Iterator[tuple[str, np.ndarray]]:
    for name in SCENES:
        for key, value in summaries(_truth(name).activations).items():
            yield f"{name}/{key}", value


def _outputs() -> Iterator[tuple[str, np.ndarray]]:
    for name in SCENES:
        case, ops = scene(name), reference.NumpyOps(np.float64)
        loss = reference.loss(case.params, case.spec, case.batch, case.draws, ops=ops)
        tensors = {
            "per_sample": loss["per_sample"],
            "per_dim": loss["per_dim"],
            "velocity": _truth(name).activations["velocity"],
            "logits": _truth(name).logits,
        }
        for key, value in summaries(tensors).items():
            yield f"{name}/{key}", value


def _derivatives() -> Iterator[tuple[str, np.ndarray]]:
    """By complex steps, without any automatic differentiation."""
    for name in GRADIENT_SCENES:
        case = scene(name)
        for row in TABLE:
            if row.name != NOISE:
                along = directions(row.name, shape(row, case.spec))
                yield f"{name}/{row.name}", np.array([_derivative(case, row.name, direction) for direction in along])


def _derivative(case: Scene, name: str, direction: np.ndarray) -> float:
    return reference.directional_derivative(case.params, case.spec, case.batch, case.draws, name, direction)


def _updates() -> Iterator[tuple[str, np.ndarray]]:
    for recipe_name, recipe in RECIPES.items():
        zeros = {name: np.zeros_like(value, np.float64) for name, value in start().items()}
        truth = Truth({name: value.astype(np.float64) for name, value in start().items()}, dict(zeros), dict(zeros), dict(start()) if recipe.ema_decay else {})
        for step in range(max(UPDATES)):
            truth.update(gradients(step), learning_rate(SCHEDULE, step), recipe)
            if step + 1 in UPDATES:
                for kind in ("params", "m", "v", "ema"):
                    for name, value in getattr(truth, kind).items():
                        yield f"{recipe_name}, {step + 1} updates/{kind} {name}", np.asarray(value, np.float64)


def _actions() -> Iterator[tuple[str, np.ndarray]]:
    for name in SCENES:
        for step, x in enumerate(_truth(name).actions):
            for key, value in summarise(f"x after step {step + 1}", x).items():
                yield f"{name}/{key}", value


def _attention() -> Iterator[tuple[str, np.ndarray]]:
    for name, case, _ in attention_cases():
        for key, value in summaries(exact_attention(case)).items():
            yield f"{name}/{key}", value


DERIVATIONS: dict[str, Callable[[], Iterator[tuple[str, np.ndarray]]]] = {
    "level_0": _augmentation,
    "level_1": _activations,
    "level_2": _outputs,
    "level_3": _derivatives,
    "level_4": _updates,
    "level_6": _actions,
    "level_8": _attention,
}


def derive(level: str) -> Tensors:
    """The goldens of one of DERIVATIONS: tensors by "scene/name"."""
    return {name: np.ascontiguousarray(value) for name, value in DERIVATIONS[level]()}


def input_hashes() -> dict[str, dict[str, str]]:
    """sha256 of what goes into every scene, by scene and part: names, dtypes, shapes and bytes."""
    return {name: {part: _hash(arrays) for part, arrays in _inputs(scene(name)).items()} for name in SCENES}


def _inputs(case: Scene) -> dict[str, Tensors]:
    observation, batch = vars(case.batch.observation), dict(vars(case.batch))
    batch.pop("observation")
    parts = {"params": case.params, "observation": observation, "batch": batch, "draws": vars(case.draws)}
    return {part: {name: value for name, value in arrays.items() if isinstance(value, np.ndarray)} for part, arrays in parts.items()}


def _hash(arrays: Tensors) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


@functools.cache
def _truth(name: str) -> ReferenceRun:
    return ReferenceRun(scene(name), Compute("float64"))
