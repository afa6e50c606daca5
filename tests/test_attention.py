"""Attention of both backends against its contract; the kernels are stood in for on the CPU, or lowered for CUDA without running."""

import contextlib
import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity.emulator import KERNELS, emulated
from pi05.errors import SpecError
from pi05.jax_backend import attention as jax_attention
from pi05.kernel_check import SCENES, Shape, exact_attention, make_scene
from pi05.recipe import Recipe
from pi05.spec import Compute, ModelSpec
from pi05.torch_backend import attention as torch_attention

ROOT = Path(__file__).resolve().parents[1]
TO = {"jax": jnp.asarray, "torch": torch.tensor}
each_backend = pytest.mark.parametrize("backend", ["jax", "torch"])


def module(backend: str):
    return importlib.import_module(f"pi05.{backend}_backend.attention")


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def fused(backend: str, scene, **changes) -> tuple[np.ndarray, ...]:
    arrays = {name: changes.get(name, getattr(scene, name)) for name in ("q", "k", "v", "valid", "g")}
    with emulated(backend):
        return module(backend).attention_and_gradients(*arrays.values(), strategy="fused_float16")


@each_backend
def test_pack_brings_valid_tokens_to_the_front_and_unpack_back(backend: str) -> None:
    to, attention = TO[backend], module(backend)
    valid = to([[False, True, False, True, True]])
    front, packed = attention.pack(valid, to([[[10.0], [11.0], [12.0], [13.0], [14.0]]]))
    assert front.tolist() == [[True, True, True, False, False]]
    assert packed[..., 0].tolist() == [[11, 13, 14, 10, 12]]
    assert attention.unpack(valid, packed)[..., 0].tolist() == [[10, 11, 12, 13, 14]]


@each_backend
def test_join_puts_the_valid_tokens_of_both_parts_in_front(backend: str) -> None:
    """Prefixes of 2 and 4 valid tokens out of 4; chunks of which the last, or the first and last, step is not real."""
    to, attention = TO[backend], module(backend)
    first_valid, second_valid = to([[True, True, False, False], [True] * 4]), to([[True, True, False], [False, True, False]])
    first, second = to([[[1.0], [2.0], [8.0], [9.0]], [[1.0], [2.0], [3.0], [4.0]]]), to([[[5.0], [6.0], [7.0]], [[5.0], [6.0], [7.0]]])
    joined = attention.join(first, second, first_valid, second_valid)[..., 0].tolist()
    valid = attention.join(first_valid, second_valid, first_valid, second_valid).tolist()
    assert [row[: sum(mask)] for row, mask in zip(joined, valid, strict=True)] == [[1, 2, 5, 6], [1, 2, 3, 4, 6]]
    assert valid == [[True] * 4 + [False] * 3, [True] * 5 + [False] * 2]


@each_backend
def test_a_fused_request_that_cannot_be_honoured_is_refused_by_its_switch(backend: str) -> None:
    attention, spec = module(backend), ModelSpec.tiny()
    with pytest.raises(SpecError, match="compute.attention is 'fused'.*need an NVIDIA GPU.*explicit"):
        attention.check_kernels("fused_float16", (72, 256), on_gpu=False)
    with pytest.raises(SpecError, match="compute.attention is 'fused'.*head dims to 256, not 264"):
        attention.check_kernels("fused_float16", (72, 264), on_gpu=True)
    attention.check_kernels("fused_float16", (72, 256), on_gpu=True)
    attention.check_kernels("explicit", (72, 264), on_gpu=False)
    with pytest.raises(SpecError, match="There is no attention strategy 'flash'"):
        attention.attention(None, None, None, strategy="flash")
    backend_class = importlib.import_module(f"pi05.{backend}_backend.backend").Backend
    with pytest.raises(SpecError, match="compute.attention is 'fused'"):  # before there are weights
        backend_class(spec, Compute(attention="fused"), Recipe(), device="cpu")
    x = TO[backend](np.zeros((1, 4, 2, 8), np.float32))
    with pytest.raises(SpecError, match="compute.attention is 'fused'"):
        attention.attention(x, x, x, strategy="fused_float16")


def test_what_is_unsafe_needs_its_own_switch() -> None:
    with pytest.raises(SpecError, match="compute.attention_dtype is 'bfloat16'.*common mean.*compute.allow_unsafe"):
        Compute(attention="fused", attention_dtype="bfloat16")
    assert Compute(attention="fused", attention_dtype="bfloat16", allow_unsafe=True).strategy == "fused_bfloat16"
    assert Compute(attention="fused").strategy == "fused_float16"
    with pytest.raises(SpecError, match="compute.attention is 'fused'.*compute.dtype is 'float64'"):
        Compute("float64", attention="fused")


@each_backend
def test_the_cotangent_is_scaled_by_an_exact_power_of_two_for_each_sample(backend: str) -> None:
    largest = np.array([1e-12, 0.9, 3.0, 1e20, 0.0, np.inf, np.nan], np.float32)
    g = np.broadcast_to(largest[:, None, None, None], (7, 2, 3, 4)) * np.where(np.arange(4) == 1, 1.0, 0.1).astype(np.float32)
    scale = np.asarray(module(backend).power_of_two(TO[backend](g)))[:, 0, 0, 0]
    assert (np.frexp(scale)[0] == 0.5).all(), "a power of two changes no mantissa"
    assert ((scale[:4] * largest[:4] >= 0.5) & (scale[:4] * largest[:4] < 1)).all()
    assert (scale[4:] == 1).all(), "zeros stay zeros, and what is not finite stays visible"


@each_backend
def test_dead_rows_get_exact_zeros_and_whatever_comes_back_to_them_changes_no_bit(backend: str) -> None:
    scene = make_scene("gauss", Shape(24, 24, 4, 2, 16))
    dead = ~scene.valid
    assert dead.any() and scene.valid.any(1).all()
    clean = fused(backend, scene)
    dirty = fused(backend, scene, g=np.where(dead[:, :, None, None], np.float32(1e30), scene.g))
    assert all(np.array_equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert not any(x[dead].any() for x in clean) and all(x[scene.valid].any(-1).all() for x in clean)


@each_backend
def test_a_sample_without_any_key_gives_zeros_and_spoils_no_other(backend: str) -> None:
    scene = make_scene("gauss", Shape(6, 24, 4, 2, 16))
    empty = scene.valid & np.array([[True], [False]])
    got, whole = fused(backend, scene, valid=empty), fused(backend, scene)
    assert not any(x[1].any() for x in got)
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(got, whole, strict=True))


@each_backend
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_visible_in_its_sample_alone(backend: str, bad: float) -> None:
    scene = make_scene("gauss", Shape(24, 24, 4, 2, 16))
    g = scene.g.copy()
    g[0, 3, 0, 0] = bad
    _, dq, dk, _ = fused(backend, scene, g=g)
    assert not np.isfinite(dq[0]).all() and not np.isfinite(dk[0]).all()
    assert np.isfinite(dq[1]).all() and np.isfinite(dk[1]).all()


@each_backend
@pytest.mark.parametrize("shape", [Shape(25, 25, 5, 5, 12, padded=False), Shape(7, 32, 6, 2, 20), Shape(33, 33, 4, 1, 16)], ids=str)
def test_any_length_head_dim_and_grouping_fits_the_kernels(backend: str, shape: Shape) -> None:
    """Odd lengths and head dims that 8 does not divide are padded; no padding may take part, with or without a mask, folded or not."""
    scene = make_scene("gauss", shape)
    want, to, compiled = exact_attention(scene)["out"], TO[backend], {"jax": jax.jit, "torch": lambda function: function}[backend]
    valid = None if scene.valid is None else to(scene.valid)
    for fold in (False, True):
        with emulated(backend):
            attend = compiled(functools.partial(module(backend).fused_attention, valid_BS=valid, dtype="float16", fold=fold))
            out = attend(*(to(x) for x in (scene.q, scene.k, scene.v)))
        assert out.shape == want.shape and relative(np.asarray(out, np.float64), want) < 2e-3


@each_backend
def test_the_stand_in_rounds_like_the_kernel(backend: str) -> None:
    """float16 products and softmax in float32: the error is that of float16, neither less (nothing rounded) nor more."""
    scene = make_scene("gauss", Shape(24, 24, 4, 2, 64, padded=False))
    f16 = [TO[backend](x.astype(np.float16)) for x in (scene.q, scene.k, scene.v)]
    out = np.asarray(KERNELS[backend](*f16, None, None, 64**-0.5), np.float64)
    assert 2.0**-14 < relative(out, exact_attention(scene)["out"]) < 2.0**-10


def test_the_stand_in_agrees_with_jax_own_attention_in_float16() -> None:
    scene = make_scene("gauss", Shape(24, 24, 4, 2, 64))
    q, k, v, g = (jnp.asarray(x, jnp.float16) for x in (scene.q, scene.k, scene.v, scene.g))
    lengths = jnp.asarray(scene.valid.sum(1), jnp.int32)
    own = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths, "implementation": "xla"}  # eagerly: XLA's CPU lacks it under jit
    functions = (
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **own),
        lambda q, k, v: KERNELS["jax"](q, k, v, lengths, lengths, 64**-0.5),
    )
    with jax.numpy_dtype_promotion("standard"):
        pairs = [jax.vjp(function, q, k, v) for function in functions]
        (out, *gradients), (like, *others) = ((out, *pull(g)) for out, pull in pairs)
    for a, b in zip((out, *gradients), (like, *others), strict=True):
        live = scene.valid
        assert relative(np.asarray(a, np.float64)[live], np.asarray(b, np.float64)[live]) < 2e-3


@pytest.mark.parametrize("scene", SCENES)
def test_both_backends_compute_the_same(scene: str) -> None:
    """The frameworks sum in another order, which at most moves a value to the next float16 or bfloat16."""
    case = make_scene(scene, Shape(24, 24, 4, 2, 32))
    for first, second in zip(fused("jax", case), fused("torch", case), strict=True):
        assert relative(first, second) < (2e-3 if scene not in ("common key mean", "log-sum-exp < -88") else 2e-2)


def test_pytorch_compiles_it_as_one_graph() -> None:
    scene = make_scene("gauss", Shape(24, 24, 4, 2, 16))
    valid, g = torch.tensor(scene.valid), torch.tensor(scene.g)

    def plain(q, k, v, query_len, key_len, scale):  # in operations that the compiler knows
        mask = (torch.arange(k.shape[1]) < key_len[:, None])[:, None, None]
        logits = torch.einsum("btnh,bsnh->bnts", q.float(), k.float().repeat_interleave(q.shape[2] // k.shape[2], 2)) * scale
        return torch.einsum(
            "bnts,bsnh->btnh", torch.softmax(logits.masked_fill(~mask, -np.inf), -1).to(q.dtype), v.repeat_interleave(q.shape[2] // k.shape[2], 2)
        )

    def attend(q, k, v):
        return torch_attention.attention(q, k, v, valid, strategy="fused_float16")

    with mock.patch.object(torch_attention, "kernel", plain):
        results = []
        for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
            inputs = [torch.tensor(x, requires_grad=True) for x in (scene.q, scene.k, scene.v)]
            out = function(*inputs)
            results.append((out, *torch.autograd.grad(out, inputs, g)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@contextlib.contextmanager
def pretend_hopper():
    """JAX lowers for an H200 that it cannot ask. Patches private names of JAX: only here, no user's path depends on them."""
    cudnn = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    answers = {"check_cudnn_version": lambda: 91_900, "check_compute_capability": lambda _: True, "is_cuda_compute_capability_equal": lambda c: c == "9.0"}
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(cudnn, name, answer))
        stack.enter_context(mock.patch.object(jax, "default_backend", lambda: "gpu"))
        yield


def cudnn_calls(function: Callable, *arguments: object) -> list[str]:
    """The lines of the lowered program that call cuDNN."""
    with pretend_hopper():
        text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return [line for line in text.splitlines() if "@__cudnn$fmha" in line]


@pytest.mark.parametrize("remat", ["none", "elementwise", "layer"])
def test_a_step_of_the_published_model_calls_cudnn_once_forward_and_once_backward_for_each_call_of_attention(remat: str) -> None:
    """Layers are scanned, so the program holds each of the three calls (vision, prefix, suffix) once, whatever is computed again."""
    from pi05.batch import make_draws, synthetic_batch
    from pi05.jax_backend.model import abstract_model, with_params
    from pi05.jax_backend.step import loss_and_gradients
    from pi05.params import shapes

    spec = ModelSpec.pi05()
    shell = abstract_model(spec, Compute(attention="fused", remat=remat))
    params = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in shapes(spec, "jax").items()}
    inputs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)),
        (synthetic_batch(spec, 2, seed=0), make_draws(spec, 0, 0, np.arange(2))),
    )
    lines = cudnn_calls(lambda params, batch, draws: loss_and_gradients(with_params(shell, params), batch, draws)[1], params, *inputs)
    forward, backward = ([line for line in lines if ("Backward" in line) == back] for back in (False, True))
    assert len(forward) == 3 and len(backward) == 3
    for line in lines:
        operands, _, results = line.partition(" : (")[2].partition(") -> ")
        assert "bf16" not in operands and "f16" in operands
        assert "1018x1018" not in line and "968x968" not in line, "no mask and no bias reaches the kernel"
        assert results.count("tensor<") == (4 if "Backward" in line else 3), "dq, dk, dv and workspace, or out, statistics and workspace: no dbias"
    assert sum("256x16x72" in line or "16x256x72" in line for line in lines) == 2


def test_a_sharded_batch_gives_the_kernel_local_shapes() -> None:
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, f16 = jax.sharding.PartitionSpec("data"), jnp.float16

    def step(q, k, v, valid, g):
        out, pull = jax.vjp(lambda q, k, v: jax_attention.attention(q, k, v, valid, strategy="fused_float16"), q, k, v)
        return out, *pull(g)

    sharded = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec)
    shape = jax.ShapeDtypeStruct
    arguments = [shape((16, 128, heads, 64), f16) for heads in (8, 1, 1)] + [shape((16, 128), jnp.bool_), shape((16, 128, 8, 64), f16)]
    lines = cudnn_calls(sharded, *arguments)
    assert len(lines) == 2
    assert all("tensor<2x128x8x64xf16>" in line and "tensor<16x" not in line for line in lines)


ON_EIGHT_DEVICES = """
import sys, jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from parity.emulator import emulated
from pi05.jax_backend.attention import attention, join, pack
from pi05.kernel_check import Shape, make_scene

scene = make_scene("gauss", Shape(16, 16, 4, 2, 16, batch=8))

def loss(q, k, v, valid, g):
    valid, q, k, v = pack(valid[:, ::-1], q, k, v)
    k, v = (join(x, 2 * x[:, :3], valid, valid[:, :3])[:, :16] for x in (k, v))
    layer = jax.checkpoint(lambda x: attention(x, k, v, valid, strategy="fused_float16") * 0.5)
    return (jax.lax.scan(lambda x, _: (layer(x), None), q, length=3)[0] * g).sum((1, 2, 3))

def step(*arrays):
    values, pull = jax.vjp(lambda q, k, v: loss(q, k, v, *arrays[3:]), *arrays[:3])
    return values, *pull(jnp.ones_like(values))

arrays = [jnp.asarray(x) for x in (scene.q, scene.k, scene.v, scene.valid, scene.g)]
with emulated("jax"):
    want = jax.jit(step)(*arrays)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            placed = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec("data")))
            compiled = jax.jit(step).lower(*placed).compile()
            for a, b in zip(compiled(*placed), want, strict=True):
                error = np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b))
                assert error < 2e-3, (kind, error)  # local shapes are summed in another order, which moves a float16 to the next
        found = [op for op in ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter") if op in compiled.as_text()]
        assert not found, (kind, found)
print(len(jax.devices()), "devices")
"""


def test_a_sharded_batch_costs_no_collective_and_changes_no_number() -> None:
    """Scales are per sample, so they need no reduction over devices, under scan and recomputation too. In its own process: it needs eight devices."""
    options = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ON_EIGHT_DEVICES], capture_output=True, text=True, env=os.environ | options, check=False)
    assert done.stdout == "8 devices\n", done.stderr
