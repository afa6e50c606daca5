"""Batches in order, from worker processes, with an end that leaves nothing behind.

Each batch is made whole by one process (collate.py). A worker writes it into shared memory and sends the handle; the main process hands
out NumPy views of that very memory, so no image byte is copied or pickled in between. Memory is written once: a block is never
reused, and it is freed when its last view is gone. A transfer that still reads (on the CPU jax.device_put aliases the block, towards a
GPU it reads in the background) holds such a view, so it can see neither a later batch nor freed memory.

Batch k is a function of (dataset, seed, k) alone, whatever the number of workers and processes: the global batch comes first, process p
takes the p-th of its equal slices. Epochs follow each other without a gap, a batch may span two, nothing is dropped.

Workers are spawned. Forked ones would inherit JAX's and CUDA's locks without their threads (JAX warns of the deadlock), and the
forkserver, faster to start, leaves a process behind that no public call ends. Spawned workers import what they need: no JAX.
"""

import contextlib
import faulthandler
import itertools
import multiprocessing.connection
import multiprocessing.context
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from pi05.batch import Batch, Draws
from pi05.data.augment import Augmentation, check_preset
from pi05.data.collate import BatchMaker, Block, Sample, Task, allocate_private, allocate_shared
from pi05.data.dataset import Dataset
from pi05.data.order import SampleOrder
from pi05.errors import ConfigError, DataError, Pi05Error
from pi05.spec import ModelSpec

SHARED_MEMORY = Path("/dev/shm")
HELD_BATCHES = 3  # that the main process may hold besides the waiting ones: in use, in transfer, being received
POLL_SECONDS = 2.0  # a dead worker is noticed within this time
START_SECONDS = 60.0  # that workers may need to start, on top of stall_seconds
JOIN_SECONDS = 2.0


class Loader:
    """The batches of a run; made by make_loader. A context manager: leaving it ends the workers.

    seconds_waited: time that batches() has spent waiting for data so far, to judge whether the loader is the bottleneck.
    """

    def __init__(self, maker: BatchMaker, order: SampleOrder, batch_size: int, slice_: slice, workers: "Workers | None") -> None:
        self.seconds_waited = 0.0
        self._maker, self._order, self._batch_size, self._slice, self._workers = maker, order, batch_size, slice_, workers

    def batches(self, first: int = 0, last: int | None = None) -> Iterator[tuple[Batch, Draws]]:
        """Batches `first` to `last` - 1 (None: without end), this process's share, with their draws.

        Starts at `first` without reading anything before it. One call at a time: a second one ends the first.

        Raises:
            DataError: a sample is bad (names dataset, episode, frame), or a worker died or is silent (names the likely cause).
        """
        blocks = self._blocks(map(self._task, itertools.count(first) if last is None else range(first, last)))
        while True:
            started = time.monotonic()
            block = next(blocks, None)
            self.seconds_waited += time.monotonic() - started
            if block is None:
                return
            yield block.open()

    def state(self, step: int) -> dict[str, int | str]:
        """What decides the data after `step` steps, for a checkpoint; plain JSON values."""
        return {
            "position": step * self._batch_size,
            "seed": self._maker.seed,
            "batch_size": self._batch_size,
            "epoch_size": self._order.epoch_size,
            "dataset": self._maker.dataset.fingerprint,
            "augmentation": self._maker.augmentation,
        }

    def check_state(self, saved: dict[str, int | str]) -> None:
        """Refuses a checkpoint's state if this loader would continue with other data.

        Raises:
            DataError: names the fields that differ.
        """
        own = self.state(0)
        if changed := [f"{key} was {saved.get(key)!r}, is {own[key]!r}" for key in own if key != "position" and saved.get(key) != own[key]]:
            raise DataError(f"Resuming would not continue the order of the data: {'; '.join(changed)}. Restore these, or start a new run.")

    def close(self) -> None:
        """Ends the workers and waits for them; may be called again."""
        if self._workers:
            self._workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        died = self._workers.died() if self._workers and isinstance(error, RuntimeError) else None
        self.close()
        if died:  # torch raises from a signal handler, so anywhere in the body
            raise DataError(died) from error

    def _blocks(self, tasks: Iterator[Task]) -> Iterator[Block]:
        if self._workers:
            return self._workers.run(tasks)
        return (self._maker.make(task, allocate_private) for task in tasks)

    def _task(self, step: int) -> Task:
        positions = step * self._batch_size + np.arange(self._batch_size, dtype=np.int64)[self._slice]
        epochs, places = self._order.epochs(positions)
        return Task(step=step, epochs=epochs, places=places, rows=self._order.rows(positions))


class Workers:
    """Worker processes behind a torch DataLoader whose item is a whole batch."""

    def __init__(self, maker: BatchMaker, count: int, prefetch: int, stall_seconds: float) -> None:
        import torch

        self._stall_seconds, self._tasks, self._context = stall_seconds, _Tasks(), _RecordingContext()
        self._started, self._running = False, None
        self._iterator: Iterator[Block | Pi05Error] | None = None  # here and in no frame: a traceback would keep the workers alive
        self._loader: Any = torch.utils.data.DataLoader(
            _Blocks(maker),
            batch_size=None,  # an item is a batch
            sampler=self._tasks,
            collate_fn=_unchanged,
            num_workers=count,
            prefetch_factor=prefetch,
            persistent_workers=True,
            timeout=min(POLL_SECONDS, stall_seconds),
            multiprocessing_context=self._context,
            worker_init_fn=_begin_worker,
            generator=torch.Generator(),  # torch draws a seed from it; without one, from the global generator
        )

    def run(self, tasks: Iterator[Task]) -> Iterator[Block]:
        """The blocks of `tasks`, in order."""
        if self._loader is None:
            raise DataError("The loader is closed.")
        if self._running:
            self._running.close()
        self._tasks.current = tasks
        self._running = self._receive()
        return self._running

    def died(self) -> str | None:
        """What to tell the user if a worker ended by itself."""
        for process in self._context.processes:
            if process.exitcode is not None:
                code = process.exitcode
                how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
                return (
                    f"Loader worker {process.pid} died with {how}. SIGKILL is usually the system running out of memory, SIGBUS a full "
                    f"{SHARED_MEMORY} ({_shared_free() / 1e6:.0f} MB free now); use fewer workers or a smaller batch. Else see its output above."
                )
        return None

    def close(self) -> None:
        """Ends every worker: asks, then terminates, then kills."""
        if self._running:
            self._running.close()
        self._running = self._iterator = self._loader = None  # torch's iterator is gone with it: it tells its workers to end and joins them
        for end in (None, signal.SIGTERM, signal.SIGKILL):  # the signals only if a traceback still holds the iterator, or a worker hangs
            with contextlib.suppress(RuntimeError):  # torch's handler of SIGCHLD reports the end we cause
                for process in self._context.processes:
                    if end and process.is_alive():
                        os.kill(process.pid, end)
            self._join()

    def _join(self) -> None:
        deadline = time.monotonic() + JOIN_SECONDS
        for process in self._context.processes:
            with contextlib.suppress(RuntimeError):
                process.join(max(0.0, deadline - time.monotonic()))

    def _receive(self) -> Iterator[Block]:
        self._iterator = iter(self._loader)
        while (block := self._next()) is not None:
            yield block

    def _next(self) -> Block | None:
        started = time.monotonic()
        while True:
            asked, failure = time.monotonic(), None
            try:
                block = next(self._iterator, None)
            except (RuntimeError, OSError, EOFError) as error:  # torch names no type of its own for "died" and "timed out"
                failure = self._failure(error, asked, started)
            else:
                self._started = True
                if not isinstance(block, Pi05Error):
                    return block
                failure = block
            if failure:
                raise failure  # outside the handler: torch's frames, which hold the workers, are not its context

    def _failure(self, error: Exception, asked: float, started: float) -> Exception | None:
        """What to raise for torch's `error`; None if it only says that nothing came in POLL_SECONDS."""
        now = time.monotonic()
        timed_out = now - asked > 0.9 * min(POLL_SECONDS, self._stall_seconds)
        if not timed_out:
            self._wait_for_end()  # a connection breaks a moment before its process has ended
        if died := self.died():
            return DataError(died)
        if not timed_out:
            return error
        if now - started < self._stall_seconds + (0 if self._started else START_SECONDS):
            return None
        alive = [process for process in self._context.processes if process.is_alive()]
        for process in alive:
            os.kill(process.pid, signal.SIGUSR1)  # _begin_worker
        self._wait_for_end()  # they do not end: the time is for writing their stacks
        for process in alive:
            process.terminate()  # else torch waits 5 s for each of them to end by itself
        faulthandler.dump_traceback(file=sys.__stderr__)
        return DataError(
            f"No batch for {now - started:.0f} s; {len(alive)} workers are alive, their stacks were written to standard error. "
            "A slow or hanging file system is the usual cause."
        )

    def _wait_for_end(self) -> None:
        """Waits a second, or until a worker has ended."""
        with contextlib.suppress(RuntimeError):  # torch's signal handler; what it says is asked of died()
            ended = multiprocessing.connection.wait([process.sentinel for process in self._context.processes], timeout=1.0)
            for process in self._context.processes:
                if process.sentinel in ended:
                    process.join()


def make_loader(
    dataset: Dataset,
    pipeline: Callable[[dict[str, Any]], Sample],
    spec: ModelSpec,
    *,
    batch_size: int,
    seed: int,
    num_workers: int,
    process_index: int = 0,
    process_count: int = 1,
    token_len: int | None = None,
    prefetch: int = 2,
    stall_seconds: float = 120.0,
    augmentation: Augmentation = "none",
    cameras: tuple[str, ...] | None = None,
) -> Loader:
    """A loader of `dataset`'s rows through `pipeline`, in an order that follows from `seed`.

    batch_size: samples of all processes together; this process gets the slice number `process_index` of `process_count`.
    num_workers: worker processes; 0 makes the batches in this process, on demand.
    token_len: length of the text. None: with one process the batch's longest prompt rounded up to 16; with several the spec's limit,
        because all processes must agree and none knows the others' prompts. It changes no result (masked text is masked), only time.
    prefetch: batches each worker works ahead.
    stall_seconds: without any batch for so long, the loader gives up (a minute more while the workers start).
    augmentation: preset of data/augment.py, for training only. cameras: slots of the samples' images, in order (a Pipeline's `slots`), by
        which it knows wrist cameras; None: all of the spec's.

    Reads one sample before it returns, so that what is wrong with data or pipeline is known at once.

    Raises:
        ConfigError: batch_size does not divide, process_index, num_workers or token_len is out of range, or cameras are not the samples'.
        DataError: that sample is bad, horizons differ, or shared memory is too small for the batches.
    """
    if batch_size < 1 or not 0 <= process_index < process_count or num_workers < 0 or prefetch < 1:
        raise ConfigError(f"{batch_size=}, {process_index=}, {process_count=}, {num_workers=}, {prefetch=}: out of range.")
    if batch_size % process_count:
        raise ConfigError(f"batch_size {batch_size} does not divide among {process_count} processes; it counts the samples of all of them.")
    if token_len is not None and not 1 <= token_len <= spec.max_token_len:
        raise ConfigError(f"token_len is {token_len}; the spec allows 1 to {spec.max_token_len}.")
    if dataset.action_horizon != spec.action_horizon:
        raise DataError(f"The dataset was opened with action_horizon={dataset.action_horizon}, the model's is {spec.action_horizon}.")
    check_preset(augmentation)
    order = SampleOrder(dataset.lengths, dataset.weights, seed)
    token_len = spec.max_token_len if token_len is None and process_count > 1 else token_len
    cameras = spec.cameras if cameras is None else cameras
    maker = BatchMaker(dataset, pipeline, spec, seed, token_len, augmentation, cameras)
    share = batch_size // process_count
    first = maker.sample(int(order.rows(np.array([process_index * share]))[0]))
    if augmentation != "none" and len(first["images"]) != len(cameras):
        raise ConfigError(f"Samples have {len(first['images'])} images, cameras names the slots {cameras}: augmentation must know which they are.")
    workers = None
    if num_workers:
        _check_shared_memory(maker.block_size(share, len(first["images"])), num_workers * prefetch + HELD_BATCHES)
        workers = Workers(maker, num_workers, prefetch, stall_seconds)
    return Loader(maker, order, batch_size, slice(process_index * share, (process_index + 1) * share), workers)


class _Blocks:
    """The torch dataset: Task -> Block, in a worker. An expected error is returned, not raised, so that it arrives unchanged.

    Workers get the maker through shared memory. Through the pipe that spawn uses, a maker larger than the pipe (a tokenizer is) would
    start them one after another, each after the one before has imported torch.
    """

    def __init__(self, maker: BatchMaker) -> None:
        import torch

        self._packed = torch.frombuffer(bytearray(ForkingPickler.dumps(maker)), dtype=torch.uint8).share_memory_()
        self._maker: BatchMaker | None = None

    def __getitem__(self, task: Task) -> Block | Pi05Error:
        if self._maker is None:
            self._maker = ForkingPickler.loads(self._packed.numpy())
        try:
            return self._maker.make(task, allocate_shared)
        except Pi05Error as error:
            error.add_note("In the worker:\n" + traceback.format_exc())
            return error


class _Tasks:
    """The torch sampler: the tasks of the current run."""

    def __init__(self) -> None:
        self.current: Iterator[Task] = iter(())

    def __iter__(self) -> Iterator[Task]:
        return self.current


class _RecordingContext(multiprocessing.context.SpawnContext):
    """Remembers what torch makes with it: processes, to watch and end them without torch's private attributes, and queues.

    Queues, because each has a thread that may outlive torch's interest in it. If that thread drops the queue's locks while Python ends,
    they are not signed off and multiprocessing warns of a leak; held here, they are signed off by the main thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[Any] = []
        self.queues: list[Any] = []

    def Process(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802, the name multiprocessing gives it
        process = super().Process(*args, **kwargs)
        self.processes.append(process)
        return process

    def Queue(self, maxsize: int = 0) -> Any:  # noqa: N802
        queue = super().Queue(maxsize)
        self.queues.append(queue)
        return queue


def _begin_worker(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process ends its workers
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _unchanged(item: Any) -> Any:
    return item


def _shared_free() -> int:
    """Free bytes of shared memory; on systems without that folder, no limit is known."""
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else sys.maxsize


def _check_shared_memory(block_size: int, blocks: int) -> None:
    """Fails before the run, instead of by a bus error or an allocation error within."""
    need, free = block_size * blocks, _shared_free()
    if need > free:
        raise DataError(
            f"{SHARED_MEMORY} has {free / 1e6:.0f} MB free, but {blocks} batches of {block_size / 1e6:.1f} MB need {need / 1e6:.0f} MB. "
            f"Enlarge it (docker run --shm-size={-(-need // 2**30)}g), or use fewer workers, less prefetch or a smaller batch."
        )
