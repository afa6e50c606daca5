"""The judge of attention kernels is judged itself: its truth, its measure, and every verdict it can give."""

import dataclasses

import numpy as np
import pytest
import torch

from pi05.kernel_check import LIMIT, SCENES, Scene, Shape, exact_attention, judge, make_case, make_scene, plain_attention, round_bfloat16, shapes_of
from pi05.spec import ModelSpec

SELF, CROSS = Shape(24, 24, 4, 2, 16), Shape(5, 24, 4, 2, 16)


def by_autograd(scene: Scene) -> dict[str, np.ndarray]:
    """Written with a mask and torch's autograd, in float64."""
    q, k, v, g = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (scene.q, scene.k, scene.v, scene.g))
    keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    valid = torch.tensor(scene.valid)
    logits = torch.einsum("btnh,bsnh->bnts", q, keys) * q.shape[-1] ** -0.5
    out = torch.einsum("bnts,bsnh->btnh", torch.softmax(logits.masked_fill(~valid[:, None, None], -np.inf), -1), values)
    out = out * valid[:, :, None, None] if q.shape[1] == k.shape[1] else out
    return dict(zip(("out", "dq", "dk", "dv"), (x.detach().numpy() for x in (out, *torch.autograd.grad(out, (q, k, v), g))), strict=True))


@pytest.mark.parametrize("shape", [SELF, CROSS], ids=["self", "cross"])
@pytest.mark.parametrize("name", SCENES)
def test_the_truth_is_the_derivative_of_attention(name: str, shape: Shape) -> None:
    scene = make_scene(name, shape)
    want, got = by_autograd(scene), exact_attention(scene)
    for tensor, true in want.items():
        assert np.abs(got[tensor] - true).max() <= 1e-11 * np.abs(true).max()


def test_the_measure_is_off_by_the_rounding_of_bfloat16_and_of_tf32() -> None:
    scene, want, plain = make_case("gauss", SELF)
    errors = {name: np.linalg.norm(plain[name] - want[name]) / np.linalg.norm(want[name]) for name in want}
    assert all(2.0**-11 < error < 2.0**-7 for error in errors.values()), errors
    assert np.array_equal(plain["out"], round_bfloat16(plain["out"]))
    shifted = dataclasses.replace(scene, k=round_bfloat16(scene.k + 8))  # softmax ignores it, and so must an honest measure of dq
    again = plain_attention(shifted)["dq"] - exact_attention(shifted)["dq"]
    assert np.linalg.norm(again) < 10 * np.linalg.norm(plain["dq"] - want["dq"])


@pytest.mark.parametrize("value", [1.0, 1.00390625, 1.01171875, -3.3e-30, 65504.0, 0.0])
def test_rounding_to_bfloat16_is_that_of_torch(value: float) -> None:
    assert round_bfloat16(np.array([value]))[0] == torch.tensor(value).bfloat16().float().item()


def test_scenes_are_what_their_names_say() -> None:
    shape = Shape(64, 64, 4, 1, 64)
    scenes = {name: make_scene(name, shape) for name in SCENES}
    for scene in scenes.values():
        assert all(np.array_equal(x, round_bfloat16(x)) for x in (scene.q, scene.k, scene.v, scene.g)), "bfloat16 inputs, or the error is the input's"
    assert scenes["all valid"].valid.all() and not scenes["gauss"].valid.all()
    assert (scenes["gauss"].valid.argmin(1)[1:] > 0).all(), "the valid keys stand in front"
    dead = ~scenes["gauss"].valid
    assert not scenes["gauss"].g[dead].any() and np.abs(scenes["cotangent on dead rows"].g[dead]).mean() > 100
    low = scenes["log-sum-exp < -88"]
    logits = np.einsum("btnh,bsnh->bnts", low.q, np.repeat(low.k, 4, 2)) * 64**-0.5
    assert logits.max() + np.log(64) < -88
    assert np.abs(scenes["tiny cotangent"].g).max() < 6e-8, "below float16's smallest number"
    assert np.abs(scenes["huge cotangent"].g).max() > 65504, "above float16's largest"
    assert np.abs(scenes["common key mean"].k.mean(1)).mean() > 4 > 1 > np.abs(scenes["gauss"].k.mean(1)).mean()


@pytest.mark.parametrize("tensor", ["out", "dq", "dk", "dv"])
def test_each_tensor_alone_can_be_unsafe_in_each_way(tensor: str) -> None:
    scene, want, plain = make_case("gauss", SELF)

    def spoil(change) -> str:
        got = {name: value.astype(np.float64).copy() for name, value in plain.items()}
        got[tensor] = change(got[tensor])
        return judge(lambda _: got, "gauss", SELF).reason

    noise = plain[tensor] - want[tensor]
    live = np.zeros_like(noise)
    live[0, 0, 0, 0] = 1
    dead = np.zeros_like(noise)
    dead[1, -1, 0, 0] = 1e-30
    assert spoil(lambda x: x) == ""
    assert spoil(lambda x: want[tensor] + 0.9 * LIMIT * noise) == ""
    assert f"{tensor} is 2.2 times" in spoil(lambda x: want[tensor] + 1.1 * LIMIT * noise)
    assert f"{tensor} is" in spoil(lambda x: x + live * 5 * np.abs(noise).max()), "one wrong element, which the norm over all hides"
    assert spoil(lambda x: x + live * np.nan) == f"{tensor} is not finite"
    assert spoil(lambda x: x + dead).startswith(f"{tensor} is not zero in dead rows")


def test_the_shapes_are_those_of_the_published_model() -> None:
    assert [str(shape) for shape in shapes_of(ModelSpec.pi05(), 3, 200)] == [
        "T=968 S=968 N=8 K=1 H=256",
        "T=50 S=1018 N=8 K=1 H=256",
        "T=256 S=256 N=16 K=16 H=72 all valid",
    ]
