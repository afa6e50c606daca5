"""The report says what happened: verdict, first divergence, what changed since the run before, and stands alone."""

import json
import math
import re
from pathlib import Path

import pytest

from pi05.compare import Check

from .page import page
from .record import Record
from .reporting import changes, make_report, margin, read_history, save_report

GOOD, BAD = Check("trunk.layers.0.out", 2e-7, 1e-5), Check("trunk.layers.1.attn", 3e-5, 1e-5)
VERSIONS = {"torch": "2.11.0", "jax": "0.11.2"}


def report_of(*settled: tuple[str, str, list[Check]], versions: dict = VERSIONS, **tests: int) -> dict:
    record = Record()
    for level, subject, checks in settled:
        try:
            record.settle(level, subject, checks)
        except AssertionError:
            tests = {"failed": 1} | tests
    return make_report(record, versions, tests, {"level_1.py::test_x": "AssertionError: <b>"} if tests.get("failed") else {}, 12.3, "pytest parity")


def test_the_first_divergence_is_the_first_in_execution_order_of_the_lowest_level() -> None:
    late = Check("velocity", math.inf, 1e-5)
    report = report_of(("L3", "gradients ragged float32 torch", [late]), ("L1", "activations ragged float32 torch", [GOOD, BAD, late]))
    assert report["verdict"] == "FAIL"
    assert report["first_divergence"] == {
        "level": "L1",
        "subject": "activations ragged float32 torch",
        "name": "trunk.layers.1.attn",
        "error": 3e-5,
        "limit": 1e-5,
    }


@pytest.mark.parametrize(("tests", "verdict"), [({"passed": 3}, "PASS"), ({"passed": 3, "skipped": 1}, "INCOMPLETE"), ({"passed": 2, "error": 1}, "FAIL")])
def test_a_skipped_test_is_no_pass(tests: dict, verdict: str) -> None:
    assert report_of(("L1", "activations ragged float32 torch", [GOOD]), **tests)["verdict"] == verdict
    assert report_of(passed=3)["verdict"] == "INCOMPLETE", "nothing was compared"


def test_an_error_that_is_not_finite_survives_json(tmp_path: Path) -> None:
    save_report(report_of(("L2", "outputs", [Check("velocity", math.nan, 1e-5)])), tmp_path)
    (found,) = read_history(tmp_path)
    check = found["rows"][0]["checks"][0]
    assert check["error"] is None and margin(check) == math.inf and found == json.loads((tmp_path / "report.json").read_text())


def test_the_page_shows_verdict_divergence_and_what_changed_and_loads_nothing() -> None:
    before = report_of(("L1", "activations ragged float32 torch", [GOOD, Check("trunk.layers.1.attn", 4e-7, 1e-5)]), passed=1)
    now = report_of(("L1", "activations ragged float32 torch", [GOOD, BAD]), versions=VERSIONS | {"torch": "2.12.0"})
    assert changes(now, before) == {"torch": ("2.11.0", "2.12.0")}
    text = page(now, [before], before, {"torch": ["2.11", "2.11"]})
    assert "pi05 parity: FAIL" in text and "torch 2.11.0 → 2.12.0" in text
    assert re.search(r"First divergence.*trunk\.layers\.1\.attn.*3\.0e-05.*1\.0e-05.*The previous run had 4\.0e-07", text)
    assert text.count("data:image/png;base64,") == 2 and text.count("src=") == 2 and not re.search(r"<script|<link|href=|url\(", text)
    assert "AssertionError: &lt;b&gt;" in text
