"""The suite runs from an installed package, where there is no repository: no pyproject.toml beside it, no folder called parity on the path."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_a_wheel_runs_its_own_suite(tmp_path: Path) -> None:
    """What a wheel holds, put into an empty folder as pyproject.toml says; pip needs a network for the build back end, and adds nothing to this."""
    for source, target in (("pi05", "pi05"), ("parity", "pi05/parity"), ("configs", "pi05/configs")):
        shutil.copytree(ROOT / source, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__", "report"), dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "pi05")
    # -P and this path: the repository itself is installed as editable, and must not be what is found
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    options = ["-q", "-m", "l1", "-k", "gelu or token_embedding", "--report", str(tmp_path / "out"), "--junitxml", str(tmp_path / "junit.xml")]
    done = subprocess.run([sys.executable, "-P", "-m", "pi05.parity", *options], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "8 passed" in done.stdout and str(ROOT) not in done.stdout
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000 and (tmp_path / "junit.xml").is_file()
