"""Design decision 15: one import direction, and no framework where none is needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "pi05"
FRAMEWORKS = {"jax", "jaxlib", "flax", "optax", "torch", "torchvision", "transformers", "lerobot"}
RANKS = {
    "errors": 0,
    **dict.fromkeys(("spec", "schedule"), 1),
    **dict.fromkeys(("params", "initial", "batch", "compare", "recipe", "train_state"), 2),
    **dict.fromkeys(
        ("backend", "config", "config_files", "config_cli", "robots", "data.images", "data.augment", "data.tokenizer", "data.transforms", "data.norm_stats"), 3
    ),
    **dict.fromkeys(("data", "interop", "checkpoint", "run_folder", "metrics", "sinks", "plots", "bad_step"), 4),
    **dict.fromkeys(("jax_backend", "torch_backend"), 5),
    **dict.fromkeys(("kernel_check", "evaluate", "policy", "serve", "convert", "verify"), 6),
    "stack": 7,
    "train": 8,
}
TOGETHER = (2, 3, 4)  # ranks whose modules may import each other
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def rank(module: str) -> int:
    """Rank of a module by its longest listed prefix; a file that the list does not know is an error."""
    while module not in RANKS:
        module, dot, _ = module.rpartition(".")
        assert dot, f"{module} has no rank: say in test_imports.py where it belongs"
    return RANKS[module]


def imports(tree: ast.AST, *, top_level_only: bool) -> list[str]:
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    out = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return out + [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_module_imports_only_lower_ranks(path: Path) -> None:
    own = module_name(path)
    for name in imports(ast.parse(path.read_text()), top_level_only=False):
        if name.startswith("pi05."):
            other = name.removeprefix("pi05.")
            together = other.split(".")[0] == own.split(".")[0]
            assert rank(other) <= rank(own) if together else rank(other) < rank(own) or rank(own) in TOGETHER and rank(other) == rank(own), (
                f"{own} imports {other}"
            )
        assert name.split(".")[0] not in ("tests", "parity", "scripts"), f"{own} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_frameworks_stay_in_their_backend(path: Path) -> None:
    own, tree = module_name(path), ast.parse(path.read_text())
    allowed = {"jax_backend": {"jax", "flax", "optax"}, "torch_backend": {"torch"}}.get(own.split(".")[0], set())
    assert not {name.split(".")[0] for name in imports(tree, top_level_only=True)} & FRAMEWORKS - allowed
    if allowed:
        assert not {name.split(".")[0] for name in imports(tree, top_level_only=False)} & FRAMEWORKS - allowed


def test_importing_pi05_imports_no_framework() -> None:
    code = f"import sys, pi05, pi05.params, pi05.compare; print(sorted(set(sys.modules) & {FRAMEWORKS!r}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize(("backend", "foreign"), [("jax", {"torch", "transformers"}), ("torch", {"jax", "flax", "transformers"})])
def test_a_backend_does_not_import_the_other_framework(backend: str, foreign: set[str]) -> None:
    code = f"import sys, pi05.{backend}_backend.sampling, pi05.{backend}_backend.step; print(sorted(set(sys.modules) & {foreign!r}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
