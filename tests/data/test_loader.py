"""Batches: the same for any number of workers and processes, exact on resume, in memory nobody writes again; and workers that end."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from pi05.batch import Batch, Draws, make_draws
from pi05.data import loader as loader_module
from pi05.data.collate import allocate_private, allocate_shared
from pi05.data.dataset import Dataset, open_dataset
from pi05.data.loader import Loader, make_loader
from pi05.errors import ConfigError, DataError
from pi05.spec import ModelSpec
from tests.data import recordings
from tests.data.recordings import LENGTHS, TinyPipeline, TinyRobot

SPEC = ModelSpec.tiny()
ROOT = Path(__file__).resolve().parents[2]
FRAMES = sum(LENGTHS)
BATCH = 8


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root = tmp_path_factory.mktemp("loader")
    recordings.write_by_hand(root / "set", video=True)
    return open_dataset(root / "set", robot=TinyRobot(), action_horizon=SPEC.action_horizon, cache_dir=root / "tables")


def make(dataset: Dataset, pipeline: TinyPipeline | None = None, **options) -> Loader:
    return make_loader(dataset, pipeline or TinyPipeline(SPEC), SPEC, **{"batch_size": BATCH, "seed": 1, "num_workers": 0} | options)


def children() -> list[psutil.Process]:
    """Our child processes, except multiprocessing's resource tracker, which lives as long as Python."""
    return [child for child in psutil.Process().children(recursive=True) if "resource_tracker" not in " ".join(child.cmdline())]


def arrays(batch: Batch, draws: Draws) -> dict[str, np.ndarray]:
    observation = batch.observation
    return {name: value for part in (observation, batch, draws) for name, value in vars(part).items() if isinstance(value, np.ndarray)}


def copies(loader: Loader, first: int, last: int) -> list[dict[str, np.ndarray]]:
    """Batches without TinyPipeline's flag for JAX, in which workers must differ from this process."""
    out = [{name: array.copy() for name, array in arrays(*pair).items()} for pair in loader.batches(first, last)]
    for batch in out:
        batch["tokens"][:, 1] = 0
    return out


def assert_same(got: list[dict[str, np.ndarray]], want: list[dict[str, np.ndarray]]) -> None:
    assert len(got) == len(want)
    for step, (one, other) in enumerate(zip(got, want, strict=True)):
        for name in other:
            np.testing.assert_array_equal(one[name], other[name], err_msg=f"{name} of batch {step}")


@pytest.fixture(scope="class")
def spawned(dataset: Dataset) -> Iterator[Loader]:
    with make(dataset, num_workers=2) as loader:
        yield loader
    assert not children()


class TestSharedWorkers:
    """One loader with two workers for all tests that need no workers of their own."""

    def test_workers_change_no_bit(self, dataset: Dataset, spawned: Loader) -> None:
        assert_same(copies(spawned, 0, 12), copies(make(dataset), 0, 12))

    def test_images_are_handed_out_where_the_worker_wrote_them(self, spawned: Loader) -> None:
        batch, draws = next(iter(spawned.batches(0, 1)))
        shared = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-s .*/dev/shm/torch_", line):
                shared.append((int(match[1], 16), int(match[2], 16)))
        for name, array in arrays(batch, draws).items():
            address = array.ctypes.data
            assert any(start <= address and address + array.nbytes <= end for start, end in shared), f"{name} is not in memory shared with a worker"
            assert address % 64 == 0, name

    def test_jax_on_the_cpu_reads_the_workers_memory_itself(self, spawned: Loader) -> None:
        import jax

        batch, _ = next(iter(spawned.batches(0, 1)))
        images = batch.observation.images
        assert jax.device_put(images).unsafe_buffer_pointer() == images.ctypes.data

    @pytest.mark.parametrize("spawn", [False, True])
    def test_a_batch_stays_as_it_was_while_others_are_made(self, spawn: bool, dataset: Dataset, spawned: Loader) -> None:
        loader = spawned if spawn else make(dataset)
        batches = loader.batches()
        held = arrays(*next(batches))
        wanted = {name: array.copy() for name, array in held.items()}
        for _ in range(40):
            next(batches)
        assert_same([held], [wanted])

    def test_workers_load_no_jax(self, spawned: Loader) -> None:
        import jax  # noqa: F401, loaded here, so that a fork would hand it on

        assert not any(batch.observation.tokens[:, 1].any() for batch, _ in spawned.batches(0, 4))

    def test_memory_does_not_grow_with_the_number_of_batches(self, spawned: Loader) -> None:
        def used() -> float:
            return sum(process.memory_info().rss for process in (psutil.Process(), *children())) / 1e6

        batches = spawned.batches()
        for _ in range(200):
            next(batches)
        before = used()
        for _ in range(600):
            next(batches)
        assert used() - before < 6, "more than 1 MB in 100 batches"

    def test_stopping_early_and_starting_again_gives_the_same_batches(self, dataset: Dataset, spawned: Loader) -> None:
        for _ in spawned.batches():
            break
        assert_same(copies(spawned, 2, 4), copies(make(dataset), 2, 4))

    def test_time_spent_waiting_is_counted(self, spawned: Loader) -> None:
        before = spawned.seconds_waited
        started = time.monotonic()
        copies(spawned, 0, 3)
        assert 0 < spawned.seconds_waited - before < time.monotonic() - started


def test_memory_is_aligned_for_jax_and_shared_before_anything_is_written() -> None:
    memory, block = allocate_private(1000)
    assert block.ctypes.data % 64 == 0 and len(block) == 1000 and np.shares_memory(memory, block)
    memory, block = allocate_shared(1000)
    assert memory.is_shared() and memory.data_ptr() == block.ctypes.data and block.ctypes.data % 64 == 0 and len(block) == 1000


def test_batches_are_valid_and_follow_each_other_across_epochs(dataset: Dataset) -> None:
    ids = []
    for batch, draws in make(dataset).batches(0, 3 * FRAMES // 2):
        batch.validate(SPEC)
        draws.validate(SPEC, BATCH)
        ids += batch.sample_ids.tolist()
    epochs = np.reshape(ids, (-1, FRAMES))
    assert len(epochs) == 3 * BATCH // 2
    assert all(sorted(epoch) == list(range(FRAMES)) for epoch in epochs)


def test_the_padded_steps_at_an_episodes_end_reach_the_batch(dataset: Dataset) -> None:
    rows = recordings.where()
    for batch, _ in make(dataset).batches(0, 5):
        left = [LENGTHS[episode] - frame for episode, frame in (rows[index] for index in batch.sample_ids)]
        assert batch.action_is_pad.sum(1).tolist() == [max(0, SPEC.action_horizon - steps) for steps in left]


@pytest.mark.parametrize("count", [2, 4])
def test_processes_together_make_the_batches_of_one(count: int, dataset: Dataset) -> None:
    whole = copies(make(dataset, token_len=48), 0, 6)
    parts = [copies(make(dataset, token_len=48, process_index=index, process_count=count), 0, 6) for index in range(count)]
    joined = [{name: np.concatenate([part[step][name] for part in parts]) for name in whole[step]} for step in range(6)]
    assert_same(joined, whole)


def test_processes_agree_on_the_length_of_text_without_talking(dataset: Dataset) -> None:
    for index in range(2):
        for batch, _ in make(dataset, process_index=index, process_count=2).batches(0, 3):
            assert batch.observation.tokens.shape == (BATCH // 2, SPEC.max_token_len)


def test_text_is_as_long_as_the_batch_needs_rounded_up(dataset: Dataset) -> None:
    lengths = set()
    for batch, _ in make(dataset, batch_size=2).batches(0, 17):
        wanted = [2 + index % 20 for index in batch.sample_ids]
        length = batch.observation.tokens.shape[1]
        lengths.add(length)
        assert length == -(-max(wanted) // 16) * 16
        assert batch.observation.token_mask.sum(1).tolist() == wanted
        assert not batch.observation.tokens[~batch.observation.token_mask].any()
    assert lengths == {16, 32}


def test_resuming_continues_the_batches_and_reads_nothing_before(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = copies(make(dataset), 0, 10)
    loader, read, original = make(dataset), [], Dataset.__getitem__
    monkeypatch.setattr(Dataset, "__getitem__", lambda self, index: read.append(index) or original(self, index))
    assert_same(copies(loader, 7, 10), straight[7:])
    assert read == [index for batch in straight[7:] for index in batch["sample_ids"]]


def test_a_resumed_run_with_other_data_is_refused(dataset: Dataset) -> None:
    saved = make(dataset).state(step=5)
    assert saved["position"] == 5 * BATCH
    make(dataset).check_state(saved)
    with pytest.raises(DataError, match="seed was 1, is 2; batch_size was 8, is 16"):
        make(dataset, seed=2, batch_size=16).check_state(saved)


def test_draws_depend_on_the_place_in_the_epoch_alone(dataset: Dataset) -> None:
    want = [make_draws(SPEC, 1, epoch, np.arange(FRAMES)) for epoch in range(3)]
    got = copies(make(dataset), 0, 9)
    for name in ("noise", "time"):
        everything = np.concatenate([getattr(draws, name) for draws in want])
        np.testing.assert_array_equal(np.concatenate([batch[name] for batch in got]), everything[: 9 * BATCH])


def test_a_bad_sample_names_dataset_episode_and_frame_from_a_worker_too(dataset: Dataset) -> None:
    pipeline = TinyPipeline(SPEC, fails_at=LENGTHS[0] + 6)
    for workers in (0, 1):
        with make(dataset, pipeline, num_workers=workers) as loader, pytest.raises(DataError) as caught:
            list(loader.batches(0, FRAMES // BATCH + 1))
        assert str(caught.value) == "set, episode 1, frame 6: KeyError: 'gripper'"
    assert "in __call__" in caught.value.__notes__[0], "the worker's traceback comes as a note"
    assert not children()


def test_normalised_actions_that_are_not_finite_name_their_sample(dataset: Dataset) -> None:
    def broken(row: dict[str, object]) -> dict[str, object]:
        sample = TinyPipeline(SPEC)(row)
        return sample | {"actions": np.full_like(sample["actions"], np.inf)}

    with pytest.raises(DataError, match=r"set, episode \d, frame \d+: the normalised actions are not finite"):
        make_loader(dataset, broken, SPEC, batch_size=BATCH, seed=1, num_workers=0)


def test_a_killed_worker_is_an_error_within_ten_seconds_and_leaves_no_process(dataset: Dataset) -> None:
    with make(dataset, num_workers=2) as loader:
        batches = loader.batches()
        next(batches)
        os.kill(children()[0].pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(DataError, match=r"worker \d+ died with signal 9 \(SIGKILL\).*out of memory"):
            for _ in batches:
                pass
        assert time.monotonic() - started < 10
    assert time.monotonic() - started < 10
    assert not children()


def test_a_silent_worker_is_an_error_with_its_stack(dataset: Dataset, capfd: pytest.CaptureFixture[str]) -> None:
    with make(dataset, TinyPipeline(SPEC, hangs_at=9), num_workers=1, stall_seconds=2.0) as hanging:
        batches = hanging.batches()
        next(batches)
        started = time.monotonic()
        with pytest.raises(DataError, match=r"No batch for \d+ s; 1 workers are alive"):
            list(batches)
    assert time.monotonic() - started < 10
    assert not children()
    assert "recordings.py" in capfd.readouterr().err, "the line that hangs is shown"


CONTROL_C = """
import os, pathlib, signal, sys
import psutil
from pi05.data.dataset import open_dataset
from pi05.data.loader import make_loader
from pi05.spec import ModelSpec
from tests.data.recordings import TinyPipeline, TinyRobot

def workers():
    return len([child for child in psutil.Process().children() if "resource_tracker" not in " ".join(child.cmdline())])

if __name__ == "__main__":
    spec, root = ModelSpec.tiny(), pathlib.Path(sys.argv[1])
    dataset = open_dataset(root, robot=TinyRobot(), action_horizon=spec.action_horizon, cache_dir=root.parent / "tables")
    try:
        with make_loader(dataset, TinyPipeline(spec), spec, batch_size=4, seed=0, num_workers=2) as loader:
            for step, _ in enumerate(loader.batches()):
                try:
                    if step in (0, 40):
                        print("workers", workers(), flush=True)
                        os.killpg(os.getpgrp(), signal.SIGINT)  # as a terminal does: to the workers, too
                except KeyboardInterrupt:
                    if step:
                        raise  # the first one is taken as "finish what you are at", for which the workers must live on
    finally:
        print("left", workers(), flush=True)
"""


def test_control_c_ends_the_workers_and_the_process(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(CONTROL_C)
    recordings.write_by_hand(tmp_path / "set")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, script, tmp_path / "set"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, start_new_session=True, timeout=60)
    assert done.stdout.splitlines() == ["workers 2", "workers 2", "left 0"], done.stderr
    assert done.returncode == -signal.SIGINT
    assert done.stderr.count("Traceback") == 1, "the workers stay quiet"


def test_an_interrupt_while_waiting_ends_the_workers(dataset: Dataset) -> None:
    """Its traceback holds torch's frames, and through them the workers, as long as somebody looks at it."""
    with pytest.raises(KeyboardInterrupt) as caught, make(dataset, TinyPipeline(SPEC, hangs_at=9), num_workers=2) as loader:
        batches = loader.batches()
        next(batches)
        threading.Timer(1.0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        list(batches)
    assert any(entry.path.parts[-3:-1] == ("utils", "data") for entry in caught.traceback)
    assert not children()


def test_an_error_in_the_loop_ends_the_workers_while_its_traceback_is_kept(dataset: Dataset) -> None:
    with pytest.raises(ZeroDivisionError) as caught, make(dataset, num_workers=1) as loader:
        for batch, _ in loader.batches():
            assert len(children()) == 1
            1 / (batch.sample_ids[0] * 0).item()
    assert caught.traceback and not children()
    loader.close()
    with pytest.raises(DataError, match="The loader is closed"):
        next(loader.batches())


def test_too_little_shared_memory_is_an_error_before_the_run(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1 << 20))
    with pytest.raises(DataError, match=r"/dev/shm has 1 MB free, but 7 batches of 0.2 MB need 2 MB. Enlarge it \(docker run --shm-size=1g\)"):
        make(dataset, num_workers=2)
    assert not [child for child in children() if child.create_time() > time.time() - 1]


def test_shared_memory_that_runs_out_later_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def full(self: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("unable to allocate")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with pytest.raises(DataError, match="No 2.0 MB of shared memory are left. Hold fewer batches"):
        allocate_shared(2_000_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 6, "process_count": 4}, "batch_size 6 does not divide among 4 processes"),
        ({"process_index": 2, "process_count": 2}, "process_index=2"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"token_len": 500}, "token_len is 500; the spec allows 1 to 72"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, int], message: str, dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match=message):
        make(dataset, **options)


def test_what_does_not_fit_is_refused_before_the_first_batch(dataset: Dataset) -> None:
    with pytest.raises(DataError, match="action_horizon=8, the model's is 9"):
        make_loader(dataset, TinyPipeline(SPEC), SPEC.replace(action_horizon=9), batch_size=8, seed=0, num_workers=0)
    with pytest.raises(DataError, match=r"set, episode \d, frame \d+: the prompt has \d+ tokens, the limit is 1. Shorten the task"):
        make(dataset, token_len=1)


@pytest.mark.parametrize("path", sorted(Path(loader_module.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_no_private_attribute_of_a_dependency_is_used(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            assert isinstance(node.value, ast.Name) and node.value.id == "self", f"{path.name}:{node.lineno} uses {ast.unparse(node)}"
