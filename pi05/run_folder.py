"""The folder of a training run: who may write it, and what is in it.

RUN/run.json                 marks the folder as ours
RUN/.lock                    locked while a process writes the run, and says which one
RUN/checkpoints/STEP/        see checkpoint.py
RUN/metrics.jsonl, ...       see metrics.py
"""

import fcntl
import json
import os
import re
import shutil
import socket
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from pi05.errors import CheckpointError

MARKER, LOCK = "run.json", ".lock"
CHECKPOINTS = "checkpoints"
DESCRIPTION = "checkpoint.json"  # of a checkpoint; written last, so what has none is none
TEMPORARY = ".part-"  # in front of the name of whatever is being written or deleted
MARK = {"pi05": "training run", "format_version": 1}

Mode = Literal["new", "resume", "overwrite"]


class RunFolder:
    """A run's folder, locked against other processes until `close`; made by open_run."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are."""
        return self.path / CHECKPOINTS

    def close(self) -> None:
        """Gives the lock back."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_run(path: Path, mode: Mode) -> RunFolder:
    """Opens the folder of a run for writing and removes what a killed process left half-written.

    mode: "new" wants no run there; "resume" wants one with a checkpoint; "overwrite" deletes a run that is there.

    Raises:
        CheckpointError: there is a run and should not be, or the reverse; another process writes it; what is there is no run of ours;
            or it cannot be written.
    """
    path = Path(path)
    try:
        _check(path, mode)
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        try:
            _check(path, mode)  # again: another process may have been here in between
            _prepare(path, mode)
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        raise CheckpointError(f"The run's folder {path} cannot be written: {error}. Choose another checkpoint_dir.") from error
    return RunFolder(path, lock)


def list_steps(run: Path) -> list[int]:
    """Steps of the checkpoints of a run, ascending; empty where there is no run."""
    folder = Path(run) / CHECKPOINTS
    if not folder.is_dir():
        return []
    return sorted(int(item.name) for item in folder.iterdir() if re.fullmatch("0|[1-9][0-9]*", item.name) and (item / DESCRIPTION).is_file())


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def delete(path: Path) -> None:
    """Deletes a file or a folder. A folder is renamed first, so that nobody takes a half-deleted one for a whole one."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if not path.name.startswith(TEMPORARY):
        path = path.rename(path.with_name(f"{TEMPORARY}old-{path.name}"))
    shutil.rmtree(path)


def _check(path: Path, mode: Mode) -> None:
    """Raises what open_run raises, as far as can be told without writing."""
    steps = list_steps(path)
    inside = {item.name for item in path.iterdir()} - {LOCK, f"{TEMPORARY}{MARKER}"} if path.exists() else set()
    if inside and not _is_ours(path):
        raise CheckpointError(f"{path} exists and is no training run (it has no {MARKER} of pi05): nothing is written there. Choose another --exp-name.")
    begun = bool(steps) or any(name not in (MARKER, CHECKPOINTS) and not name.startswith(TEMPORARY) for name in inside)
    if mode == "new" and begun:
        where, go_on = (f"at step {steps[-1]}", "Go on with --resume, delete") if steps else ("without a checkpoint", "There is nothing to --resume. Delete")
        raise CheckpointError(f"{path} holds a run {where}. {go_on} it with --overwrite, or choose another --exp-name.")
    if mode == "resume" and not steps:
        raise CheckpointError(f"There is nothing to resume: {path} holds no checkpoint. Start {'with --overwrite' if begun else 'without --resume'}.")


def _prepare(path: Path, mode: Mode) -> None:
    """Deletes what is to go; the marker stays while anything is there, so that a deletion that is cut short can be taken up again."""
    for folder in (path, path / CHECKPOINTS):
        for leftover in folder.glob(f"{TEMPORARY}*"):
            delete(leftover)
    if mode == "overwrite":
        for item in path.iterdir():
            if item.name not in (MARKER, LOCK):
                delete(item)
    if not _is_ours(path):
        part = path / f"{TEMPORARY}{MARKER}"
        part.write_text(json.dumps(MARK) + "\n")
        part.rename(path / MARKER)
    (path / CHECKPOINTS).mkdir(exist_ok=True)
    sync_folder(path)


def _is_ours(path: Path) -> bool:
    try:
        mark = json.loads((path / MARKER).read_text())
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(mark, dict) and mark.get("pi05") == MARK["pi05"]


def _lock(path: Path) -> int:
    """A file that no other process can lock; the system gives it back when the process ends, however it ends."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 200).decode(errors="replace").strip()
        os.close(lock)
        raise CheckpointError(f"Another process writes {path} now ({owner or 'it has not said which'}). Wait for it, or choose another --exp-name.") from None
    except OSError:
        os.close(lock)
        raise
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return lock
