"""Level 2: velocity, loss per sample and per dim, token logits; and what must not change any of them.

The mean loss hides most faults (25 of 44 planted ones stay within 0.5 %), so it is never what is compared.
"""

import dataclasses

import numpy as np
import pytest

from pi05.batch import Batch
from pi05.compare import Check, max_error
from pi05.params import dead_params, philox
from pi05.spec import Compute

from .cases import SEED, Scene, each_scene, each_scene_and_dtype, scene
from .emulator import exact
from .lab import BACKENDS, RUNS, Lab, Run
from .level_3_gradients import gradient_checks
from .record import Record
from .tolerances import judge

each_backend = pytest.mark.parametrize("backend", BACKENDS)


def outputs(run: Run) -> dict[str, np.ndarray]:
    """What level 2 compares."""
    return {"velocity": run.activations["velocity"], **run.loss, "logits": run.logits}


@each_scene_and_dtype
@each_backend
def test_velocity_loss_and_logits_match_the_truth(lab: Lab, record: Record, backend: str, dtype: str, scene_name: str) -> None:
    got, truth = outputs(lab.results(backend, dtype, scene_name)), outputs(lab.truth(scene_name))
    naive = outputs(lab.results("reference", dtype, scene_name)) if dtype == "bfloat16" else {}
    record.settle("L2", f"outputs {scene_name} {dtype} {backend}", [judge("L2", name, got[name], truth[name], dtype, naive.get(name)) for name in truth])


@each_scene
def test_both_backends_agree_in_float32(lab: Lab, record: Record, scene_name: str) -> None:
    """What a user sees who trains with one backend and serves with the other."""
    first, second = (outputs(lab.results(backend, "float32", scene_name)) for backend in BACKENDS)
    record.settle("L2", f"outputs {scene_name} float32 jax = torch", [judge("L2", name, second[name], first[name], "float32") for name in first])


@each_backend
def test_loss_options_mean_what_the_reference_says(record: Record, backend: str) -> None:
    options = {"padded_steps": "count", "loss_dims": "real"}
    got, truth = (RUNS[implementation](scene("ragged"), Compute("float64"), **options) for implementation in (backend, "reference"))
    checks = [judge("L2", name, got.loss[name], truth.loss[name], "float64") for name in truth.loss]
    checks += gradient_checks(got.gradients, truth.gradients, dead_params(scene("ragged").spec), "float64")
    record.settle("L2", f"loss options float64 {backend}", checks)


def replace_masked_content(batch: Batch, vocab_size: int) -> Batch:
    """The same batch with noise wherever a mask says that nothing is there."""
    rng, seen = philox(SEED, "garbage"), batch.observation
    images, tokens, actions = seen.images.copy(), seen.tokens.copy(), batch.actions.copy()
    images[~seen.image_mask] = rng.integers(0, 256, images[~seen.image_mask].shape, np.uint8)
    tokens[~seen.token_mask] = rng.integers(0, vocab_size, tokens[~seen.token_mask].shape, np.int32)
    actions[batch.action_is_pad] = 1e3 * rng.standard_normal(actions[batch.action_is_pad].shape, np.float32)
    return dataclasses.replace(batch, observation=dataclasses.replace(seen, images=images, tokens=tokens), actions=actions)


@each_backend
def test_content_of_masked_cameras_text_and_steps_changes_no_bit(lab: Lab, record: Record, backend: str) -> None:
    case = scene("ragged")
    garbage = dataclasses.replace(case, batch=replace_masked_content(case.batch, case.spec.vocab_size))
    assert not np.array_equal(garbage.batch.actions, case.batch.actions)
    clean, dirty = lab.results(backend, "float32", "ragged"), RUNS[backend](garbage, Compute("float32"))
    pairs = {name: (dirty.loss[name], clean.loss[name]) for name in clean.loss} | {"actions": (dirty.actions, clean.actions)}
    pairs |= {f"gradient of {name}": (dirty.gradients[name], clean.gradients[name]) for name in clean.gradients}
    record.settle("L2", f"masked content float32 {backend}", [Check(name, max_error(got, want), 0.0) for name, (got, want) in pairs.items()])


@each_backend
def test_text_padding_and_absent_cameras_may_be_left_out(record: Record, backend: str) -> None:
    """A batch padded to its own longest prompt, without the camera nobody has, gives the numbers of the fully padded batch."""
    case = scene("ragged")
    seen = case.batch.observation
    image_mask = seen.image_mask & np.array([True, False, True])
    padded = dataclasses.replace(seen, image_mask=image_mask, token_mask=seen.token_mask & (np.arange(seen.tokens.shape[1]) < 17))
    short = dataclasses.replace(
        padded, images=seen.images[:, [0, 2]], image_mask=image_mask[:, [0, 2]], tokens=seen.tokens[:, :17], token_mask=padded.token_mask[:, :17]
    )
    whole, cut = (RUNS[backend](_observing(case, observation), Compute("float64")) for observation in (padded, short))
    checks = [judge("L2", name, cut.loss[name], whole.loss[name], "float64") for name in whole.loss]
    checks += [judge("L6", f"x after step {i + 1}", cut.actions[i], whole.actions[i], "float64") for i in range(len(whole.actions))]
    checks += gradient_checks(cut.gradients, whole.gradients, dead_params(case.spec), "float64")
    record.settle("L2", f"padding left out float64 {backend}", checks)


@each_backend
def test_compute_options_change_no_number(lab: Lab, record: Record, backend: str) -> None:
    """One call of the vision tower for each camera, and layers recomputed in the backward pass."""
    got, want = RUNS[backend](scene("ragged"), Compute("float64", batch_cameras=False, remat="layer")), lab.results(backend, "float64", "ragged")
    checks = [judge("L1", name, got.activations[name], want.activations[name], "float64") for name in want.activations]
    checks += gradient_checks(got.gradients, want.gradients, dead_params(scene("ragged").spec), "float64")
    record.settle("L2", f"compute options float64 {backend}", checks)


FUSED = Compute("float32", attention="fused", remat="layer")


@each_backend
def test_fused_attention_gives_the_explicit_numbers(lab: Lab, record: Record, backend: str) -> None:
    """Valid tokens in front, key lengths instead of masks, layers recomputed: all but the kernel's own rounding, which level 8 judges."""
    case, want = scene("ragged"), lab.results(backend, "float32", "ragged")
    with exact(backend):
        got = RUNS[backend](case, FUSED)
        checks = [judge("L2", name, got.loss[name], want.loss[name], "float32") for name in want.loss]
        checks += gradient_checks(got.gradients, want.gradients, dead_params(case.spec), "float32")
        real = case.batch.observation.token_mask
        checks += [judge("L2", "logits of real tokens", got.logits[real], want.logits[real], "float32")]
        checks += [judge("L6", f"x after step {i + 1}", got.actions[i], want.actions[i], "float32") for i in range(len(want.actions))]
    record.settle("L2", f"fused structure float32 {backend}", checks)


@each_backend
def test_a_nan_in_one_sample_reaches_that_loss_and_no_other(record: Record, backend: str) -> None:
    case = scene("ragged")
    actions = case.batch.actions.copy()
    actions[1, 0, 0] = np.nan
    broken = RUNS[backend](dataclasses.replace(case, batch=dataclasses.replace(case.batch, actions=actions)), Compute("float32"))
    checks = [Check("isnan(per_sample)", max_error(np.isnan(broken.loss["per_sample"]), np.array([False, True, False])), 0.0)]
    record.settle("L2", f"NaN is visible {backend}", checks)
    assert np.isnan(broken.loss["per_dim"]).any()


def _observing(case: Scene, observation: object) -> Scene:
    return dataclasses.replace(case, batch=dataclasses.replace(case.batch, observation=observation))
