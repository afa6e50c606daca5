"""Checkpoints that others wrote: read to the right numbers, in both backends, whatever form they are in."""

import importlib
from pathlib import Path

import numpy as np
import pytest

from parity import oracles
from pi05.batch import make_draws, synthetic_batch
from pi05.compare import relative_error
from pi05.errors import CheckpointError
from pi05.interop.infer import infer_spec
from pi05.interop.source import Source, table_build, table_places
from pi05.interop.sources import load_weights, open_source
from pi05.params import count
from pi05.spec import Compute, ModelSpec
from tests.fact_sheet import openpi_shapes, published_from_openpi

from .published import Tree, openpi_tree, save_orbax, save_torch, torch_tensors

FORMS = ("orbax", "orbax with value", "orbax bare", "openpi torch", "both names", "lerobot", "newer transformers")
FULL = ModelSpec.pi05()


@pytest.fixture(scope="module")
def truth(spec: ModelSpec, tree: Tree) -> Tree:
    """Canonical tensors by the oracles' table, which was written apart from ours."""
    shapes = {name: np.empty(size) for name, size in _canonical_shapes(spec).items()}
    return oracles.to_canonical(published_from_openpi(tree), oracles.lerobot_places(), shapes)


def _canonical_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    from pi05.params import shapes

    return shapes(spec)


@pytest.mark.parametrize("form", FORMS)
def test_every_published_form_gives_the_same_numbers(form: str, forms: dict[str, Path], spec: ModelSpec, truth: Tree) -> None:
    weights = load_weights(forms[form], spec, seed=0)
    loaded = dict(weights.tensors)
    assert loaded.keys() == truth.keys() and all(array.dtype == np.float32 for array in loaded.values())
    assert not [name for name in truth if not np.array_equal(loaded[name], truth[name])]
    tensors = {"orbax": 51}.get(form.split()[0], len(published_from_openpi(openpi_tree(spec))))
    assert f"loaded {tensors}/{tensors} tensors, {count(spec):,} parameters; new: []" in str(weights.report)


def test_both_backends_give_the_velocity_of_an_independent_network(forms: dict[str, Path], spec: ModelSpec, truth: Tree) -> None:
    batch = synthetic_batch(spec, 2, seed=3, token_len=9, padded_actions=False)
    draws = make_draws(spec, 3, 0, np.arange(2))
    theirs = oracles.lerobot(spec, truth, batch, draws, 1)["velocity"]
    ours = {backend: _velocity(backend, spec, forms["orbax"], batch, draws) for backend in ("jax", "torch")}
    assert relative_error(ours["jax"], ours["torch"]) < 1e-5
    assert all(relative_error(velocity, theirs) < 1e-5 for velocity in ours.values())


def _velocity(backend: str, spec: ModelSpec, folder: Path, batch, draws) -> np.ndarray:
    module = importlib.import_module(f"pi05.{backend}_backend.model")
    model = module.make_model(spec, Compute("float32"), load_weights(folder, spec, seed=0).tensors)
    batch, draws = module.from_numpy((batch, draws))
    x_t, _, counted = model.flow(batch, draws, padded_steps="count")
    velocity = model(batch.observation, x_t, draws.time, counted)[0]
    return np.asarray(velocity.detach() if backend == "torch" else velocity)


def test_bfloat16_files_are_widened_exactly(tree: Tree, spec: ModelSpec, tmp_path: Path) -> None:
    import ml_dtypes

    rounded = {name: array.astype(ml_dtypes.bfloat16) for name, array in tree.items()}
    save_orbax(tmp_path / "jax", rounded)
    save_torch(tmp_path / "torch", torch_tensors(rounded))
    from_jax, from_torch = (dict(load_weights(tmp_path / form, spec, seed=0).tensors) for form in ("jax", "torch"))
    assert all(np.array_equal(from_jax[name], from_torch[name]) and from_jax[name].dtype == np.float32 for name in from_jax)
    wanted = rounded["action_in_proj/kernel"].astype(np.float32)
    assert np.array_equal(from_jax["action_in_proj.weight"], wanted) and not np.array_equal(wanted, tree["action_in_proj/kernel"])


@pytest.mark.parametrize("layout", ["openpi", "published"])
def test_the_published_model_is_recognised_by_its_shapes_alone(layout: str) -> None:
    """At full size, without a number: sizes inferred, every tensor of the fact sheet read exactly once."""
    shapes = openpi_shapes(FULL)
    if layout == "published":
        shapes = {
            name: array.shape for name, array in published_from_openpi({name: np.broadcast_to(np.int8(0), size) for name, size in shapes.items()}).items()
        }
    spec = infer_spec(shapes, layout, "here")
    assert spec == FULL
    packed = {name: 2 for name in shapes if "kv_einsum" in name or "gating_einsum" in name}
    source = Source("openpi-jax", Path(), spec, shapes, dict.get, table_places(spec, layout), table_build(spec, layout), packed)
    assert source.audit() == {"openpi": 51, "published": 811}[layout]


def test_other_action_dims_are_inferred() -> None:
    assert infer_spec(openpi_shapes(FULL.replace(action_dim=24)), "openpi", "here").action_dim == 24


def test_a_model_of_unknown_widths_asks_for_its_sizes(tmp_path: Path) -> None:
    odd = ModelSpec.tiny().replace(trunk__width=80)
    folder = save_torch(tmp_path / "odd", torch_tensors(openpi_tree(odd)))
    with pytest.raises(CheckpointError, match=r"widths \(60, 80, 56\).*do not tell how many heads.*--config"):
        open_source(folder)
    assert open_source(folder, like=odd).spec == odd
    assert open_source(save_orbax(tmp_path / "jax", openpi_tree(odd))).spec.trunk == odd.trunk  # openpi's tree keeps heads apart


def test_what_a_configuration_beside_the_tensors_says_is_read(forms: dict[str, Path], spec: ModelSpec, tree: Tree, tmp_path: Path) -> None:
    other = spec.replace(action_horizon=30, max_token_len=99)
    assert open_source(forms["lerobot"], like=other).spec == spec
    folder = save_torch(tmp_path, torch_tensors(tree), config={"action_horizon": 17, "action_dim": 11})
    source = open_source(folder, like=other)
    assert source.kind == "openpi-torch" and source.spec.action_horizon == 17


def test_reading_openpis_tree_starts_no_jax(forms: dict[str, Path]) -> None:
    """A PyTorch run reads it, and JAX would take the GPU's memory."""
    import subprocess
    import sys

    code = f"import sys; from pi05.interop.sources import open_source; next(open_source({str(forms['orbax'])!r}).tensors()); print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
