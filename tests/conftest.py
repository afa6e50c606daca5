"""Settings of the tests of single implementations, and training runs that they share."""

from typing import TYPE_CHECKING

import pytest

from parity.session import configure

if TYPE_CHECKING:
    from tests.training import Runs

configure()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> "Runs":
    """Short training runs of both backends, each made once a session."""
    from tests.training import Runs

    return Runs(tmp_path_factory.mktemp("runs"))
