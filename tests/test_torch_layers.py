"""What the PyTorch layers keep between calls; what they compute is judged in parity/."""

from unittest import mock

import pytest
import torch

from pi05.torch_backend import layers

POSITIONS = torch.tensor([[0, 1, 5]])


def test_tables_go_to_the_device_once() -> None:
    layers.rotation(POSITIONS, 24, 31, torch.float32)
    layers.time_embedding(torch.tensor([0.5]), 26)
    with mock.patch.object(torch, "as_tensor", side_effect=AssertionError("moved again")):
        layers.rotation(POSITIONS, 24, 31, torch.float32)
        layers.time_embedding(torch.tensor([0.25]), 26)
        with pytest.raises(AssertionError, match="moved again"):
            layers.rotation(POSITIONS, 24, 31, torch.float64)


def test_a_table_first_used_to_act_serves_in_training() -> None:
    """A tensor made in inference mode could not be saved for a backward pass."""
    with torch.inference_mode():
        layers.rotation(POSITIONS, 22, 29, torch.float32)
    angles = layers.rotation(POSITIONS, 22, 29, torch.float32)
    x = torch.ones((1, 3, 2, 22), requires_grad=True)
    layers.rotate(x, angles).sum().backward()
    assert x.grad.isfinite().all()


def test_a_region_computes_the_same_on_the_cpu_without_a_compiler() -> None:
    def double(module: None, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    with mock.patch.object(torch, "compile", side_effect=AssertionError("compiled")):
        assert layers.region(double)(None, torch.ones(2)).tolist() == [2, 2]
        assert layers.region(double, dynamic=True)(None, torch.ones(2)).tolist() == [2, 2]
