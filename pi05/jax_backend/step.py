"""One step of training.

Axes: B (see spec.py).
Dtypes: gradients have the dtype of their parameter (float32).
"""

from flax import nnx
from jax import Array

from pi05.batch import Batch, Draws, LossDims, LossParts, PaddedSteps
from pi05.jax_backend.model import Pi05


def loss_and_gradients(
    model: Pi05, batch: Batch, draws: Draws, *, padded_steps: PaddedSteps = "ignore", loss_dims: LossDims = "model"
) -> tuple[LossParts, dict[str, Array]]:
    """The loss and the gradient of its mean with respect to every parameter, by name.

    A parameter without a path to the loss has a gradient of exact zeros, never none: an optimizer must treat it alike in both backends.
    """
    graph, state = nnx.split(model)

    def mean_loss(state: nnx.State) -> tuple[Array, LossParts]:
        parts = nnx.merge(graph, state).loss(batch, draws, padded_steps=padded_steps, loss_dims=loss_dims)
        return parts.loss, parts

    gradients, parts = nnx.grad(mean_loss, has_aux=True)(state)
    return parts, {".".join(path): gradient[...] for path, gradient in nnx.to_flat_state(gradients)}
