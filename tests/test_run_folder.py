"""A run's folder has one writer, and nothing in it is lost by accident."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pi05 import run_folder
from pi05.errors import CheckpointError
from pi05.run_folder import list_steps, open_run
from tests.test_checkpoint import save


def test_a_run_is_neither_overwritten_nor_mixed_by_accident(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, 1)
    with pytest.raises(CheckpointError, match="at step 1.*--resume.*--overwrite"):
        open_run(run, "new")
    save(run, 2, mode="resume")
    assert list_steps(run) == [2]
    save(run, 1, mode="overwrite")
    assert list_steps(run) == [1]


def test_a_run_without_a_checkpoint_is_not_deleted_by_accident_either(tmp_path: Path) -> None:
    open_run(tmp_path, "new").close()
    open_run(tmp_path, "new").close()  # nothing was done there yet
    (tmp_path / "bad_steps").mkdir()
    with pytest.raises(CheckpointError, match="without a checkpoint.*--overwrite"):
        open_run(tmp_path, "new")
    with pytest.raises(CheckpointError, match="nothing to resume.*--overwrite"):
        open_run(tmp_path, "resume")
    assert (tmp_path / "bad_steps").is_dir()
    open_run(tmp_path, "overwrite").close()
    assert not (tmp_path / "bad_steps").exists()


@pytest.mark.parametrize(("name", "content"), [("thesis.tex", "all"), (".part-thesis.tex", "all"), ("run.json", "no JSON"), ("run.json", '{"of": "others"}')])
@pytest.mark.parametrize("mode", ["new", "resume", "overwrite"])
def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path, name: str, content: str, mode: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match="no training run"):
        open_run(tmp_path, mode)
    assert os.listdir(tmp_path) == [name] and (tmp_path / name).read_text() == content


def test_a_refused_run_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing to resume.*without --resume"):
        open_run(tmp_path / "run", "resume")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        open_run(tmp_path / "file", "new")
    assert os.listdir(tmp_path) == ["file"]


def test_an_opening_that_was_cut_short_can_be_taken_up_again(tmp_path: Path) -> None:
    """Killed after the lock's file, while the marker was written: there is no run yet, and nothing of anybody's."""
    (tmp_path / ".lock").write_text("")
    (tmp_path / ".part-run.json").write_text("{")
    open_run(tmp_path, "new").close()
    assert sorted(os.listdir(tmp_path)) == [".lock", "checkpoints", "run.json"]


def test_an_overwriting_that_was_cut_short_leaves_no_half_checkpoint_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    save(tmp_path, 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_folder.shutil, "rmtree", killed)
        open_run(tmp_path, "overwrite")
    assert list_steps(tmp_path) == []
    open_run(tmp_path, "new").close()  # which also shows that the lock was given back
    assert sorted(os.listdir(tmp_path)) == [".lock", "checkpoints", "run.json"]


def test_overwriting_does_not_follow_links_out_of_the_run(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "data").write_text("kept")
    (tmp_path / "run" / "link").symlink_to(tmp_path / "elsewhere")
    open_run(tmp_path / "run", "overwrite").close()
    assert (tmp_path / "elsewhere" / "data").read_text() == "kept" and not (tmp_path / "run" / "link").exists()


def test_what_a_dead_process_left_half_written_is_removed_and_a_living_one_keeps_its_own(tmp_path: Path) -> None:
    save(tmp_path, 1)
    leftovers = [tmp_path / "checkpoints" / ".part-2", tmp_path / "checkpoints" / ".part-old-0", tmp_path / ".part-old-checkpoints"]
    for folder in leftovers:
        (folder / "5").mkdir(parents=True)
    with open_run(tmp_path, "resume"):
        assert not any(folder.exists() for folder in leftovers) and list_steps(tmp_path) == [1]
        leftovers[0].mkdir()
        with pytest.raises(CheckpointError, match="Another process"):
            open_run(tmp_path, "resume")
        assert leftovers[0].exists()


def test_two_processes_do_not_write_one_run_and_a_dead_one_does_not_block_it(tmp_path: Path) -> None:
    code = f"from pi05.run_folder import open_run; run = open_run({str(tmp_path)!r}, 'new'); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        for mode in ("new", "overwrite"):
            with pytest.raises(CheckpointError, match=f"Another process.*process {process.pid} on "):
                open_run(tmp_path, mode)
        process.kill()
    open_run(tmp_path, "new").close()


def test_steps_are_whole_numbers_of_folders_with_a_description(tmp_path: Path) -> None:
    save(tmp_path, 3)
    for name in ("007", "8", "²", "9.old"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "007" / "checkpoint.json").write_text("{}")
    assert list_steps(tmp_path) == [3] and list_steps(tmp_path / "none") == []
