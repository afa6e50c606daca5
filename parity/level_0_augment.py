"""Level 0: augmentation. The same pixels from the same draws in both backends, and as openpi has them; draws that belong to a sample.

Errors are absolute, in [-1, 1] as the model sees images.
"""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from pi05.batch import AugmentDraws
from pi05.compare import Check, max_error
from pi05.data import augment as presets
from pi05.params import philox

from . import reference_augment
from .cases import SEED, scene
from .lab import BACKENDS, Lab, to_numpy
from .record import Record
from .tolerances import AUGMAX_LIMIT, AUGMENT_LIMITS, F64_LIMITS

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "other_0_rgb")
PRESETS = ("openpi", "standard")
POSITIONS = np.array([11, 4, 7, 5])
EDGE = 48

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_precision = pytest.mark.parametrize("dtype", ["float64", "float32"])
each_preset = pytest.mark.parametrize("preset", PRESETS)


def draw(preset: str, positions: np.ndarray = POSITIONS, edge: int = EDGE) -> AugmentDraws:
    return presets.draw_augmentation(preset, CAMERAS, edge, seed=SEED, epoch=1, positions=positions)


def pictures() -> np.ndarray:
    """uint8[4, 3, EDGE, EDGE, 3]: noise, the hardest case for bilinear reading, with patches of exact black, grey and white."""
    images = philox(SEED, "pictures").integers(0, 256, (len(POSITIONS), len(CAMERAS), EDGE, EDGE, 3), np.uint8)
    for corner, grey in ((4, 0), (20, 255), (34, 128)):
        images[:, :, corner : corner + 10, corner : corner + 10] = grey
    return images


def apply(backend: str, dtype: str, images: np.ndarray, draws: AugmentDraws) -> np.ndarray:
    """The backend's augment; JAX compiles it, as training does."""
    module, model = (importlib.import_module(f"pi05.{backend}_backend.{name}") for name in ("augment", "model"))
    if backend == "torch":
        import torch

        return to_numpy((module.augment(model.from_numpy(images), model.from_numpy(draws), getattr(torch, dtype)),))[0]
    import jax

    with jax.enable_x64(dtype == "float64"):
        compiled = jax.jit(lambda images, draws: module.augment(images, draws, jax.numpy.dtype(dtype)))
        return np.array(compiled(model.from_numpy(images), model.from_numpy(draws)))


def checks_of_images(got: np.ndarray, want: np.ndarray, limit: float) -> list[Check]:
    return [Check(f"sample {b}, camera {c}", max_error(got[b, c], want[b, c]), limit) for b, c in np.ndindex(got.shape[:2])]


@each_preset
@each_precision
@each_backend
def test_augmented_images_match_the_truth(record: Record, backend: str, dtype: str, preset: str) -> None:
    images, draws = pictures(), draw(preset)
    changed = draws.hsv[..., 1] != 1
    assert preset == "standard" or 0 < changed.sum() < changed.size, "both kinds of openpi's images are there"
    got = apply(backend, dtype, images, draws)
    assert got.dtype == dtype and got.shape == images.shape and got.min() >= -1 and got.max() <= 1
    checks = checks_of_images(got, reference_augment.augment(images, **vars(draws)), AUGMENT_LIMITS[dtype])
    record.settle("L0", f"augmented images {preset} {dtype} {backend}", checks)


@each_backend
def test_scaled_images_are_augmented_like_bytes(record: Record, backend: str) -> None:
    """Float images in [-1, 1] are taken to [0, 1] first: beyond their border lies black, not mid-grey."""
    images, draws = pictures(), draw("openpi")
    scaled = (images / 255.0 * 2 - 1).astype(np.float32)
    want = reference_augment.augment(images, **vars(draws))
    record.settle("L0", f"augmented float images {backend}", checks_of_images(apply(backend, "float32", scaled, draws), want, AUGMENT_LIMITS["float32"]))


@each_backend
def test_a_change_of_every_kind_in_one_image_matches_the_truth(record: Record, backend: str) -> None:
    """No preset uses hsv and colour at once, or a shear, a flip and a map that leaves the image altogether; the order of changes is fixed all the same."""
    images, draws = pictures(), draw("openpi")
    rng = np.random.default_rng(0)
    shape = draws.hsv.shape[:2]
    affine = draws.affine + rng.uniform(-0.2, 0.2, (*shape, 2, 3)).astype(np.float32)
    affine[0, 0], affine[1, 0], affine[2, 0] = [[1, 0, 0], [0, -1, EDGE - 1]], [[0, 1, -0.5], [1, 0, 0.25]], [[1, 0, EDGE], [0, 1, 0]]
    hsv = np.stack([rng.uniform(-1, 1, shape), rng.uniform(0.3, 3, shape), rng.uniform(-2, 2, shape)], -1).astype(np.float32)
    every = AugmentDraws(affine=affine, hsv=hsv, colour=rng.uniform(0, 2, (*shape, 3)).astype(np.float32))
    want = reference_augment.augment(images, **vars(every))
    record.settle("L0", f"every change at once {backend}", checks_of_images(apply(backend, "float64", images, every), want, AUGMENT_LIMITS["float64"]))


@each_backend
@pytest.mark.parametrize("kind", ["moved", "still"])
def test_the_openpi_preset_is_what_augmax_does(record: Record, backend: str, kind: str) -> None:
    """The same numbers give the pixels that augmax 0.4.1 gave (scripts/make_augmax_golden.py): its places, its black, its colours, its half that stays."""
    with np.load(Path(__file__).parent / "augmax.npz") as golden:
        image, want, numbers = golden["image"], golden[kind], golden[f"{kind}_numbers"]
    angle, down, right, brightness, contrast, hue, changes = numbers.T
    assert 0 < changes.sum() < len(changes)
    signed = np.stack([angle, down, right, np.where(changes, -1, 1), brightness, contrast, hue], -1)
    camera = {"moved": "base_0_rgb", "still": "left_wrist_0_rgb"}[kind]
    with mock.patch.object(presets, "uniforms", lambda size, seed, stream, epoch, position: (signed[position] + 1) / 2):
        draws = presets.draw_augmentation("openpi", (camera,), image.shape[0], seed=0, epoch=0, positions=np.arange(len(want)))
    got = apply(backend, "float32", np.broadcast_to(image, (len(want), 1, *image.shape)).copy(), draws)
    record.settle("L0", f"as augmax, {kind} cameras {backend}", checks_of_images(got, 2 * want[:, None] - 1, AUGMAX_LIMIT))


@each_backend
def test_draws_that_change_nothing_change_no_bit(record: Record, backend: str) -> None:
    """Compiled or not, no pixel in [0, 1] changes; run one operation at a time, the scaled image is the model's own, to the bit."""
    images, draws = pictures(), AugmentDraws.identity(len(POSITIONS), len(CAMERAS))
    module, model, layers = (importlib.import_module(f"pi05.{backend}_backend.{name}") for name in ("augment", "model", "layers"))
    pixels = images.astype(np.float32) / 255
    checks = []
    for name, numbers in {"resample": draws.affine, "shift_hsv": draws.hsv, "adjust_colour": draws.colour}.items():
        got = _compiled(backend, getattr(module, name))(model.from_numpy(pixels), model.from_numpy(numbers))
        checks.append(Check(name, max_error(*to_numpy((got, pixels))), 0.0))
    dtype = model.from_numpy(pixels).dtype
    whole = module.augment(model.from_numpy(images), model.from_numpy(draws), dtype)
    checks.append(Check("augment", max_error(*to_numpy((whole, layers.cast(model.from_numpy(images), dtype) / 255 * 2 - 1))), 0.0))
    record.settle("L0", f"identity {backend}", checks)


def _compiled(backend: str, function: Callable) -> Callable:
    if backend == "torch":
        return function
    import jax

    return jax.jit(function)


@each_preset
@each_backend
def test_the_loss_is_that_of_the_augmented_images(lab: Lab, record: Record, backend: str, preset: str) -> None:
    """In training, and nowhere else: the model given the reference's images has the same loss; each sample has its own draws."""
    case, run = scene("ragged"), lab.results(backend, "float64", "ragged")
    images = case.batch.observation.images
    drawn = presets.draw_augmentation(preset, CAMERAS, images.shape[2], seed=SEED, epoch=1, positions=POSITIONS[: len(images)])
    want = reference_augment.augment(images, **vars(drawn))

    def losses(model, batch, draws):
        from_numpy = run.module("model").from_numpy
        augmented = model.loss(batch, dataclasses.replace(draws, augment=from_numpy(drawn))).per_sample
        shown = dataclasses.replace(batch, observation=dataclasses.replace(batch.observation, images=from_numpy(want)))
        return augmented, model.loss(shown, draws).per_sample, model.loss(batch, draws).per_sample

    got, truth, plain = run.call(losses)
    assert (np.abs(truth - plain) > 1e-6).all(), "augmentation reaches the loss of every sample"
    checks = [Check(f"loss of sample {b}", float(abs(got[b] / truth[b] - 1)), F64_LIMITS["L2"]) for b in range(len(got))]
    record.settle("L0", f"loss under augmentation {preset} {backend}", checks)


@each_preset
def test_draws_belong_to_a_sample_not_to_its_batch(record: Record, preset: str) -> None:
    together = draw(preset)
    alone = [draw(preset, POSITIONS[i : i + 1]) for i in range(len(POSITIONS))]
    checks = [
        Check(f"{name} of sample {i}", max_error(getattr(together, name)[i], getattr(one, name)[0]), 0.0) for i, one in enumerate(alone) for name in vars(one)
    ]
    record.settle("L0", f"draws {preset}", checks)
    assert len({one.affine.tobytes() for one in alone}) == len(POSITIONS)


def test_no_gradient_is_computed_for_images() -> None:
    """Weights are all that learns: torch records nothing, and JAX's program never scatters into an array of the images' size, as a gradient of a read would."""
    import jax
    import torch

    case = scene("ragged")
    images, draws = case.batch.observation.images, AugmentDraws.identity(*case.batch.observation.images.shape[:2])
    for_torch = importlib.import_module("pi05.torch_backend.model").from_numpy((images, draws))
    assert not importlib.import_module("pi05.torch_backend.augment").augment(*for_torch, torch.float32).requires_grad
    augment = importlib.import_module("pi05.jax_backend.augment").augment

    def loss(weight, scaled):
        return ((augment(scaled, draws, jax.numpy.float32) * weight) ** 2).sum()

    scaled = images.astype(np.float32) / 255 * 2 - 1
    assert "scatter" not in str(jax.make_jaxpr(jax.grad(loss))(2.0, scaled))
    assert "scatter" in str(jax.make_jaxpr(jax.grad(loss, argnums=1))(2.0, scaled)), "it would be seen"
