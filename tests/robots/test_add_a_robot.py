"""docs/add_a_robot.md does what it says: its files are written, loaded and run."""

import re
import sys
from pathlib import Path

import pytest

from pi05.robots import load_robot
from pi05.robots.base import Kind

DOC = Path(__file__).resolve().parents[2] / "docs" / "add_a_robot.md"
BLOCKS = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", DOC.read_text(), re.DOTALL))


def test_the_documented_robot_loads_and_passes_its_documented_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in BLOCKS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        robot = load_robot("my_lab.arms.my_arm")
        assert robot.name == "my_arm" and robot.limit_warnings([[0, 0, 0, 0, 0.5]]) == []
        scope: dict = {}
        exec(compile(BLOCKS["tests/test_my_arm.py"], "test_my_arm.py", "exec"), scope)
        tests = [value for key, value in scope.items() if key.startswith("test_")]
        assert len(tests) == 3
        for test in tests:
            test()
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "my_lab"]:
            del sys.modules[name]


def test_the_document_names_every_kind_of_dim_and_only_files_that_exist() -> None:
    text = DOC.read_text()
    assert all(f"`{kind}`" in text for kind in Kind.__args__)
    for path in re.findall(r"`((?:pi05|tests)/[\w/]+\.py)`", text):
        assert (DOC.parents[1] / path).is_file(), path
