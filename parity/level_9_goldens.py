"""Level 9: both backends and the reference itself against files that no backend made, so that what all of them change together is seen too.

In float64 and float32, under the limits of the level that a golden belongs to; bfloat16 is judged by live comparison with a naive writing.
"""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pi05.compare import Check, max_error, relative_l2_error
from pi05.errors import DataError
from pi05.kernel_check import FLOOR, LIMIT
from pi05.kernel_check import run as run_attention
from pi05.params import ROWS, read, shape, to_layout
from pi05.spec import ModelSpec

from . import level_4_optimizer
from .cases import SCENES, scene
from .goldens import derive, store
from .lab import BACKENDS, Lab, Run
from .level_0_augment import PRESETS, apply, draw, pictures
from .record import Record
from .tolerances import AUGMENT_LIMITS, DECAY_LIMIT, F32_LIMIT, F64_LIMITS, OPTIMIZER_LIMIT, judge

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_precision = pytest.mark.parametrize("dtype", ["float64", "float32"])
# The published lengths run in float32 alone, as in the other levels.
each_scene_and_precision = pytest.mark.parametrize(
    ("dtype", "scene_name"), [("float64", name) for name in SCENES if name != "far"] + [("float32", name) for name in SCENES]
)


@functools.cache
def golden(level: str) -> derive.Tensors:
    return store.read_goldens(level)


def goldens_of(level: str, scene_name: str) -> derive.Tensors:
    """The goldens of one scene, by their names in it."""
    found = {name.removeprefix(f"{scene_name}/"): array for name, array in golden(level).items() if name.startswith(f"{scene_name}/")}
    assert found, f"{level} has no golden of {scene_name}"
    return found


def outputs(run: Run) -> derive.Tensors:
    """What level 2 keeps."""
    return {"velocity": run.activations["velocity"], "logits": run.logits, "per_sample": run.loss["per_sample"], "per_dim": run.loss["per_dim"]}


def projected_gradients(scene_name: str, gradients: derive.Tensors) -> derive.Tensors:
    """Derivatives along the goldens' directions, from gradients by torch-layout name."""
    spec, out = scene(scene_name).spec, {}
    for name in goldens_of("level_3", scene_name):
        row = ROWS[name]
        along = [list(to_layout(row, direction, spec, "torch")) for direction in derive.directions(name, shape(row, spec))]
        out[name] = np.array([sum(float((gradients[part].astype(np.float64) * array).sum()) for part, array in parts) for parts in along])
    return out


def norms_of(gradients: derive.Tensors, spec: ModelSpec) -> dict[str, float]:
    """Norm of each gradient by canonical name."""
    return {name: float(np.linalg.norm(array)) for name, array in read(gradients, spec, "torch")}


def checks_of(level: str, got: derive.Tensors, want: derive.Tensors, dtype: str) -> list[Check]:
    """One check a golden, under the rule of `level`; where the golden is exactly zero, so must be what is compared."""
    assert got.keys() == want.keys()
    return [judge(level, name, got[name], want[name], dtype) if want[name].any() else Check(name, max_error(got[name], want[name]), 0.0) for name in want]


@each_scene_and_precision
@each_backend
def test_activations_are_those_of_the_files(lab: Lab, record: Record, backend: str, dtype: str, scene_name: str) -> None:
    got, want = derive.summaries(lab.results(backend, dtype, scene_name).activations), goldens_of("level_1", scene_name)
    record.settle("L9", f"activations {scene_name} {dtype} {backend}", checks_of("L1", got, {name: want[name] for name in got}, dtype))
    assert got.keys() == want.keys()


@each_scene_and_precision
@each_backend
def test_outputs_are_those_of_the_files(lab: Lab, record: Record, backend: str, dtype: str, scene_name: str) -> None:
    got = derive.summaries(outputs(lab.results(backend, dtype, scene_name)))
    record.settle("L9", f"outputs {scene_name} {dtype} {backend}", checks_of("L2", got, goldens_of("level_2", scene_name), dtype))


@pytest.mark.parametrize("scene_name", derive.GRADIENT_SCENES)
@each_precision
@each_backend
def test_gradients_are_those_of_the_files(lab: Lab, record: Record, backend: str, dtype: str, scene_name: str) -> None:
    """Along three random directions of each of 54 tensors; the files' numbers are complex steps, without any automatic differentiation.

    In units of the gradient's norm, since a direction may happen to lie across it; a gradient that is too large is its own error.
    """
    gradients, limit = lab.results(backend, dtype, scene_name).gradients, {"float64": F64_LIMITS["L3"], "float32": F32_LIMIT}[dtype]
    got, norms, checks = projected_gradients(scene_name, gradients), norms_of(gradients, scene(scene_name).spec), []
    for name, want in goldens_of("level_3", scene_name).items():
        scale = max(norms[name], float(np.abs(want).max())) if want.any() else 1.0
        checks.append(Check(name, max_error(got[name], want) / scale, limit if want.any() else 0.0))
    record.settle("L9", f"gradients {scene_name} {dtype} {backend}", checks)


@each_scene_and_precision
@each_backend
def test_actions_are_those_of_the_files(lab: Lab, record: Record, backend: str, dtype: str, scene_name: str) -> None:
    actions = lab.results(backend, dtype, scene_name).actions
    got = derive.summaries({f"x after step {step + 1}": x for step, x in enumerate(actions)})
    record.settle("L9", f"actions {scene_name} {dtype} {backend}", checks_of("L6", got, goldens_of("level_6", scene_name), dtype))


@pytest.mark.parametrize("preset", PRESETS)
@each_backend
def test_augmented_images_are_those_of_the_files(record: Record, backend: str, preset: str) -> None:
    got = derive.thin(apply(backend, "float64", pictures(), draw(preset)))
    record.settle("L9", f"augmented {preset} float64 {backend}", [Check(preset, max_error(got, golden("level_0")[preset]), AUGMENT_LIMITS["float64"])])


@pytest.mark.parametrize("recipe_name", level_4_optimizer.RECIPES)
@each_backend
def test_updates_are_those_of_the_files(record: Record, backend: str, recipe_name: str) -> None:
    recipe, checks = level_4_optimizer.RECIPES[recipe_name], []
    limit = DECAY_LIMIT if recipe.optimizer.weight_decay > 1e-3 else OPTIMIZER_LIMIT
    for step, (mine, *_) in enumerate(level_4_optimizer.run(backend, recipe, max(derive.UPDATES)), 1):
        if step in derive.UPDATES:
            got = mine.tensors()
            want = goldens_of("level_4", f"{recipe_name}, {step} updates")
            assert got.keys() == want.keys()
            checks += [Check(f"{step}: {name}", max_error(got[name], array) / (np.abs(array).max() or 1.0), limit) for name, array in want.items()]
    record.settle("L9", f"updates {recipe_name} {backend}", checks)


@each_backend
def test_explicit_attention_is_that_of_the_files(record: Record, backend: str) -> None:
    """Inputs are bfloat16: the error must not exceed twice that of plain bfloat16 attention, as in level 8."""
    checks = []
    for name, case, plain in derive.attention_cases():
        got, naive = (derive.summaries(tensors) for tensors in (run_attention(backend, "explicit", case), plain))
        for key, want in goldens_of("level_8", name).items():
            if key.endswith("projections"):
                checks.append(Check(f"{name}: {key}", relative_l2_error(got[key], want), LIMIT * max(relative_l2_error(naive[key], want), FLOOR / 2)))
    record.settle("L9", f"explicit attention {backend}", checks)


# ---- The files themselves


def checks_of_files(changed: dict[str, float]) -> list[Check]:
    return [Check(name, error, store.LIMIT) for name, error in changed.items()] or [Check("every golden", 0.0, store.LIMIT)]


@pytest.mark.parametrize("scene_name", SCENES)
def test_the_files_are_what_the_reference_says(lab: Lab, record: Record, scene_name: str) -> None:
    """A file that was made anew, manifest and all, from anything but the equations fails here; gradients by torch's autograd this time."""
    truth, changed = lab.truth(scene_name), {}
    parts = {
        "level_1": derive.summaries(truth.activations),
        "level_2": derive.summaries(outputs(truth)),
        "level_6": derive.summaries({f"x after step {step + 1}": x for step, x in enumerate(truth.actions)}),
    }
    if scene_name in derive.GRADIENT_SCENES:
        parts["level_3"] = projected_gradients(scene_name, truth.gradients)
    for level, derived in parts.items():
        # torch's sums run in another order than NumPy's
        changed |= store.differences(goldens_of(level, scene_name), derived, limit=1e-10 if level == "level_3" else store.LIMIT)
    record.settle("L9", f"files {scene_name}", checks_of_files(changed))


@pytest.mark.parametrize("level", ["level_4", "level_8"])
def test_the_files_are_what_the_formulas_say(record: Record, level: str) -> None:
    changed = store.differences(golden(level), derive.derive(level))
    record.settle("L9", f"files {level}", checks_of_files(changed))


def test_inputs_and_limits_are_those_of_the_manifest() -> None:
    """If NumPy or a generator changed the inputs, nothing else here means anything; a wider limit needs a new manifest."""
    manifest = store.read_manifest()
    assert derive.input_hashes() == manifest["inputs"], "inputs of the scenes changed: NumPy's generators, or pi05.batch, pi05.params, parity/cases.py"
    assert store.limits() == manifest["tolerances"], "tolerances.py differs from the manifest: python -m parity.goldens --write REASON"


def _copy(folder: Path) -> Path:
    for path in [*store.FOLDER.glob("*.safetensors"), store.FOLDER / store.MANIFEST]:
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def _nudge(path: Path) -> None:
    """Changes one number of a file by one part in 1e9."""
    tensors = {name: array.copy() for name, array in load_file(path).items()}
    array = next(array for name, array in sorted(tensors.items()) if name.endswith("after step 10"))
    array.flat[np.abs(array).argmax()] *= 1 + 1e-9
    save_file(tensors, path)


def test_a_changed_value_is_caught_by_the_manifest(tmp_path: Path) -> None:
    _nudge(_copy(tmp_path) / "level_6.safetensors")
    with pytest.raises(DataError, match=r"level_6\.safetensors: sha256 .* changed by something else"):
        store.read_goldens("level_6", tmp_path)


def test_a_changed_value_with_a_new_manifest_is_caught_by_the_reference(record: Record, tmp_path: Path) -> None:
    path = _copy(tmp_path) / "level_6.safetensors"
    _nudge(path)
    manifest = store.read_manifest(tmp_path)
    manifest["files"][path.name] = store.sha256(path)
    (tmp_path / store.MANIFEST).write_text(json.dumps(manifest))
    changed = store.differences(store.read_goldens("level_6", tmp_path), golden("level_6"))
    assert len(changed) == 1 and next(iter(changed.values())) == pytest.approx(1e-9, rel=1e-3)
    record.caught("golden made anew with one value moved by 1e-9", "level_9_goldens.test_the_files_are_what_the_reference_says", *checks_of_files(changed))


def test_a_missing_file_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (_copy(tmp_path) / "level_2.safetensors").unlink()
    with pytest.raises(DataError, match="python -m parity.goldens --write"):
        store.read_goldens("level_2", tmp_path)


def test_goldens_stay_small() -> None:
    assert sum(path.stat().st_size for path in store.FOLDER.glob("*.safetensors")) < 1_500_000
