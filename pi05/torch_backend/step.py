"""The loss and the gradients of one step of training.

Axes: B (see spec.py).
Dtypes: gradients have the dtype of their parameter (float32).
"""

from collections.abc import Container

import torch
from torch import Tensor as Array

from pi05.batch import Batch, Draws, LossDims, LossParts, PaddedSteps
from pi05.recipe import Recipe
from pi05.torch_backend.model import Pi05, map_arrays, named_params


def loss_and_gradients(
    model: Pi05,
    batch: Batch,
    draws: Draws,
    *,
    padded_steps: PaddedSteps = "ignore",
    loss_dims: LossDims = "model",
    learned: Container[str] | None = None,
) -> tuple[LossParts, dict[str, Array]]:
    """The loss and the gradient of its mean with respect to every parameter, by name; with `learned`, to these only.

    A parameter without a path to the loss has a gradient of exact zeros, never none: an optimizer must treat it alike in both backends.
    """
    model.zero_grad(set_to_none=True)
    params = named_params(model)
    for name, param in params.items():
        param.requires_grad_(learned is None or name in learned)
    parts = model.loss(batch, draws, padded_steps=padded_steps, loss_dims=loss_dims)
    parts.loss.backward()
    gradients = {name: torch.zeros_like(param) if param.grad is None else param.grad for name, param in params.items() if param.requires_grad}
    return LossParts(per_sample=parts.per_sample.detach(), per_dim=parts.per_dim.detach()), gradients


def accumulate_gradients(model: Pi05, batch: Batch, draws: Draws, recipe: Recipe, learned: Container[str]) -> tuple[LossParts, dict[str, Array]]:
    """`loss_and_gradients` of the whole batch, computed in `recipe.grad_accum_steps` equal parts one after the other.

    The loss is a mean of per-sample losses, so the mean of the parts' gradients is the gradient; per_dim becomes the mean of the parts'.
    """
    count, options = recipe.grad_accum_steps, {"padded_steps": recipe.padded_steps, "loss_dims": recipe.loss_dims, "learned": learned}
    if count == 1:
        return loss_and_gradients(model, batch, draws, **options)
    total: dict[str, Array] = {}
    losses: list[LossParts] = []
    for index in range(count):
        part = map_arrays(lambda array, index=index: array.chunk(count)[index], (batch, draws))
        parts, gradients = loss_and_gradients(model, *part, **options)
        total = {name: gradient / count + total.get(name, 0) for name, gradient in gradients.items()}
        losses.append(parts)
    return LossParts(torch.cat([part.per_sample for part in losses]), torch.stack([part.per_dim for part in losses]).mean(0)), total
