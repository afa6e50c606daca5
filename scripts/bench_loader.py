"""What the loader costs and what shared memory saves, on this machine.

    python scripts/bench_loader.py                                   # transport alone: samples that cost nothing to make
    python scripts/bench_loader.py --dataset DIR --robot NAME        # and real data: stages, samples/s by number of workers

The comparison is the common way: a torch DataLoader whose workers stack NumPy arrays and send them pickled. Same samples, same order, same
start method. `wall` and `CPU of main` are per batch; workers are warm before the clock starts.
"""

import argparse
import dataclasses
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pi05.data.collate import BatchMaker, Task, allocate_private, allocate_shared
from pi05.data.dataset import Dataset, open_dataset
from pi05.data.images import resize_with_pad
from pi05.data.loader import make_loader
from pi05.data.order import SampleOrder
from pi05.spec import ModelSpec

TEXT = np.arange(60, dtype=np.int32)


class FreeRows:
    """A dataset whose rows cost nothing: two ready images a camera."""

    def __init__(self, spec: ModelSpec, length: int) -> None:
        self.lengths, self.weights, self.action_horizon, self.fingerprint = (length,), None, spec.action_horizon, "free"
        edge = spec.vision.image_size
        self._images = np.random.default_rng(0).integers(0, 256, (2, len(spec.cameras), edge, edge, 3), np.uint8)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"images": self._images[index % 2], "index": index}

    def describe(self, index: int) -> str:
        return f"row {index}"


@dataclasses.dataclass(frozen=True)
class FreePipeline:
    """FreeRows to samples without work."""

    spec: ModelSpec

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return sample(self.spec, row["images"], np.zeros((self.spec.action_horizon, self.spec.action_dim), np.float32), row["index"])


@dataclasses.dataclass(frozen=True)
class ResizePipeline:
    """The costly part of the real pipeline: resizing with pad. Text is constant."""

    spec: ModelSpec
    cameras: tuple[str, ...]
    action: str

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        edge = self.spec.vision.image_size
        actions = np.zeros((self.spec.action_horizon, self.spec.action_dim), np.float32)
        actions[:, : row[self.action].shape[1]] = row[self.action]
        return sample(self.spec, np.stack([resize_with_pad(row[camera], edge) for camera in self.cameras]), actions, row["index"])


def sample(spec: ModelSpec, images: np.ndarray, actions: np.ndarray, index: int) -> dict[str, Any]:
    return {
        "images": images,
        "image_mask": np.ones(len(images), bool),
        "tokens": TEXT,
        "actions": actions,
        "action_is_pad": np.zeros(spec.action_horizon, bool),
        "action_dim_is_pad": np.zeros(spec.action_dim, bool),
        "sample_id": index,
    }


class Samples:
    """Transformed samples one by one, for the pickled way."""

    def __init__(self, dataset: Any, pipeline: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.dataset, self.pipeline = dataset, pipeline

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.pipeline(self.dataset[index])


def stack(samples: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {name: np.stack([one[name] for one in samples]) for name in samples[0]}


def pickled(dataset: Any, pipeline: Any, batch_size: int, workers: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches the common way."""
    import torch.utils.data

    order = SampleOrder(dataset.lengths, dataset.weights, 0)
    batches = (order.rows(np.arange(step * batch_size, (step + 1) * batch_size)).tolist() for step in range(10**9))
    options = {"multiprocessing_context": "spawn", "prefetch_factor": 2} if workers else {}
    yield from torch.utils.data.DataLoader(Samples(dataset, pipeline), batch_sampler=batches, collate_fn=stack, num_workers=workers, **options)


def clock(batches: Iterator[Any], count: int, warm: int) -> tuple[float, float]:
    """Wall and this process's CPU seconds a batch."""
    for _ in range(warm):
        next(batches)
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(count):
        next(batches)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    return wall / count, (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / count


def compare(dataset: Any, pipeline: Any, spec: ModelSpec, args: argparse.Namespace) -> None:
    """Prints samples/s of both ways for each number of workers."""
    for workers in args.workers:
        warm = max(2, 3 * workers)
        common = pickled(dataset, pipeline, args.batch_size, workers)
        results = {"pickled NumPy": clock(common, args.batches, warm)}
        common.close()
        with make_loader(dataset, pipeline, spec, batch_size=args.batch_size, seed=0, num_workers=workers) as loader:
            results["pi05 loader"] = clock(loader.batches(), args.batches, warm)
        (wall, cpu), (our_wall, our_cpu) = results.values()
        for name, (seconds, own) in results.items():
            print(f"  {workers} workers, {name:14} {args.batch_size / seconds:8.0f} samples/s   wall {seconds * 1e3:7.2f} ms   CPU of main {own * 1e3:6.2f} ms")
        print(f"  {workers} workers, ratio          {wall / our_wall:8.2f} x           {'':14}        CPU of main {cpu / our_cpu:6.2f} x")


def stages(dataset: Dataset, pipeline: ResizePipeline, spec: ModelSpec, args: argparse.Namespace) -> None:
    """Prints what each stage costs in one process."""
    maker = BatchMaker(dataset, pipeline, spec, 0, None)
    rows = SampleOrder(dataset.lengths, dataset.weights, 0).rows(np.arange(args.batch_size))
    raw, read = timed(lambda: [dataset[int(row)] for row in rows])
    _, resize = timed(lambda: [pipeline(row) for row in raw])
    free = BatchMaker(FreeRows(spec.replace(cameras=spec.cameras[: len(pipeline.cameras)]), 1000), FreePipeline(spec), spec, 0, None)
    task = Task(step=0, epochs=np.zeros(len(rows), np.int64), places=np.arange(len(rows)), rows=rows)
    _, collate = timed(lambda: free.make(task, allocate_private))
    _, shared = timed(lambda: free.make(task, allocate_shared))
    block = maker.make(task, allocate_shared)
    _, opened = timed(block.open)
    for name, seconds in {
        "read rows and decode": read,
        "resize with pad": resize,
        "collate, draws, validate": collate,
        "the same into shared memory": shared,
        "open the views": opened,
    }.items():
        print(f"  {name:28} {seconds / len(rows) * 1e3:8.3f} ms a sample")


def timed(make: Callable[[], Any], repeats: int = 3) -> tuple[Any, float]:
    """The result and the best of `repeats` times."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = make()
        times.append(time.perf_counter() - started)
    return result, min(times)


def prove_zero_copy(dataset: Any, pipeline: Any, spec: ModelSpec) -> None:
    """Prints whose memory the images are, and what JAX on the CPU makes of them."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    import jax.numpy as jnp

    with make_loader(dataset, pipeline, spec, batch_size=8, seed=0, num_workers=1) as loader:
        images = next(loader.batches())[0].observation.images
    address = images.ctypes.data
    found = "private memory"
    for line in Path("/proc/self/maps").read_text().splitlines():
        if (match := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ +(.*)", line)) and int(match[1], 16) <= address < int(match[2], 16):
            found = f"{match[3]} {match[4]}"
    print(f"  images: {images.nbytes / 1e6:.1f} MB at {address:#x}, {address % 64} past a multiple of 64, in the mapping: {found}")
    for name, put in {"jax.device_put": jax.device_put, "jnp.asarray": jnp.asarray}.items():
        same = put(images).unsafe_buffer_pointer() == address
        print(f"  {name:15} on the CPU: {'the same address, no copy' if same else 'a copy'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path)
    parser.add_argument("--robot", default="metaworld")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    spec = ModelSpec.pi05()
    free, pipeline = FreeRows(spec, 10_000), FreePipeline(spec)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, batch {args.batch_size}")
    print(f"transport, {len(spec.cameras)} cameras of {spec.vision.image_size} pixels")
    compare(free, pipeline, spec, args)
    print("memory")
    prove_zero_copy(free, pipeline, spec)
    if args.dataset:
        from pi05.robots.base import load_robot

        robot = load_robot(args.robot)
        dataset = open_dataset(args.dataset, robot=robot, action_horizon=spec.action_horizon)
        real = ResizePipeline(spec, tuple(robot.cameras.values()), robot.action_column)
        print(f"{args.dataset.name}, {len(real.cameras)} cameras, one process")
        stages(dataset, real, spec, args)
        print(f"{args.dataset.name}, whole way")
        compare(dataset, real, spec, args)


if __name__ == "__main__":
    sys.exit(main())
