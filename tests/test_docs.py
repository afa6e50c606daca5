"""README and docs are true: every path they name exists (my_arm and the like are the reader's), and their Python runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PATH = re.compile(r"(?<![\w/.])((?:pi05|parity|tests|scripts|configs|docs|data|jax_backend|torch_backend)/[\w./-]*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_is_named_exists(page: Path) -> None:
    named = {path.rstrip(".") for path in PATH.findall(page.read_text()) if "my_" not in path}
    assert not [path for path in sorted(named) if not (ROOT / path).exists() and not (ROOT / "pi05" / path).exists()]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_code_in_the_readme_runs_in_both_backends(backend: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(code.replace("torch_backend", f"{backend}_backend"), "README.md", "exec"), names)
    assert names["actions"].shape == (4, 8, 11)
    assert names["loss"].per_sample.shape == (4,) and names["gradients"]
