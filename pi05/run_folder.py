"""The folder of a training run: who may write it, and what is in it.

RUN/run.json                 marks the folder as ours
RUN/checkpoints/STEP/        see checkpoint.py
RUN/metrics.jsonl, ...       see metrics.py
"""

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from pi05.errors import CheckpointError

MARKER = "run.json"
CHECKPOINTS = "checkpoints"
TEMPORARY = ".part-"  # in front of the name of a checkpoint that is being written
FORMAT_VERSION = 1

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
        CheckpointError: there is a run and should not be, or the reverse; another process writes it; or what is there is no run of ours.
    """
    steps = list_steps(path)
    ours = (path / MARKER).is_file()
    if path.exists() and any(path.iterdir()) and not ours:
        raise CheckpointError(f"{path} exists and is no training run (it has no {MARKER}), so nothing is written there. Choose another --exp-name.")
    if mode == "new" and steps:
        raise CheckpointError(f"{path} holds a run at step {steps[-1]}. Go on with --resume, delete it with --overwrite, or choose another --exp-name.")
    if mode == "resume" and not steps:
        raise CheckpointError(f"There is nothing to resume: {path} holds no checkpoint. Start without --resume.")
    path.mkdir(parents=True, exist_ok=True)
    lock = _lock(path)
    if ours and mode != "resume":
        for item in path.iterdir():
            if item.name != MARKER:
                shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
    (path / MARKER).write_text(json.dumps({"pi05": "training run", "format_version": FORMAT_VERSION}) + "\n")
    (path / CHECKPOINTS).mkdir(exist_ok=True)
    for leftover in (path / CHECKPOINTS).glob(f"{TEMPORARY}*"):
        shutil.rmtree(leftover)
    return RunFolder(path, lock)


def list_steps(run: Path) -> list[int]:
    """Steps of the whole checkpoints of a run, ascending; empty where there is no run."""
    folder = run / CHECKPOINTS
    return sorted(int(item.name) for item in folder.iterdir() if item.name.isdigit()) if folder.is_dir() else []


def _lock(path: Path) -> int:
    """An open file that no other process can lock; the system gives it back when the process ends, however it ends."""
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise CheckpointError(f"Another process writes {path} now. Wait for it, or choose another --exp-name.") from None
    return lock
