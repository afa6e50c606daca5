"""One step of training.

Axes: B (see spec.py).
Dtypes: gradients have the dtype of their parameter (float32).
"""

import torch
from torch import Tensor as Array

from pi05.batch import Batch, Draws, LossDims, LossParts, PaddedSteps
from pi05.torch_backend.model import Pi05, named_params


def loss_and_gradients(
    model: Pi05, batch: Batch, draws: Draws, *, padded_steps: PaddedSteps = "ignore", loss_dims: LossDims = "model"
) -> tuple[LossParts, dict[str, Array]]:
    """The loss and the gradient of its mean with respect to every parameter, by name.

    A parameter without a path to the loss has a gradient of exact zeros, never none: an optimizer must treat it alike in both backends.
    """
    model.zero_grad(set_to_none=True)
    parts = model.loss(batch, draws, padded_steps=padded_steps, loss_dims=loss_dims)
    parts.loss.backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    parts = LossParts(per_sample=parts.per_sample.detach(), per_dim=parts.per_dim.detach())
    return parts, {name: parameter.grad for name, parameter in named_params(model).items()}
