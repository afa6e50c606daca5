"""Times one training step's forward and backward pass (no optimizer) of either backend, with the explicit attention.

    python scripts/bench_step.py --backend jax --batch-size 16 [--spec pi05|tiny] [--dtype bfloat16] [--token-len 200] [--no-remat]

Prints the machine, the shape, the median of the steps, samples/s, model TFLOP/s and peak memory of the device.
Every batch is new and random; weights are a fresh model's with warm modulations, so nothing multiplies by zero.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from pi05.batch import Batch, Draws, make_draws, synthetic_batch
from pi05.initial import initial_params
from pi05.params import philox
from pi05.spec import Compute, ModelSpec


def warm(tensors: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """The same tensors; those that start at zero get small random values."""
    for name, array in tensors:
        if not array.any():
            array = philox(0, name).standard_normal(array.shape, np.float32) * np.float32(0.02)
        yield name, array


def jax_step(spec: ModelSpec, compute: Compute) -> tuple[Callable[[Batch, Draws], float], Callable[[], float], str]:
    """A function that runs one step and returns the loss, one that returns peak bytes, and the device's name."""
    import jax
    from flax import nnx

    from pi05.jax_backend.model import from_numpy, make_model
    from pi05.jax_backend.step import loss_and_gradients

    graph, state = nnx.split(make_model(spec, compute, warm(initial_params(spec, 0))))
    compiled = jax.jit(lambda state, batch, draws: loss_and_gradients(nnx.merge(graph, state), batch, draws))
    device = jax.devices()[0]

    def step(batch: Batch, draws: Draws) -> float:
        parts, gradients = compiled(state, from_numpy(batch), from_numpy(draws))
        jax.block_until_ready(gradients)
        return float(parts.per_sample.mean())

    return step, lambda: (device.memory_stats() or {}).get("peak_bytes_in_use", 0), f"jax {jax.__version__} on {device.device_kind}"


def torch_step(spec: ModelSpec, compute: Compute) -> tuple[Callable[[Batch, Draws], float], Callable[[], float], str]:
    """The same for PyTorch, eagerly."""
    import torch

    from pi05.torch_backend.model import from_numpy, make_model
    from pi05.torch_backend.step import loss_and_gradients

    cuda = torch.cuda.is_available()
    torch.set_default_device("cuda" if cuda else "cpu")
    model = make_model(spec, compute, warm(initial_params(spec, 0)))

    def step(batch: Batch, draws: Draws) -> float:
        parts, _ = loss_and_gradients(model, from_numpy(batch), from_numpy(draws))
        return float(parts.per_sample.mean())

    peak = torch.cuda.max_memory_allocated if cuda else lambda: 0
    return step, peak, f"torch {torch.__version__} on {torch.cuda.get_device_name() if cuda else 'cpu'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["jax", "torch"], required=True)
    parser.add_argument("--spec", default="pi05")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--token-len", type=int, default=200)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--no-remat", dest="remat", action="store_false")
    args = parser.parse_args()

    spec, compute = ModelSpec.preset(args.spec), Compute(dtype=args.dtype, remat=args.remat)
    token_len = min(args.token_len, spec.max_token_len)
    step, peak, where = {"jax": jax_step, "torch": torch_step}[args.backend](spec, compute)
    times, losses = [], []
    for index in range(args.steps + 2):
        batch = synthetic_batch(spec, args.batch_size, seed=index, token_len=token_len, missing_cameras=False)
        draws = make_draws(spec, 0, 0, np.arange(args.batch_size) + index * args.batch_size)
        start = time.perf_counter()
        losses.append(step(batch, draws))
        times.append(time.perf_counter() - start)
        if index == 0:
            print(f"first step after {times[0]:.1f} s, compilation included; loss {losses[0]:.3f}", flush=True)
    median = statistics.median(times[2:])
    teraflops = spec.training_flops(token_len=token_len) * args.batch_size / median / 1e12
    print(f"{where}: {args.spec} {args.dtype} batch {args.batch_size}, {token_len} text tokens, remat {args.remat}, host-to-device copy included")
    print(f"  first {times[0]:.1f} s, median {median:.3f} s of {args.steps}, min {min(times[2:]):.3f} s, max {max(times[2:]):.3f} s")
    print(f"  {args.batch_size / median:.1f} samples/s, {teraflops:.0f} model TFLOP/s, peak {peak() / 2**30:.1f} GiB, loss {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
