"""AdamW with clipping and an exponential moving average, on the tensors that learn.

Dtypes: everything float32.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax import Array

from pi05.recipe import Recipe


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class OptimizerState:
    """The optimizer's memory. adam: the framework's own state. ema: the moving average by name, or None."""

    adam: optax.OptState
    ema: dict[str, Array] | None


def global_norm(tensors: dict[str, Array]) -> Array:
    """Square root of the sum of all squares; 0 of nothing."""
    return optax.tree.norm(tensors) if tensors else jnp.zeros(())


def init_optimizer(params: dict[str, Array], recipe: Recipe) -> OptimizerState:
    """Moments of zero; the moving average starts at the parameters."""
    return OptimizerState(_adam(recipe, 0.0).init(params), None if recipe.ema_decay is None else jax.tree.map(jnp.copy, params))


def apply_gradients(
    params: dict[str, Array], gradients: dict[str, Array], loss: Array, state: OptimizerState, lr: Array, recipe: Recipe
) -> tuple[dict[str, Array], OptimizerState, Array, Array]:
    """One update: clip, AdamW (see recipe.AdamW), moving average.

    Where the loss or the gradients' global norm is not finite, nothing changes: no weight, no moment, no average, no count.
    Returns the parameters, the state, the norm before clipping, and whether all was finite.
    """
    norm, limit = global_norm(gradients), recipe.optimizer.clip_norm
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    if limit is not None:
        scale = jnp.where(norm > limit, limit / norm, 1.0)
        gradients = {name: gradient * scale for name, gradient in gradients.items()}
    with jax.numpy_dtype_promotion("standard"):  # optax counts in int32 and takes powers of floats
        changes, adam = _adam(recipe, lr).update(gradients, state.adam, params)
    changed = optax.apply_updates(params, changes)
    ema = None
    if state.ema is not None:
        ema = {name: mean + (1 - recipe.ema_decay) * (changed[name] - mean) for name, mean in state.ema.items()}
    old, new = (params, state.adam, state.ema), (changed, adam, ema)
    params, adam, ema = jax.tree.map(lambda before, after: jnp.where(finite, after, before), old, new)
    return params, OptimizerState(adam, ema), norm, finite


def read_moments(params: dict[str, Array], state: OptimizerState) -> tuple[int, dict[str, Array], dict[str, Array]]:
    """The number of updates so far, and AdamW's moments m and v by name."""
    adam = _adam_state(state.adam)
    return int(adam.count), adam.mu, adam.nu


def restore_optimizer(
    params: dict[str, Array], recipe: Recipe, updates: int, m: dict[str, Array], v: dict[str, Array], ema: dict[str, Array] | None
) -> OptimizerState:
    """The state that `read_moments` has read from."""
    state = _adam(recipe, 0.0).init(params)
    adam = _adam_state(state)._replace(count=jnp.asarray(updates, jnp.int32), mu=m, nu=v)
    return OptimizerState(tuple(adam if isinstance(part, optax.ScaleByAdamState) else part for part in state), ema)


def _adam(recipe: Recipe, lr: Array | float) -> optax.GradientTransformation:
    rule = recipe.optimizer
    return optax.adamw(lr, b1=rule.b1, b2=rule.b2, eps=rule.eps, weight_decay=rule.weight_decay)


def _adam_state(state: optax.OptState) -> optax.ScaleByAdamState:
    (found,) = (part for part in state if isinstance(part, optax.ScaleByAdamState))
    return found
