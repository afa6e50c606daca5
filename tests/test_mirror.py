"""Design decision 15: the two backends are the same text but for what their frameworks force apart."""

import ast
import difflib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "pi05"
FILES = sorted(path.name for path in (PACKAGE / "jax_backend").glob("*.py"))
CALLS = {"__call__": "forward"}


def public_parts(path: Path) -> tuple[str | None, list]:
    """Module docstring, then every public function, class and constant in order, with parameters, defaults and docstrings."""
    module, parts = ast.parse(path.read_text()), []
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                parts.append(("constant", target.id))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            methods = [node] if isinstance(node, ast.FunctionDef) else [m for m in node.body if isinstance(m, ast.FunctionDef)]
            parts.append(
                (node.name, ast.get_docstring(node), [signature(m) for m in methods if not m.name.startswith("_") or m.name in ("__init__", "__call__")])
            )
    return ast.get_docstring(module), parts


def signature(node: ast.FunctionDef) -> tuple:
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)], [a.arg for a in node.args.kwonlyargs]
    defaults = [ast.unparse(d) for d in (*node.args.defaults, *(d for d in node.args.kw_defaults if d))]
    return CALLS.get(node.name, node.name), names, defaults, ast.get_docstring(node)


def same_lines(first: Path, second: Path) -> tuple[int, int]:
    a, b = ([line.strip() for line in path.read_text().splitlines() if line.strip()] for path in (first, second))
    return sum(block.size for block in difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()), max(len(a), len(b))


def test_both_backends_have_the_same_files() -> None:
    assert sorted(path.name for path in (PACKAGE / "torch_backend").glob("*.py")) == FILES


@pytest.mark.parametrize("name", [name for name in FILES if name != "__init__.py"])
def test_both_files_have_the_same_names_parameters_defaults_and_docstrings_in_the_same_order(name: str) -> None:
    first, second = PACKAGE / "jax_backend" / name, PACKAGE / "torch_backend" / name
    assert public_parts(first) == public_parts(second)


def test_the_share_of_identical_lines_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A number to watch, not a gate; zero would mean that the mirror is a fiction."""
    shares = {name: same_lines(PACKAGE / "jax_backend" / name, PACKAGE / "torch_backend" / name) for name in FILES}
    with capsys.disabled():
        print("\nidentical lines: " + ", ".join(f"{name} {same}/{total}" for name, (same, total) in shares.items()), end=" ")
        print(f"| all {sum(s for s, _ in shares.values())}/{sum(t for _, t in shares.values())}", end=" ")
    assert all(2 * same > total for name, (same, total) in shares.items() if name in ("model.py", "gemma.py", "siglip.py", "layers.py"))
