"""The upgrade matrix and its page: what they name exists, pins cover what is upgraded, and the table says what the reports say."""

import ast
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "upgrade-ci.md").read_text()


@pytest.fixture(scope="module")
def noxfile() -> types.ModuleType:
    """noxfile.py as nox loads it; nox itself, which `uvx nox` brings, is stood in for."""
    nox = types.ModuleType("nox")
    nox.options, nox.Session = types.SimpleNamespace(), object
    nox.session = lambda **_: lambda function: function
    nox.parametrize = lambda *_: lambda function: function
    nox.param = lambda value, id: value
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nox", nox)
        spec.loader.exec_module(module)
    return module


class Session:
    """Keeps what nox would be told to do."""

    def __init__(self, *posargs: str):
        self.posargs, self.installed, self.ran = list(posargs), [], []

    def install(self, *arguments: str) -> None:
        self.installed = list(arguments)

    def run(self, *arguments: str, env: dict) -> None:
        self.ran = list(arguments)

    def error(self, message: str) -> None:
        raise SystemExit(message)

    def log(self, *_: object) -> None: ...


def test_every_trap_on_the_page_has_its_test() -> None:
    named = re.findall(r"`((?:parity|tests)/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) >= 9
    for path, function in named:
        functions = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)}
        assert function in functions, f"{path}::{function}"


def test_the_workflows_are_yaml_and_run_environments_that_exist(noxfile: types.ModuleType) -> None:
    gate, nightly = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
    assert any("pi05.parity" in step.get("run", "") for step in gate["jobs"]["parity"]["steps"])
    assert set(nightly["jobs"]["matrix"]["strategy"]["matrix"]["environment"]) <= set(noxfile.ENVIRONMENTS)


def test_what_an_environment_frees_is_pinned_elsewhere(noxfile: types.ModuleType) -> None:
    for name, environment in noxfile.ENVIRONMENTS.items():
        assert set(environment.get("free", ())) <= set(noxfile.PINS), name


def test_a_candidate_is_installed_against_every_other_pin(noxfile: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noxfile, "OUT", tmp_path)
    monkeypatch.setattr(noxfile, "show_table", lambda session: None)
    (tmp_path / "pinned").mkdir()
    (tmp_path / "pinned" / "report.json").write_text("{}")
    session = Session("torch==2.12.0", "-m", "l3")
    noxfile.upgrade(session)
    folder = tmp_path / "upgrade-torch-2.12.0"
    pins = (folder / "constraints.txt").read_text()
    assert "jax==" in pins and "torch==" not in pins and "torchvision" not in pins
    assert (folder / "overrides.txt").read_text() == "torch==2.12.0\n" and "torch==2.12.0" in session.installed and "--no-config" in session.installed
    assert session.ran[-2:] == ["-m", "l3"] and str(tmp_path / "pinned" / "report.json") in session.ran
    with pytest.raises(SystemExit, match="Say which version"):
        noxfile.upgrade(Session("-m", "l3"))


def test_the_table_names_versions_worst_errors_and_the_first_divergence(noxfile: types.ModuleType) -> None:
    def report(verdict: str, torch: str, error: float | None, where: dict | None) -> dict:
        rows = [{"level": "L1", "subject": "activations", "checks": [{"name": "velocity", "error": error, "limit": 1e-5}]}]
        return {"verdict": verdict, "environment": {"torch": torch, "jax": "0.11.2"}, "rows": rows, "first_divergence": where}

    where = {"level": "L1", "subject": "activations", "name": "velocity"}
    text = noxfile.matrix({"torch-next": report("FAIL", "2.12.0", None, where), "pinned": report("PASS", "2.11.0", 1e-6, None)})
    lines = text.splitlines()
    assert lines[2] == "| pinned | PASS | as pinned | 10% |  |"
    assert lines[3] == "| torch-next | FAIL | torch 2.12.0 | FAIL | L1 activations: velocity |"
