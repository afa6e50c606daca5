"""verify finds two checkpoints alike where they are, and otherwise names the first layer that is not."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from parity.cases import warm_params
from pi05.errors import CheckpointError
from pi05.interop import own
from pi05.interop.assets import Assets
from pi05.spec import LoRA, ModelSpec
from pi05.verify import Options, main, verify

TINY = ModelSpec.tiny()
TORCH = ("torch", "torch")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write(folder: Path, spec: ModelSpec = TINY, **changes: np.ndarray) -> str:
    folder.mkdir()
    own.write_own(folder, iter((warm_params(spec) | changes).items()), spec, Assets(), ())
    return str(folder)


def test_the_same_checkpoint_is_alike_in_both_backends(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    found = verify(folder, folder)
    assert found.first_difference is None and len(found.steps) == 10 and max(found.steps) < 1e-5
    assert 0 < max(check.error for check in found.checks) < 1e-5  # two implementations do not round alike: both did run


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("trunk.layers.q_proj.weight", "trunk.layers.1.q"),
        ("vision.layers.o_proj.weight", "vision.layers.1.out"),
        ("expert.layers.down_proj.weight", "expert.layers.1.out"),
        ("action_in_proj.weight", "suffix.embedded"),
        ("action_out_proj.bias", "velocity"),
    ],
)
def test_the_first_layer_that_differs_is_named(name: str, first: str, tmp_path: Path) -> None:
    params = warm_params(TINY)[name].copy()
    (params[1] if ".layers." in name else params)[...] *= 1.01
    found = verify(write(tmp_path / "a"), write(tmp_path / "b", **{name: params}), TORCH)
    assert found.first_difference.name == first and found.steps[-1] > 1e-4


def test_a_transposed_square_matrix_that_shapes_cannot_tell_is_found(tmp_path: Path) -> None:
    """q of the trunk is square, as in the published model; only values show that it lies on its side."""
    query = warm_params(TINY)["trunk.layers.q_proj.weight"]
    flat = query.reshape(len(query), 96, 96)
    turned = np.ascontiguousarray(flat.transpose(0, 2, 1)).reshape(query.shape)
    found = verify(write(tmp_path / "a"), write(tmp_path / "b", **{"trunk.layers.q_proj.weight": turned}), TORCH)
    assert found.first_difference.name == "trunk.layers.0.q" and found.first_difference.error > 0.1


def test_adapters_and_what_they_merge_to_are_alike(tmp_path: Path) -> None:
    from pi05.convert import Options as ConvertOptions
    from pi05.convert import convert

    folder = write(tmp_path / "adapters", TINY.replace(trunk__lora=LoRA(3, 6.0)))
    convert(folder, tmp_path / "merged", "torch", ConvertOptions(weights_only=True, merge_lora=True))
    assert verify(folder, str(tmp_path / "merged"), TORCH).first_difference is None


def test_two_different_models_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"different models: .* is \(.*\) in .*a and \(.*\) in .*b"):
        verify(write(tmp_path / "a"), write(tmp_path / "b", TINY.replace(trunk__mlp_dim=99)), TORCH)


def test_the_exit_code_says_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    bias = {"action_out_proj.bias": warm_params(TINY)["action_out_proj.bias"] + np.float32(0.5)}
    a, b, options = write(tmp_path / "a"), write(tmp_path / "b", **bias), Options(backends=TORCH)
    assert main(a, a, options) == 0 and "They agree" in capsys.readouterr().out
    assert main(a, b, options) == 1 and "They differ, first in velocity" in capsys.readouterr().out
    assert main(a, b, Options(backends=TORCH, tolerance=10.0)) == 0
    assert main(a, str(tmp_path / "c"), options) == 2 and "There is no checkpoint" in capsys.readouterr().err


def test_the_command_line(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    command = [sys.executable, "-m", "pi05.verify", folder, folder, "--backends", "torch", "torch", "--config", "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "They agree" in done.stdout, done.stderr
