"""Whatever is wrong with a checkpoint, reading it says so in one CheckpointError that names the file or the tensor."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pi05.checkpoint import load_description, load_params, load_state, locate_checkpoint
from pi05.errors import CheckpointError
from pi05.interop.tensor_file import TensorFiles, write_tensors
from tests.test_checkpoint import LORA, TINY, damage, save


def rewrite(path: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    file = TensorFiles([path])
    tensors = {name: file.read(name) for name in file.shapes}
    change(tensors)
    write_tensors(path, {name: array.shape for name, array in tensors.items()}, tensors.items(), file.metadata)


@pytest.mark.parametrize(("name", "cut", "said"), [
    ("params.safetensors", 0, "has no params.safetensors"),
    ("params.safetensors", 100, "no whole safetensors file"),
    ("train_state.safetensors", 0, "has no train_state.safetensors"),
    ("train_state.safetensors", 100, "no whole safetensors file"),
    ("checkpoint.json", 5, "damaged"),
    ("checkpoint.json", 0, "neither a checkpoint"),
])  # fmt: skip
def test_a_damaged_checkpoint_says_which_file(tmp_path: Path, name: str, cut: int, said: str) -> None:
    save(tmp_path, 1)
    folder = locate_checkpoint(tmp_path)
    damage(folder, name, cut=cut)
    with pytest.raises(CheckpointError, match=said):
        load_state(folder, TINY)


@pytest.mark.parametrize("content", ["[]", "3", '{"format_version": 1, "step": 1}'])
def test_a_description_with_other_content_is_damaged(tmp_path: Path, content: str) -> None:
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / "1" / "checkpoint.json").write_text(content)
    with pytest.raises(CheckpointError, match="damaged"):
        load_description(tmp_path / "checkpoints" / "1")


@pytest.mark.parametrize("load", [load_state, load_params])
def test_a_checkpoint_of_another_model_or_release_is_refused(tmp_path: Path, load: Callable) -> None:
    save(tmp_path, 1, 2, keep_last=2)
    with pytest.raises(CheckpointError, match=r"action_in_proj.weight has shape \(56, 11\) instead of \(56, 7\)"):
        load(tmp_path, TINY.replace(action_dim=7))
    with pytest.raises(CheckpointError, match="that nothing fills"):
        load(tmp_path, LORA)
    path = tmp_path / "checkpoints" / "2" / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}))
    with pytest.raises(CheckpointError, match="format version 99"):  # it is not taken for a damaged one, and step 1 loaded instead
        load(tmp_path, TINY)


@pytest.mark.parametrize(("file", "gone", "said"), [
    ("train_state.safetensors", "m/vision.head.bias", "m/ and v/ of different tensors, such as vision.head.bias"),
    ("train_state.safetensors", "v/vision.head.bias", "m/ and v/ of different tensors, such as vision.head.bias"),
    ("train_state.safetensors", "params/vision.head.bias", "m/ and params/ of different tensors, such as vision.head.bias"),
    ("params.safetensors", "action_in_proj.bias", "nothing fills.*action_in_proj.bias"),
])  # fmt: skip
def test_a_missing_tensor_is_named(tmp_path: Path, file: str, gone: str, said: str) -> None:
    save(tmp_path, 1)
    rewrite(tmp_path / "checkpoints" / "1" / file, lambda tensors: tensors.pop(gone))
    with pytest.raises(CheckpointError, match=said):
        load_state(tmp_path, TINY)


@pytest.mark.parametrize(("name", "said"), [
    ("m/vision.head.bias", r"m/vision.head.bias has shape \(3,\), the model \(96,\)"),
    ("w/vision.head.bias", "holds w/vision.head.bias, which the model has not"),
    ("m/vision.tail.bias", "holds m/vision.tail.bias, which the model has not"),
])  # fmt: skip
def test_a_foreign_tensor_is_named(tmp_path: Path, name: str, said: str) -> None:
    save(tmp_path, 1)
    rewrite(tmp_path / "checkpoints" / "1" / "train_state.safetensors", lambda tensors: tensors.update({name: np.zeros(3, np.float32)}))
    with pytest.raises(CheckpointError, match=said):
        load_state(tmp_path, TINY)


def test_a_place_without_a_checkpoint_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a checkpoint"):
        locate_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        locate_checkpoint(tmp_path / "nothing")
