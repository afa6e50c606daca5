"""A fault in a dependency is named by the first module, in the order of execution, whose activation left its band; everything before it agrees."""

import importlib

import pytest

from .lab import Lab
from .level_1_activations import test_every_activation_matches_the_truth as activations_match
from .record import Record
from .reporting import first_divergence


def _erf(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dependency's gelu computes the error function whatever it is asked for, as if its default had taken over."""
    library = importlib.import_module(module)
    original = library.gelu
    exact = {"torch.nn.functional": {"approximate": "none"}, "jax.nn": {"approximate": False}}[module]
    monkeypatch.setattr(library, "gelu", lambda x, approximate=None: original(x, **exact))


@pytest.mark.parametrize(("backend", "library"), [("torch", "torch.nn.functional"), ("jax", "jax.nn")])
def test_gelu_of_a_dependency_is_traced_to_the_first_layer_that_uses_it(lab: Lab, monkeypatch: pytest.MonkeyPatch, backend: str, library: str) -> None:
    _erf(library, monkeypatch)
    mine = Record()
    with pytest.raises(AssertionError, match=r"first divergence at vision\.layers\.0\.out: error .*, limit 1\.00e-05"):
        activations_match(Lab(borrow=lab, under_test=backend), mine, backend, "float32", "ragged")
    row, check = first_divergence(mine)
    before = [found.name for found in row.checks[: row.checks.index(check)]]
    assert before == ["vision.embedded", "vision.layers.0.attn"], "what runs before the first gelu agrees"


def test_softmax_of_a_dependency_is_traced_to_the_first_attention(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A softmax that sums in bfloat16, in PyTorch."""
    import torch

    original = torch.softmax
    for place in (torch, torch.nn.functional, torch.Tensor):
        monkeypatch.setattr(place, "softmax", lambda x, *where, **named: original(x.bfloat16(), *where, **named).to(x.dtype))
    mine = Record()
    with pytest.raises(AssertionError, match=r"first divergence at vision\.layers\.0\.attn"):
        activations_match(Lab(borrow=lab, under_test="torch"), mine, "torch", "float32", "ragged")
