"""Times full training steps of the published model: gradients, clipping, AdamW, moving average; random weights, synthetic batches.

    python scripts/bench_train_step.py --backend jax [--batch-size 32] [--grad-accum 2] [--attention fused] [--remat none] [--cameras 3]
        [--token-len 200 | --token-range 60 120] [--no-ema] [--steps 12] [--json FILE]

Prints the machine, the shape, compile time, the median step, samples/s, MFU and peak memory; --json appends one line. MFU counts the model's own
operations (spec.training_flops of the tokens that are there), not what is computed again, against 989 TFLOP/s (dense bfloat16 of an H100/H200)
and against 790 (what a plain 8192^3 product reaches on an H200).
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pi05.backend import load_backend
from pi05.batch import Batch, make_draws, synthetic_batch
from pi05.params import rows, shape
from pi05.recipe import Recipe
from pi05.spec import Compute, ModelSpec

PEAKS = {"of 989": 989e12, "of 790": 790e12}
WARMUP = 3


def cheap_weights(spec: ModelSpec) -> Iterator[tuple[str, np.ndarray]]:
    """Random weights of plausible size, made as fast as memory allows: time does not depend on their values."""
    block = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    for row in rows(spec):
        size = shape(row, spec)
        fan_in = max(1, int(np.prod(size[1 if row.stacked else 0 : -1]))) if len(size) > 1 else 1
        scale = np.float32(0.02 if len(size) == 1 or row.name.endswith((".scale", ".bias")) else fan_in**-0.5)
        yield row.name, np.resize(block, size) * scale


def make_batch(spec: ModelSpec, args: argparse.Namespace, seed: int) -> Batch:
    """A batch with `--cameras` cameras; text of one length, or of random lengths in a range, padded to the longest rounded up to 8."""
    low, high = args.token_range or (args.token_len, args.token_len)
    batch = synthetic_batch(spec, args.batch_size, seed=seed, token_len=-(-high // 8) * 8, missing_cameras=False, padded_text=False, padded_actions=False)
    lengths = np.random.default_rng(seed).integers(low, high + 1, (args.batch_size, 1))
    seen = batch.observation
    seen = dataclasses.replace(
        seen,
        images=np.ascontiguousarray(seen.images[:, : args.cameras]),
        image_mask=np.ascontiguousarray(seen.image_mask[:, : args.cameras]),
        token_mask=np.arange(seen.tokens.shape[1]) < lengths,
    )
    return dataclasses.replace(batch, observation=seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["jax", "torch"], required=True)
    parser.add_argument("--spec", default="pi05")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--attention", choices=["explicit", "fused"], default="explicit")
    parser.add_argument("--remat", choices=["none", "elementwise", "layer"], default="layer")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--grad-accum", type=int, default=1)
    parser.add_argument("--cameras", type=int, default=3)
    parser.add_argument("--token-len", type=int, default=200)
    parser.add_argument("--token-range", type=int, nargs=2)
    parser.add_argument("--no-ema", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    spec = ModelSpec.preset(args.spec)
    compute = Compute(dtype=args.dtype, attention=args.attention, remat=args.remat)
    recipe = Recipe(ema_decay=None if args.no_ema else 0.99, grad_accum_steps=args.grad_accum)
    backend = load_backend(args.backend, spec, compute, recipe)
    state = backend.init_state(cheap_weights(spec))
    batches = [make_batch(spec, args, seed) for seed in range(3)]
    draws = [make_draws(spec, 0, seed, np.arange(args.batch_size)) for seed in range(3)]
    times, losses = [], []
    for step in range(args.steps + WARMUP):
        start = time.perf_counter()
        state, metrics = backend.train_step(state, batches[step % 3], draws[step % 3], 1e-5)
        losses.append(metrics.fetch()["loss"])
        times.append(time.perf_counter() - start)
    timed = times[WARMUP:]
    median = statistics.median(timed)
    tokens = float(np.mean([batch.observation.token_mask.sum(1).mean() for batch in batches]))
    flops = spec.training_flops(args.cameras, round(tokens)) * args.batch_size
    peak = backend.peak_memory() or 0
    line = {
        "backend": args.backend, "machine": backend.describe(), "spec": args.spec, "dtype": args.dtype, "attention": args.attention, "remat": args.remat,
        "batch_size": args.batch_size, "grad_accum": args.grad_accum, "cameras": args.cameras,
        "text": args.token_range or args.token_len, "ema": not args.no_ema,
        "first_s": round(times[0], 1), "median_s": round(median, 4), "min_s": round(min(timed), 4), "max_s": round(max(timed), 4), "steps": len(timed),
        "samples_per_s": round(args.batch_size / median, 2), "tflops": round(flops / median / 1e12, 1),
        "mfu": {name: round(flops / median / limit, 3) for name, limit in PEAKS.items()}, "peak_gib": round(peak / 2**30, 1),
        "losses": [round(losses[0], 4), round(losses[-1], 4)],
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    if args.json:
        with args.json.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
