"""The parameter table: names, shapes and values against a fact sheet written by hand, initial weights, and both backends' models."""

import re
from pathlib import Path

import numpy as np
import pytest

from pi05 import params
from pi05.errors import ParamsError
from pi05.initial import initial_params
from pi05.spec import Compute, ModelSpec

from .fact_sheet import openpi_shapes, published_from_openpi

TINY, FULL = ModelSpec.tiny(), ModelSpec.pi05()
LAYOUTS = ("canonical", "jax", "torch", "openpi", "published")
GOLDEN = Path(__file__).parent / "golden" / "params_tiny.txt"


def random_params(spec: ModelSpec) -> dict[str, np.ndarray]:
    return {row.name: params.philox(0, row.name).standard_normal(params.shape(row, spec), np.float32) for row in params.TABLE}


def test_the_table_is_the_golden_list() -> None:
    """One line a row: a changed name, shape or initialiser is one changed line in a review."""
    lines = [f"{row.name} {params.shape(row, TINY)} {row.init.describe()} {row.group}{' lora' if row.lora else ''}" for row in params.TABLE]
    assert lines == GOLDEN.read_text().splitlines()


@pytest.mark.parametrize(("layout", "tensors"), [("canonical", 55), ("jax", 55), ("torch", 811), ("openpi", 51), ("published", 811)])
def test_every_layout_of_the_published_model_has_all_its_parameters(layout: str, tensors: int) -> None:
    shapes = params.shapes(FULL, layout)
    assert len(shapes) == tensors and sum(int(np.prod(size)) for size in shapes.values()) == 3_353_433_872


@pytest.mark.parametrize("spec", [TINY, FULL], ids=["tiny", "pi05"])
def test_published_names_and_shapes_are_those_of_the_fact_sheet(spec: ModelSpec) -> None:
    assert params.shapes(spec, "openpi") == openpi_shapes(spec)
    abstract = {name: np.broadcast_to(np.float32(0), size) for name, size in openpi_shapes(spec).items() if spec is TINY}
    if spec is TINY:
        assert params.shapes(spec, "published") == {name: array.shape for name, array in published_from_openpi(abstract).items()}


def test_names_of_the_published_safetensors() -> None:
    """The fact sheet's names at full depth, from its own loops."""
    slim = FULL.replace(
        vision__width=16,
        vision__mlp_dim=1,
        trunk__width=1,
        trunk__mlp_dim=1,
        trunk__head_dim=2,
        expert__width=2,
        expert__mlp_dim=1,
        expert__head_dim=2,
        vocab_size=1,
    )
    names = published_from_openpi({name: np.zeros(size, np.float32) for name, size in openpi_shapes(slim).items()}).keys()
    assert params.shapes(FULL, "published").keys() == names and len(names) == 811


def test_values_travel_from_openpi_to_the_published_files_as_the_fact_sheet_says() -> None:
    """Shapes and round trips stay green with k and v swapped or heads interleaved; values do not."""
    tree = {name: params.philox(1, name).standard_normal(size, np.float32) for name, size in openpi_shapes(TINY).items()}
    ours = dict(params.write(params.read(tree, TINY, "openpi"), TINY, "published"))
    theirs = published_from_openpi(tree)
    assert ours.keys() == theirs.keys()
    assert not [name for name in theirs if not np.array_equal(ours[name], theirs[name])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writing_and_reading_gives_the_same_bits(layout: str) -> None:
    before = random_params(TINY)
    written = dict(params.write(before.items(), TINY, layout))
    assert {name: array.shape for name, array in written.items()} == params.shapes(TINY, layout)
    after = dict(params.read(written, TINY, layout))
    assert after.keys() == before.keys() and all(np.array_equal(after[name], before[name]) for name in before)


def test_a_set_of_tensors_that_is_not_a_whole_model_is_an_error_with_both_lists() -> None:
    tensors = dict(params.write(random_params(TINY).items(), TINY, "published"))
    tensors["lora_a"] = tensors.pop("action_in_proj.bias")
    with pytest.raises(ParamsError, match=r"1 missing \(action_in_proj.bias\), 1 that no parameter reads \(lora_a\)"):
        list(params.read(tensors, TINY, "published"))
    with pytest.raises(ParamsError, match=r"54 of 55 tensors were not given"):
        list(params.write([("time_mlp_in.bias", np.zeros(56, np.float32))], TINY, "torch"))
    with pytest.raises(ParamsError, match=r"time_mlp_in.bias has shape \(55,\); the spec says \(56,\)"):
        list(params.write([("time_mlp_in.bias", np.zeros(55, np.float32))], TINY, "torch"))
    with pytest.raises(ParamsError, match="There is no parameter 'time_mlp'"):
        list(params.write([("time_mlp", np.zeros(56))], TINY, "torch"))
    with pytest.raises(ParamsError, match="given twice"):
        list(params.write([("time_mlp_in.bias", np.zeros(56))] * 2, TINY, "torch"))
    short = dict(params.write(random_params(TINY).items(), TINY, "jax")) | {"time_mlp_in.bias": np.zeros(3)}
    with pytest.raises(ParamsError, match=r"jax tensor time_mlp_in.bias has shape \(3,\); the spec says \(56,\)"):
        list(params.read(short, TINY, "jax"))


def test_initial_weights_have_the_published_distributions() -> None:
    spec = TINY.replace(trunk__mlp_dim=4000, vision__mlp_dim=3000)
    tensors = dict(initial_params(spec, seed=3))
    gate = tensors["trunk.layers.gate_proj.weight"]
    std = np.sqrt(1 / 96)
    assert gate.std() == pytest.approx(std, rel=0.01) and np.abs(gate).max() <= 2 * std / 0.8796 < np.abs(gate).max() * 1.001
    up = tensors["vision.layers.up_proj.weight"]
    limit = np.sqrt(6 / (60 + 3000))
    assert np.abs(up).max() == pytest.approx(limit, rel=1e-3) and up.std() == pytest.approx(limit / np.sqrt(3), rel=0.01)
    assert tensors["trunk.embed.weight"].std() == pytest.approx(0.01, rel=0.02)
    assert tensors["vision.pos_embed"].std() == pytest.approx(1 / np.sqrt(60), rel=0.1)
    assert tensors["vision.layers.up_proj.bias"].std() == pytest.approx(1e-6, rel=0.05)
    zeros = [name for name, array in tensors.items() if not array.any()]
    assert {name for name in zeros if name.endswith(".weight")} == {"vision.head.weight", *(name for name in tensors if "modulation.weight" in name)}
    assert all((tensors[f"vision.{name}.scale"] == 1).all() for name in ("layers.attn_norm", "layers.mlp_norm", "final_norm"))
    assert all(array.dtype == np.float32 for array in tensors.values())


def test_initial_weights_depend_on_the_seed_and_differ_between_layers_and_tensors() -> None:
    first, again, other = (dict(initial_params(TINY, seed)) for seed in (0, 0, 1))
    drawn = [name for name, array in first.items() if array.std() > 0]
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not any(np.array_equal(first[name], other[name]) for name in drawn)
    assert not np.array_equal(first["trunk.layers.k_proj.weight"], first["trunk.layers.v_proj.weight"])
    assert not np.array_equal(first["trunk.layers.k_proj.weight"][0], first["trunk.layers.k_proj.weight"][1])


def test_initial_weights_are_drawn_lazily() -> None:
    """The first tensor of the full model is there at once; nobody waits for, or holds, the other 3.3 billion numbers."""
    name, array = next(initial_params(FULL, 0))
    assert name == params.TABLE[0].name and array.nbytes < 4e6


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_the_full_model_has_the_tables_names_and_shapes(backend: str) -> None:
    assert ABSTRACT_SHAPES[backend](FULL) == params.shapes(FULL, backend)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_model_holds_exactly_the_numbers_it_was_given(backend: str) -> None:
    before = random_params(TINY)
    after = MAKE_AND_READ[backend](before)
    assert after.keys() == before.keys() and all(np.array_equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_model_refuses_parameters_that_are_not_all_there(backend: str) -> None:
    whole = random_params(TINY)
    with pytest.raises(ParamsError, match=r"^1 of 55 tensors were not given: trunk.layers.q_proj.weight\.$"):
        MAKE_AND_READ[backend]({name: array for name, array in whole.items() if name != "trunk.layers.q_proj.weight"})
    with pytest.raises(ParamsError, match="There is no parameter 'extra'"):
        MAKE_AND_READ[backend](whole | {"extra": np.zeros(3)})


def test_no_tensor_name_stands_outside_the_table() -> None:
    """A second home for a name would drift; attribute names of modules are checked by building the models."""
    package = Path(params.__file__).parent
    pattern = re.compile("|".join(re.escape(part) for part in ("paligemma_with_expert", "PaliGemma/", "kv_einsum", "gating_einsum")))
    allowed = {package / "params.py"}
    assert not [path for path in package.rglob("*.py") if path not in allowed and "interop" not in path.parts and pattern.search(path.read_text())]


def _jax_shapes(spec: ModelSpec) -> dict:
    from flax import nnx

    from pi05.jax_backend.model import abstract_model

    return {".".join(path): variable.shape for path, variable in nnx.to_flat_state(nnx.state(abstract_model(spec, Compute())))}


def _torch_shapes(spec: ModelSpec) -> dict:
    from pi05.torch_backend.model import abstract_model

    return {name: tuple(parameter.shape) for name, parameter in abstract_model(spec, Compute()).named_parameters()}


def _jax_again(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    from pi05.jax_backend.model import canonical_params, make_model

    return canonical_params(make_model(TINY, Compute(), tensors.items()), TINY)


def _torch_again(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    from pi05.torch_backend.model import canonical_params, make_model

    return canonical_params(make_model(TINY, Compute(), tensors.items()), TINY)


ABSTRACT_SHAPES = {"jax": _jax_shapes, "torch": _torch_shapes}
MAKE_AND_READ = {"jax": _jax_again, "torch": _torch_again}
