"""ModelSpec: the published sizes, the tiny ones, and errors that name the field."""

import dataclasses

import numpy as np
import pytest

from pi05 import params
from pi05.spec import Compute, GemmaSpec, ModelSpec, VisionSpec, rope_table, time_frequencies


def sizes(spec: ModelSpec) -> list[int]:
    """Every size of the spec that is free: trunk and expert share depth, heads and head dim."""
    own = [v for part in (spec.vision, spec.trunk) for name, v in dataclasses.asdict(part).items() if name != "lora"]
    return [
        *own,
        spec.vision.head_dim,
        spec.vision.num_patches,
        spec.expert.width,
        spec.expert.mlp_dim,
        spec.vocab_size,
        spec.action_dim,
        spec.action_horizon,
        spec.max_token_len,
    ]


def test_the_published_model_has_the_published_number_of_parameters() -> None:
    assert params.count(ModelSpec.pi05()) == 3_353_433_872


def test_the_published_model_costs_what_was_counted_for_it() -> None:
    spec = ModelSpec.pi05()
    assert spec.prefix_len() == 968
    assert spec.forward_flops() / 1e12 == pytest.approx(4.68, abs=0.005)
    assert spec.training_flops() / 1e12 == pytest.approx(14.045, abs=0.005)
    assert spec.forward_flops(num_cameras=2, token_len=64) < 0.7 * spec.forward_flops()


def test_no_two_sizes_of_the_tiny_model_are_equal() -> None:
    spec = ModelSpec.tiny()
    assert len(set(sizes(spec))) == len(sizes(spec))
    assert spec.trunk.num_kv_heads < spec.trunk.num_heads
    assert spec.expert.width != spec.expert.num_heads * spec.expert.head_dim
    assert spec.trunk.width == spec.trunk.num_heads * spec.trunk.head_dim, "the trap of the published sizes: q and o are square"
    assert params.count(spec) < 2_000_000


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"expert__depth": 4}, "trunk.depth is 3 but expert.depth is 4"),
        ({"expert__head_dim": 8}, "trunk.head_dim is 16 but expert.head_dim is 8"),
        ({"trunk__num_kv_heads": 4}, "gemma.num_heads is 6, which gemma.num_kv_heads = 4 does not divide"),
        ({"vision__num_heads": 7}, "vision.width is 60, which vision.num_heads = 7 does not divide"),
        ({"vision__image_size": 71}, "vision.image_size is 71, which vision.patch_size = 14 does not divide"),
        ({"trunk__head_dim": 15}, "gemma.head_dim is 15"),
        ({"expert__width": 57}, "expert.width is 57"),
        ({"action_dim": 0}, "model.action_dim is 0"),
        ({"vocab_size": 1.5}, "model.vocab_size is 1.5"),
        ({"cameras": ("a", "a")}, "cameras is ('a', 'a')"),
    ],
)
def test_an_inconsistent_spec_is_one_error_that_names_the_field(change: dict, says: str) -> None:
    with pytest.raises(ValueError, match="^" + says.replace("(", r"\(").replace(")", r"\)")):
        ModelSpec.tiny().replace(**change)


def test_an_unknown_preset_or_way_of_computing_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no model preset 'pi0'; there are pi05, tiny"):
        ModelSpec.preset("pi0")
    with pytest.raises(ValueError, match="compute.dtype is 'float16'; it can be bfloat16, float32, float64"):
        Compute(dtype="float16")


def test_tables_are_what_the_formulas_say() -> None:
    cos, sin = rope_table(256, 1018)
    assert cos.shape == sin.shape == (1018, 128)
    assert np.allclose(cos[977, 5], np.cos(977 / 10000 ** (10 / 256)), atol=1e-12)
    coarse, fine = time_frequencies(1024)
    assert np.allclose(coarse + fine, 1 / (4e-3 * 1000 ** np.linspace(0, 1, 512)), rtol=1e-15)
    assert np.array_equal(coarse * 16, np.round(coarse * 16)) and np.abs(fine).max() <= 1 / 32


def test_parts_can_be_built_alone() -> None:
    assert VisionSpec(width=60, depth=1, mlp_dim=8, num_heads=5, patch_size=7, image_size=14).num_patches == 4
    assert GemmaSpec(width=8, depth=1, mlp_dim=8, num_heads=6, num_kv_heads=2, head_dim=4).queries_per_kv_head == 3
