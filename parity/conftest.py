"""Fixtures and the table at the end of a parity session. Nothing here imports NumPy before `configure` has set its threads."""

import importlib.metadata
import re
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .session import configure

if TYPE_CHECKING:
    from .lab import Lab
    from .record import Record


LEVELS = {
    0: "augmentation of images",
    1: "activations of every module",
    2: "velocity, loss, token logits",
    3: "gradient of every parameter",
    4: "optimizer updates",
    5: "trajectories",
    6: "sampled actions",
    7: "checkpoints",
    8: "attention strategies, the gauntlet",
    9: "goldens",
    10: "independent oracles",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """--device: where both backends run; the reference and the oracles stay on the CPU. --report, --baseline: docs/upgrade-ci.md."""
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where the JAX and the PyTorch backend run")
    parser.addoption("--dtype", choices=["float64", "float32", "bfloat16"], help="only what is compared in this precision")
    parser.addoption("--report", metavar="DIR", help="write report.json and report.html into this folder, and keep the report in its history")
    parser.addoption("--baseline", metavar="FILE", help="a report.json to compare with; default: the last report in DIR")


def pytest_configure(config: pytest.Config) -> None:
    configure(config.getoption("--device"))
    config.stash[_START] = time.monotonic()
    for level, what in LEVELS.items():  # here and not in pyproject.toml, which an installed package has not
        config.addinivalue_line("markers", f"l{level}: {what}")


@pytest.fixture(scope="session")
def lab() -> "Lab":
    """Results of every implementation, each computed once."""
    from .lab import Lab

    return Lab()


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest) -> "Record":
    """The checks of this session, printed at its end."""
    from .record import Record

    request.config.stash[_RECORD] = Record()
    return request.config.stash[_RECORD]


_RECORD = pytest.StashKey["Record"]()
_START = pytest.StashKey[float]()


def pytest_report_header() -> str:
    """Versions stand above every failure."""
    return "parity: " + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "torch", "numpy", "transformers", "lerobot", "optax"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks each test with the level of its file, so that `-m l3` selects a level; --dtype leaves out other precisions."""
    for item in items:
        if level := re.match(r"level_(\d+)_", item.path.name):
            item.add_marker(f"l{level[1]}")
    if dtype := config.getoption("--dtype"):
        cases = {item: item.callspec for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")}
        left_out = [item for item, case in cases.items() if case.params.get("dtype", dtype) != dtype]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the table of worst errors, and the planted faults with the tests that caught them."""
    record = config.stash.get(_RECORD, None)
    if record and record.rows:
        terminalreporter.section("parity: worst error of each comparison")
        for line in record.table():
            terminalreporter.write_line(line)
    if record and record.mutants:
        terminalreporter.section(f"parity: {len(record.mutants)} planted faults caught")
        for line in record.mutant_table():
            terminalreporter.write_line(line)
    if config.getoption("--report"):
        _write_report(terminalreporter, config)


def _write_report(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """report.json and report.html in the folder of --report."""
    import json

    from pi05.stack import read_tested_ranges

    from .page import page
    from .record import Record
    from .reporting import environment, make_report, read_history, save_report

    folder, record = Path(config.getoption("--report")), config.stash.get(_RECORD, None) or Record()
    outcomes = ("passed", "failed", "error", "skipped", "xfailed", "xpassed", "deselected")
    tests = {outcome: len(terminalreporter.stats.get(outcome, [])) for outcome in outcomes}
    problems = {entry.nodeid: entry.longreprtext.strip().splitlines()[-1] for outcome in outcomes[1:5] for entry in terminalreporter.stats.get(outcome, [])}
    command = shlex.join(["pytest", *config.invocation_params.args])
    report = make_report(record, environment(config.getoption("--device")), tests, problems, time.monotonic() - config.stash[_START], command)
    history = read_history(folder)
    baseline = config.getoption("--baseline")
    previous = json.loads(Path(baseline).read_text()) if baseline else next(iter(history[::-1]), None)
    save_report(report, folder)
    (folder / "report.html").write_text(page(report, history, previous, read_tested_ranges()))
    terminalreporter.section(f"parity: {report['verdict']}, {folder / 'report.html'}")
