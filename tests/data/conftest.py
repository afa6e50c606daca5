"""Small recordings of one arm, which the tests of the doctor and of its checks share."""

import shutil
from pathlib import Path

import pytest

from tests.data.sick_arm import write


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("healthy") / "arm")


@pytest.fixture(scope="module")
def filmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("filmed") / "arm", video=True)


@pytest.fixture
def copy(healthy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(healthy, tmp_path / "arm"))
