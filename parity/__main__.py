"""python -m pi05.parity [options of pytest]: the parity suite of an installed pi05, for an upgrade CI of your own; python -m parity in a checkout.

    python -m pi05.parity                                  all levels, tiny model, CPU
    python -m pi05.parity -m "l1 or l3" -k torch           some of them
    python -m pi05.parity --report out --junitxml out/junit.xml

Status: pytest's (0 all passed, 1 something failed, 5 nothing was selected).
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def command(arguments: Sequence[str]) -> list[str]:
    """The command line of pytest: this folder's tests, with the settings that the repository has in pyproject.toml."""
    settings = ["-o", "python_files=test_*.py level_*.py", "-o", "addopts=--strict-markers -ra", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", "--rootdir", str(FOLDER), "-c", os.devnull, *settings, str(FOLDER), *arguments]


def main(arguments: Sequence[str]) -> int:
    """Runs pytest in a process of its own, since NumPy reads its number of threads when it is first imported, which has happened here."""
    found = {"OPENBLAS_NUM_THREADS": "1", "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"pi05-jax-cache-{os.getuid()}")}
    return subprocess.run(command(arguments), env=found | os.environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
