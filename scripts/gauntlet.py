"""Runs the scenes of pi05/kernel_check.py on the attention kernels of this machine, in the published shapes, and prints one line each.

    python scripts/gauntlet.py [--backends jax torch] [--strategies explicit fused_float16 fused_bfloat16] [--lengths 896 898 928 960 961 1018] [--json FILE]

The exit code is 1 if fused_float16 is not SAFE somewhere. `pytest parity/level_8_attention.py --device cuda` also runs the known bad paths.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import sys
import time
from pathlib import Path

from pi05.kernel_check import SCENES, Shape, judge, run

LENGTHS = (896, 898, 928, 960, 961, 1018)  # S % 128 is 0, 2, 32, 64, 65, 122


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["jax", "torch"])
    parser.add_argument("--strategies", nargs="+", default=["explicit", "fused_float16", "fused_bfloat16"])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prefix = [Shape(length, length, 8, 1, 256) for length in args.lengths]
    shapes = [*prefix, Shape(50, 1018, 8, 1, 256), Shape(256, 256, 16, 16, 72, padded=False)]
    pairs = [(backend, strategy) for backend in args.backends for strategy in args.strategies]
    worst, unsafe, started = dict.fromkeys(pairs, 0.0), {pair: [] for pair in pairs}, time.perf_counter()
    for shape, scene, pair in itertools.product(shapes, SCENES, pairs):  # a scene's truth costs more than a kernel, so it is made once for all
        verdict = judge(functools.partial(run, *pair), scene, shape)
        worst[pair] = max(worst[pair], verdict.ratio)
        unsafe[pair] += [] if verdict.safe else [f"S={shape.keys} {scene} ({verdict.where} {verdict.ratio:.1f})"]
        print(f"{' '.join(pair)} {shape} {scene}: {'SAFE' if verdict.safe else 'UNSAFE'} {verdict.ratio:.2f} {verdict.where} {verdict.reason}", flush=True)
        if args.json:
            with args.json.open("a") as file:
                names = dict(zip(("backend", "strategy"), pair, strict=True))
                file.write(json.dumps(names | {"shape": dataclasses.asdict(shape), "safe": verdict.safe} | dataclasses.asdict(verdict)) + "\n")
    print(f"\n{time.perf_counter() - started:.0f} s")
    for pair in pairs:
        print(f"{' '.join(pair)}: {'UNSAFE' if unsafe[pair] else 'SAFE'}, worst ratio {worst[pair]:.2f}. {'; '.join(unsafe[pair])}")
    return int(any(unsafe[pair] for pair in pairs if pair[1] == "fused_float16"))


if __name__ == "__main__":
    sys.exit(main())
