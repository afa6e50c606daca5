"""Times the attention of one layer, forward and forward + backward, in both backends and every strategy; one JSON line each.

    python scripts/bench_attention.py [--backends jax torch] [--batch-size 32] [--text-range 60 120] [--spec pi05] [--repeats 20] [--json FILE]

Parts: "trunk" is what a layer of trunk and expert does (prefix x prefix, the join of the keys, suffix x both), with images, padded text and an action
chunk; "prefix" and "suffix" are its two calls alone, "vision" one layer of the vision tower on all cameras. The fused ones are also timed with
`fold` on and off (see attention.py). Medians in milliseconds; the same version is timed twice, so that `again_ms` shows the noise.
"""

import argparse
import functools
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pi05.spec import ModelSpec

WARMUP = 3
Arrays = tuple[np.ndarray, ...]


class Jax:
    """How to run and time a function of arrays in JAX."""

    def __init__(self) -> None:
        import jax
        import jax.numpy as jnp

        self.jax, self.jnp, self.concatenate = jax, jnp, functools.partial(jnp.concatenate, axis=1)
        self.name = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"

    def put(self, array: np.ndarray) -> Any:
        return self.jax.device_put(array if array.dtype == bool else self.jnp.asarray(array, self.jnp.bfloat16))

    def runs(self, function: Callable, inputs: list, cotangents: list) -> tuple[Callable, Callable]:
        forward = self.jax.jit(function)
        both = self.jax.jit(lambda inputs, cotangents: (lambda out, pull: (out, pull(cotangents)))(*self.jax.vjp(function, *inputs)))
        return lambda: self.jax.block_until_ready(forward(*inputs)), lambda: self.jax.block_until_ready(both(tuple(inputs), tuple(cotangents)))


class Torch:
    """How to run and time a function of arrays in PyTorch."""

    def __init__(self) -> None:
        import torch

        self.torch, self.device, self.concatenate = torch, "cuda" if torch.cuda.is_available() else "cpu", functools.partial(torch.cat, dim=1)
        self.name = f"{torch.cuda.get_device_name() if self.device == 'cuda' else 'cpu'}, torch {torch.__version__}"

    def put(self, array: np.ndarray) -> Any:
        return self.torch.tensor(array, device=self.device, dtype=self.torch.bool if array.dtype == bool else self.torch.bfloat16)

    def runs(self, function: Callable, inputs: list, cotangents: list) -> tuple[Callable, Callable]:
        def forward() -> None:
            with self.torch.no_grad():
                function(*inputs)
            self._wait()

        def both() -> None:
            leaves = [x.requires_grad_() for x in inputs]
            self.torch.autograd.grad(function(*leaves), leaves, cotangents)
            self._wait()

        return forward, both

    def _wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


def parts(framework: Any, module: Any, spec: ModelSpec, args: argparse.Namespace) -> Iterator[tuple[str, str, Callable, list[Arrays]]]:
    """(part, strategy, function of arrays, (inputs, cotangents)) of everything that is timed."""
    rng, batch, trunk, vision = np.random.default_rng(0), args.batch_size, spec.trunk, spec.vision
    images, suffix = len(spec.cameras) * vision.num_patches, spec.action_horizon
    prefix = images + spec.max_token_len
    low, high = args.text_range
    prefix_valid = framework.put(np.arange(prefix) < images + rng.integers(low, high + 1, (batch, 1)))
    suffix_valid = framework.put(np.ones((batch, suffix), bool))

    def make(*sizes: tuple[int, int]) -> Arrays:
        return tuple(rng.standard_normal((batch, length, heads, trunk.head_dim), np.float32) for length, heads in sizes)

    queries, keys, more_queries, more_keys = (prefix, trunk.num_heads), (prefix, trunk.num_kv_heads), (suffix, trunk.num_heads), (suffix, trunk.num_kv_heads)
    joined = (prefix + suffix, trunk.num_kv_heads)

    def layer(strategy: str) -> Callable:
        def run(q: Any, k: Any, v: Any, more_q: Any, more_k: Any, more_v: Any) -> tuple:
            join = functools.partial(module.join, first_valid_BS=prefix_valid, second_valid_BA=suffix_valid)
            join = join if module.is_fused(strategy) else lambda *pair: framework.concatenate(pair)
            every = (join(*pair) for pair in ((k, more_k), (v, more_v), (prefix_valid, suffix_valid)))
            return module.attention(q, k, v, prefix_valid, strategy=strategy), module.attention(more_q, *every, strategy=strategy)

        return run

    both_valid = module.join(prefix_valid, suffix_valid, prefix_valid, suffix_valid)
    pictures = tuple(rng.standard_normal((batch * len(spec.cameras), vision.num_patches, vision.num_heads, vision.head_dim), np.float32) for _ in range(3))
    for strategy in args.strategies:
        yield "trunk", strategy, layer(strategy), [make(queries, keys, keys, more_queries, more_keys, more_keys), make(queries, more_queries)]
        yield "vision", strategy, lambda q, k, v, s=strategy: (module.attention(q, k, v, strategy=s),), [pictures, pictures[:1]]
        if module.is_fused(strategy):
            for fold in (False, True):
                call = functools.partial(module.fused_attention, dtype=strategy.removeprefix("fused_"), fold=fold)
                name = f"{strategy} fold={fold}"
                yield "prefix", name, lambda q, k, v, call=call: (call(q, k, v, prefix_valid),), [make(queries, keys, keys), make(queries)]
                yield "suffix", name, lambda q, k, v, call=call: (call(q, k, v, both_valid),), [make(more_queries, joined, joined), make(more_queries)]


def median_ms(run: Callable, repeats: int) -> float:
    times = []
    for index in range(repeats + WARMUP):
        start = time.perf_counter()
        run()
        if index >= WARMUP:
            times.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(times), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["jax", "torch"])
    parser.add_argument("--strategies", nargs="+", default=["explicit", "fused_float16", "fused_bfloat16"])
    parser.add_argument("--spec", default="pi05")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--text-range", type=int, nargs=2, default=[60, 120])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    spec = ModelSpec.preset(args.spec)
    for backend in args.backends:
        framework, module = {"jax": Jax, "torch": Torch}[backend](), importlib.import_module(f"pi05.{backend}_backend.attention")
        for part, strategy, function, arrays in parts(framework, module, spec, args):
            forward, both = framework.runs(function, *([framework.put(x) for x in group] for group in arrays))
            line = {"part": part, "backend": backend, "strategy": strategy, "batch_size": args.batch_size, "machine": framework.name}
            line |= {"forward_ms": median_ms(forward, args.repeats), "both_ms": median_ms(both, args.repeats), "again_ms": median_ms(both, args.repeats)}
            print(json.dumps(line), flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
