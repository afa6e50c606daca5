"""The loss and the gradients of one step of training.

Axes: B (see spec.py).
Dtypes: gradients have the dtype of their parameter (float32).
"""

from collections.abc import Container

import jax
import jax.numpy as jnp
from jax import Array

from pi05.batch import Batch, Draws, LossDims, LossParts, PaddedSteps
from pi05.jax_backend.model import Pi05, map_arrays, named_params, with_params
from pi05.recipe import Recipe


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
    params = named_params(model)
    frozen = {name: array for name, array in params.items() if learned is not None and name not in learned}

    def mean_loss(params: dict[str, Array]) -> tuple[Array, LossParts]:
        parts = with_params(model, params | frozen).loss(batch, draws, padded_steps=padded_steps, loss_dims=loss_dims)
        return parts.loss, parts

    gradients, parts = jax.grad(mean_loss, has_aux=True)({name: array for name, array in params.items() if name not in frozen})
    return parts, gradients


def accumulate_gradients(model: Pi05, batch: Batch, draws: Draws, recipe: Recipe, learned: Container[str]) -> tuple[LossParts, dict[str, Array]]:
    """`loss_and_gradients` of the whole batch, computed in `recipe.grad_accum_steps` equal parts one after the other.

    The loss is a mean of per-sample losses, so the mean of the parts' gradients is the gradient; per_dim becomes the mean of the parts'.
    """
    count, options = recipe.grad_accum_steps, {"padded_steps": recipe.padded_steps, "loss_dims": recipe.loss_dims, "learned": learned}
    if count == 1:
        return loss_and_gradients(model, batch, draws, **options)
    params = named_params(model)

    def one_part(total: dict[str, Array], part: tuple[Batch, Draws]) -> tuple[dict[str, Array], LossParts]:
        parts, gradients = loss_and_gradients(with_params(model, params), *part, **options)
        return {name: total[name] + gradient / count for name, gradient in gradients.items()}, parts

    zeros = {name: jnp.zeros_like(array) for name, array in params.items() if name in learned}
    split = map_arrays(lambda array: array.reshape(count, -1, *array.shape[1:]), (batch, draws))
    gradients, parts = jax.lax.scan(one_part, zeros, split)
    return LossParts(per_sample=parts.per_sample.reshape(-1), per_dim=parts.per_dim.mean(0)), gradients
