"""Level 8, the gauntlet: every attention strategy of both backends on scenes that have broken a kernel, and what must not pass.

With --device cuda the real kernels run, in the published shapes; on the CPU a stand-in that rounds as they do (emulator.py), in small ones.
"""

import contextlib
import functools
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from unittest import mock

import numpy as np
import pytest

from pi05.compare import Check
from pi05.kernel_check import LIMIT, SCENES, Scene, Shape, Verdict, judge, run

from .bad_attention import masked_attention
from .emulator import emulated
from .lab import BACKENDS
from .record import Record

STRATEGIES = ("explicit", "fused_float16")
# Lengths are 0, 2, 32, 64, 65 and 122 modulo 128. Then the suffix's call, the vision tower's, and sizes that have to be padded.
GPU_SHAPES = [
    *(Shape(length, length, 8, 1, 256) for length in (896, 898, 928, 960, 961, 1018)),
    Shape(50, 1018, 8, 1, 256),
    Shape(256, 256, 16, 16, 72, padded=False),
    Shape(25, 25, 5, 5, 76, padded=False),
]
CPU_SHAPES = [
    *(Shape(length, length, 2, 1, 64) for length in (128, 130, 193)),
    Shape(10, 138, 2, 1, 256),
    Shape(33, 33, 6, 2, 32),
    Shape(64, 64, 3, 3, 72, padded=False),
    Shape(25, 25, 5, 5, 76, padded=False),
]
# The length at which cuDNN 9.19 is wrong with a mask, and one at which it is not.
BAD_LENGTH, GOOD_LENGTH = {"cpu": 192, "cuda": 960}, {"cpu": 128, "cuda": 896}

each_backend = pytest.mark.parametrize("backend", BACKENDS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The shapes depend on the device."""
    if "shape" in metafunc.fixturenames:
        metafunc.parametrize("shape", {"cpu": CPU_SHAPES, "cuda": GPU_SHAPES}[metafunc.config.getoption("--device")], ids=str)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--device")


def kernels(backend: str, device: str) -> AbstractContextManager:
    """The real kernels, or their stand-in where there are none."""
    return contextlib.nullcontext() if device == "cuda" else emulated(backend)


def to_check(verdict: Verdict) -> Check:
    return Check(f"{verdict.scene}: {verdict.where} {verdict.reason}", verdict.ratio, LIMIT)


def trunk_shape(length: int, device: str) -> Shape:
    return Shape(length, length, 8, 1, 256) if device == "cuda" else Shape(length, length, 2, 1, 64)


def test_every_strategy_is_safe_in_every_scene(record: Record, device: str, shape: Shape) -> None:
    checks: dict[tuple[str, str], list[Check]] = {(backend, strategy): [] for backend in BACKENDS for strategy in STRATEGIES}
    for scene in SCENES:  # outermost, since its truth is what takes time
        for backend, strategy in checks:
            with kernels(backend, device):
                checks[backend, strategy].append(to_check(judge(functools.partial(run, backend, strategy), scene, shape)))
    for (backend, strategy), found in checks.items():
        record.settle("L8", f"{strategy} {shape} {backend}", found)


def expect_unsafe(record: Record, name: str, verdict: Verdict) -> None:
    """The gauntlet's own mutants: a verdict of SAFE fails the test."""
    assert not verdict.safe, f"{name} passes as SAFE: ratio {verdict.ratio:.2f} in scene {verdict.scene!r}"
    record.caught(f"attention: {name}", f"level_8_attention, {verdict.scene}", to_check(verdict))


@each_backend
def test_fused_bfloat16_is_unsafe(record: Record, device: str, backend: str) -> None:
    """What a common mean of the keys, of 6 sigma, does to dq: the rows of a rounded softmax gradient no longer sum to zero."""
    with kernels(backend, device):
        verdict = judge(functools.partial(run, backend, "fused_bfloat16"), "common key mean", trunk_shape(GOOD_LENGTH[device], device))
    expect_unsafe(record, f"fused in bfloat16, {backend}", verdict)


@each_backend
@pytest.mark.parametrize("scene", ["tiny cotangent", "huge cotangent"])
def test_fused_float16_with_an_unscaled_cotangent_is_unsafe(record: Record, device: str, backend: str, scene: str) -> None:
    module = importlib.import_module(f"pi05.{backend}_backend.attention")
    original = module.power_of_two
    ones = mock.patch.object(module, "power_of_two", lambda g: original(g) * 0 + 1)
    with kernels(backend, device), ones, fresh_compilation(backend):
        verdict = judge(functools.partial(run, backend, "fused_float16"), scene, trunk_shape(GOOD_LENGTH[device], device))
    expect_unsafe(record, f"unscaled float16, {scene}, {backend}", verdict)


@pytest.mark.parametrize(
    ("name", "scene", "options"),
    [
        ("a dense mask in bfloat16", "cotangent on dead rows", {"dtype": "bfloat16", "guarded": False, "scaled": False}),
        ("a guarded dense mask in bfloat16", "common key mean", {"dtype": "bfloat16", "guarded": True, "scaled": False}),
        ("a guarded dense mask in float16, unscaled", "tiny cotangent", {"dtype": "float16", "guarded": True, "scaled": False}),
    ],
)
def test_masked_kernels_are_unsafe(record: Record, device: str, name: str, scene: str, options: dict) -> None:
    attend = functools.partial(masked_attention, on_gpu=device == "cuda", **options)
    expect_unsafe(record, name, judge(attend, scene, trunk_shape(GOOD_LENGTH[device], device)))


def test_a_mask_is_unsafe_at_one_length_even_in_scaled_float16(record: Record, device: str) -> None:
    """64 keys over a multiple of 128: dq is NaN. At the length beside it the same path passes, so it is the length that is caught."""
    attend = functools.partial(masked_attention, dtype="float16", guarded=True, scaled=True, on_gpu=device == "cuda")
    scene = "log-sum-exp < -88"
    good = judge(attend, scene, trunk_shape(GOOD_LENGTH[device], device))
    record.settle("L8", "a guarded, scaled mask in float16 where it works", [to_check(good)])
    bad = judge(attend, scene, trunk_shape(BAD_LENGTH[device], device))
    expect_unsafe(record, "a mask, 64 keys over a multiple of 128", bad)
    assert bad.ratio == np.inf


def test_garbage_on_dead_rows_is_unsafe(record: Record) -> None:
    """A kernel that is right but for one number that is not zero, and one that is right but for a NaN."""

    def spoiled(value: float, scene: Scene) -> dict[str, np.ndarray]:
        got = run("torch", "fused_float16", scene)
        got["dq"][1, -1, 0, 0] = value
        return got

    for value in (1e-30, np.nan):
        with emulated("torch"):
            expect_unsafe(record, f"dq of a dead row is {value}", judge(functools.partial(spoiled, value), "gauss", trunk_shape(GOOD_LENGTH["cpu"], "cpu")))


@contextlib.contextmanager
def fresh_compilation(backend: str) -> Iterator[None]:
    """JAX compiles anew what a patch has changed."""
    if backend == "jax":
        import jax

        jax.clear_caches()
    yield
    if backend == "jax":
        jax.clear_caches()
