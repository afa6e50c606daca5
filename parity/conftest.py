"""Fixtures and the table at the end of a parity session. Nothing here imports NumPy before `configure` has set its threads."""

import re
from typing import TYPE_CHECKING

import pytest

from .session import configure

if TYPE_CHECKING:
    from .lab import Lab
    from .record import Record


def pytest_addoption(parser: pytest.Parser) -> None:
    """--device: where both backends run; the reference and the oracles stay on the CPU."""
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where the JAX and the PyTorch backend run")


def pytest_configure(config: pytest.Config) -> None:
    configure(config.getoption("--device"))


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks each test with the level of its file, so that `-m l3` selects a level."""
    for item in items:
        if level := re.match(r"level_(\d+)_", item.path.name):
            item.add_marker(f"l{level[1]}")


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
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
