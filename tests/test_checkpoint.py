"""A checkpoint is whole or not there, whatever happens while it is written."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pi05 import checkpoint
from pi05.checkpoint import Checkpointer, load_description, load_params, load_state, locate_checkpoint
from pi05.errors import CheckpointError, ParamsError
from pi05.initial import initial_params
from pi05.recipe import Groups, Recipe
from pi05.run_folder import list_steps, open_run
from pi05.spec import LoRA, ModelSpec
from pi05.train_state import TrainState

TINY = ModelSpec.tiny().replace(trunk__depth=1, expert__depth=1, vision__depth=1)
FILES = {"config.yaml": "seed: 1\n", "tokenizer.model": b"\x00\x01"}


def make_state(step: int, spec: ModelSpec = TINY, recipe: Recipe | None = None) -> TrainState:
    recipe, params = recipe or Recipe(), dict(initial_params(spec, step))
    learned = sorted(recipe.trains(spec))

    def near(seed: int) -> dict[str, np.ndarray]:
        return {name: params[name] + np.float32(seed) for name in learned}

    return TrainState(step, step - 1 if step else 0, params, near(1), near(2), None if recipe.ema_decay is None else near(3))


def save(run: Path, *steps: int, mode: str = "new", metrics: dict[int, float] | None = None, **options: object) -> None:
    with open_run(run, mode) as folder, Checkpointer(folder, TINY, **options) as checkpointer:
        for step in steps:
            checkpointer.save(make_state(step), FILES, metric=(metrics or {}).get(step))


def assert_same(got: TrainState, want: TrainState) -> None:
    assert (got.step, got.updates, got.ema is None) == (want.step, want.updates, want.ema is None)
    for kind in ("params", "m", "v", "ema"):
        first, second = getattr(got, kind) or {}, getattr(want, kind) or {}
        assert first.keys() == second.keys()
        for name, array in second.items():
            assert first[name].dtype == np.float32 and (first[name].view(np.uint32) == array.view(np.uint32)).all(), f"{kind} {name}"


LORA = TINY.replace(trunk__lora=LoRA(2, 4.0))
WAYS = {
    "average": (TINY, Recipe()),
    "no average": (TINY, Recipe(ema_decay=None)),
    "frozen": (TINY, Recipe(groups=Groups(vision="freeze", trunk="freeze"))),
    "lora": (LORA, Recipe(groups=Groups(trunk="lora"))),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_loaded_is_what_was_saved_bit_for_bit(tmp_path: Path, way: str) -> None:
    spec, recipe = WAYS[way]
    state = make_state(3, spec, recipe)
    with open_run(tmp_path / "run", "new") as run, Checkpointer(run, spec) as checkpointer:
        checkpointer.save(state, FILES, note="yes")
    folder = locate_checkpoint(tmp_path / "run")
    assert folder.name == "3" and (folder / "config.yaml").read_text() == FILES["config.yaml"]
    assert load_description(folder)["note"] == "yes"
    assert_same(load_state(folder, spec), state)
    served = dict(load_params(folder, spec))
    assert all((served[name] == array).all() for name, array in state.served_params().items())


def test_the_weights_to_act_with_are_readable_without_us_under_published_names(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    save(tmp_path, 5)
    tensors = load_file(tmp_path / "checkpoints" / "5" / "params.safetensors")
    ema = make_state(5).ema["action_in_proj.weight"]
    assert (tensors["action_in_proj.weight"] == ema.T).all()


def test_retention_keeps_the_last_the_periodic_and_the_best(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, 5, 6, 7, keep_last=2, keep_period=4, keep_best=True, metrics={1: 0.9, 2: 0.1, 3: 0.5, 5: float("nan")})
    assert list_steps(tmp_path) == [2, 4, 6, 7]


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    save(tmp_path, 4)
    before = (tmp_path / "checkpoints" / "4").stat().st_mtime_ns
    save(tmp_path, 4, mode="resume")
    assert (tmp_path / "checkpoints" / "4").stat().st_mtime_ns == before


def test_a_run_is_neither_overwritten_nor_mixed_by_accident(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(CheckpointError, match="nothing to resume"):
        open_run(run, "resume")
    save(run, 1)
    with pytest.raises(CheckpointError, match="--resume.*--overwrite"):
        open_run(run, "new")
    save(run, 2, mode="resume")
    assert list_steps(run) == [2]
    save(run, 1, mode="overwrite")
    assert list_steps(run) == [1]


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(CheckpointError, match="no training run"):
        open_run(tmp_path, "overwrite")
    assert (tmp_path / "thesis.tex").read_text() == "all of it"


def test_two_processes_do_not_write_one_run(tmp_path: Path) -> None:
    with open_run(tmp_path, "new"), pytest.raises(CheckpointError, match="Another process"):
        open_run(tmp_path, "overwrite")
    open_run(tmp_path, "overwrite").close()


def test_an_error_of_the_background_write_is_raised_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with open_run(tmp_path, "new") as run, Checkpointer(run, TINY) as checkpointer:
        checkpointer.save(make_state(1), FILES)
        checkpointer.wait()
        monkeypatch.setattr(checkpoint, "_write_state", fail)
        checkpointer.save(make_state(2), FILES)
        with pytest.raises(CheckpointError, match="step 2 could not be written.*the disk is full.*step 1 is intact"):
            checkpointer.save(make_state(3), FILES)
    assert list_steps(tmp_path) == [1] and os.listdir(tmp_path / "checkpoints") == ["1"]


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10_000})())
    with pytest.raises(CheckpointError, match="needs 0.00 GB.*Nothing was written"):
        save(tmp_path, 2, mode="resume")
    assert list_steps(tmp_path) == [1]


def test_a_disk_that_fills_up_while_writing_leaves_the_last_good_one(tmp_path: Path) -> None:
    """A tmpfs of two and a half checkpoints, and a check of free space that is fooled."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(array.nbytes for part in (make_state(1).params, make_state(1).m, make_state(1).v, make_state(1).ema) for array in part.values())
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(2.5 * size)}", "tmpfs", disk], capture_output=True).returncode:
        pytest.fail("this test mounts a small tmpfs, which needs root (as in a container)")
    try:
        code = f"""
import pi05.checkpoint as c
from tests.test_checkpoint import save
from pathlib import Path
c.RESERVE = -1 << 40
save(Path({str(disk / "run")!r}), 1, 2, 3, keep_last=5)
"""
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "could not be written" in run.stderr and "the disk is full" in run.stderr, run.stderr
        kept = list_steps(disk / "run")
        assert kept and kept[-1] < 3 and sorted(os.listdir(disk / "run" / "checkpoints")) == [str(step) for step in kept]
        assert_same(load_state(locate_checkpoint(disk / "run"), TINY), make_state(kept[-1]))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_kill_9_at_any_moment_loses_at_most_one_save(tmp_path: Path) -> None:
    """A process that saves every step is killed 20 times; what it said was saved loads each time."""
    code = """
import sys
from pathlib import Path
from pi05.checkpoint import Checkpointer
from pi05.run_folder import list_steps, open_run
from tests.test_checkpoint import FILES, TINY, make_state
run = Path(sys.argv[1])
first = (list_steps(run) or [0])[-1] + 1
with open_run(run, "resume" if first > 1 else "new") as folder, Checkpointer(folder, TINY) as checkpointer:
    for step in range(first, first + 10_000):
        checkpointer.save(make_state(step), FILES)
        checkpointer.wait()
        print(step, flush=True)
"""
    moments, said = random.Random(1), 0
    for _ in range(20):
        with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            lines = [process.stdout.readline()]
            time.sleep(moments.uniform(0.0, 0.15))
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.readlines()
            assert process.wait() == -signal.SIGKILL, process.stderr.read()
        said = max([said, *(int(line) for line in lines if line.endswith("\n") and line.strip())])
        newest = list_steps(tmp_path)[-1]
        assert newest >= said > 0
        assert_same(load_state(locate_checkpoint(tmp_path), TINY), make_state(newest))


def damage(folder: Path, name: str, *, cut: int = 0) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:-cut]) if cut else path.unlink()


@pytest.mark.parametrize(("name", "cut", "said"), [
    ("params.safetensors", 0, "has no params.safetensors"),
    ("params.safetensors", 100, "no whole safetensors file"),
    ("train_state.safetensors", 100, "no whole safetensors file"),
    ("checkpoint.json", 5, "damaged"),
])  # fmt: skip
def test_a_damaged_checkpoint_says_which_file(tmp_path: Path, name: str, cut: int, said: str) -> None:
    save(tmp_path, 1)
    folder = locate_checkpoint(tmp_path)
    damage(folder, name, cut=cut)
    with pytest.raises(CheckpointError, match=said):
        load_state(folder, TINY)


def test_a_checkpoint_of_another_model_or_release_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = locate_checkpoint(tmp_path)
    with pytest.raises(ParamsError, match="action_in_proj.weight has shape"):
        load_state(folder, TINY.replace(action_dim=7))
    content = json.loads((folder / "checkpoint.json").read_text())
    (folder / "checkpoint.json").write_text(json.dumps(content | {"format_version": 99}))
    with pytest.raises(CheckpointError, match="format version 99"):
        load_state(folder, TINY)


def test_a_place_without_a_checkpoint_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a checkpoint"):
        locate_checkpoint(tmp_path)
