"""One tiny model in every published form, written by hand once a session."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from parity.oracles import LEROBOT_SPEC
from pi05.spec import ModelSpec

from .published import DEAD, Tree, openpi_tree, save_orbax, save_torch, torch_tensors

LEROBOT_CONFIG = {"type": "pi05", "chunk_size": LEROBOT_SPEC.action_horizon, "tokenizer_max_length": LEROBOT_SPEC.max_token_len}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def spec() -> ModelSpec:
    """Tiny, with the head counts that LeRobot's code has."""
    return LEROBOT_SPEC


@pytest.fixture(scope="session")
def tree(spec: ModelSpec) -> Tree:
    return openpi_tree(spec)


@pytest.fixture(scope="session")
def forms(spec: ModelSpec, tree: Tree, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of every published form of `tree`."""
    root = tmp_path_factory.mktemp("published")
    dead = {DEAD: np.ones((spec.vocab_size, spec.expert.width), np.float32)}
    return {
        "orbax": save_orbax(root / "orbax", tree),
        "orbax with value": save_orbax(root / "orbax_value", tree, value_key=True),
        "orbax bare": save_orbax(root / "orbax_bare", tree, outer=False),
        "openpi torch": save_torch(root / "torch", torch_tensors(tree) | dead),
        "both names": save_torch(root / "both", torch_tensors(tree, names="both") | dead),
        "lerobot": save_torch(root / "lerobot", torch_tensors(tree, names="both") | dead, prefix="model.", config=LEROBOT_CONFIG),
        "newer transformers": save_torch(root / "newer", {name.replace(".vision_model.", "."): array for name, array in torch_tensors(tree).items()}),
    }
