"""docs/data-checks.md is true: every requirement has a row, and every test that it names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/data-checks.md").read_text()
NAMED = sorted(set(re.findall(r"`((?:tests|parity)/[\w/]+\.py)::(\w+)`", PAGE)))
REQUIRED = [f"{section}.{i}" for section, last in ((2, 9), (6, 6), (8, 5), (9, 7), (10, 5)) for i in range(1, last + 1)]


def test_names_are_found_on_the_page() -> None:
    assert len(NAMED) > 80 and len(NAMED) == len(set(re.findall(r"::(\w+)", PAGE))), "each test once, by its file"


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_test_that_is_named_exists(file: str) -> None:
    tests = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    assert {name for other, name in NAMED if other == file} <= tests


def test_every_requirement_is_met_or_said_not_to_be() -> None:
    missing = [number for number in REQUIRED if not re.search(rf"^\| {re.escape(number)} \|", PAGE, re.MULTILINE)]
    assert missing == ["10.5"] and re.search(r"^\* .*10\.5", PAGE.partition("## Not done")[2], re.MULTILINE)
