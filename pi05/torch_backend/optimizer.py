"""AdamW with clipping and an exponential moving average, on the tensors that learn.

Dtypes: everything float32.
"""

import dataclasses
import math

import torch
from torch import Tensor as Array
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pi05.recipe import Recipe

# p - decay p rounds to p for every float32 p when decay is below this.
_SMALLEST_DECAY = 2.0**-25


@dataclasses.dataclass
class OptimizerState:
    """The optimizer's memory. adam: the framework's own state. ema: the moving average by name, or None."""

    adam: torch.optim.AdamW
    ema: dict[str, Array] | None


def global_norm(tensors: dict[str, Array]) -> Array:
    """Square root of the sum of all squares; 0 of nothing."""
    return torch.nn.utils.get_total_norm(tensors.values())


def init_optimizer(params: dict[str, Array], recipe: Recipe) -> OptimizerState:
    """Moments of zero; the moving average starts at the parameters."""
    zeros = {name: torch.zeros_like(value) for name, value in params.items()}
    ema = None if recipe.ema_decay is None else {name: value.detach().clone() for name, value in params.items()}
    return restore_optimizer(params, recipe, 0, zeros, {name: value.clone() for name, value in zeros.items()}, ema)


@torch.no_grad()
def apply_gradients(
    params: dict[str, Array], gradients: dict[str, Array], loss: Array, state: OptimizerState, lr: Array, recipe: Recipe
) -> tuple[dict[str, Array], OptimizerState, Array, Array]:
    """One update: clip, AdamW (see recipe.AdamW), moving average.

    Where the loss or the gradients' global norm is not finite, nothing changes: no weight, no moment, no average, no count.
    Returns the parameters, the state, the norm before clipping, and whether all was finite.
    """
    norm, limit = global_norm(gradients), recipe.optimizer.clip_norm
    size, finite = float(norm), torch.isfinite(norm) & torch.isfinite(loss)
    if math.isfinite(size) and bool(finite):
        if limit is not None and size > limit:
            for gradient in gradients.values():
                gradient.mul_(limit / norm)
        for name, param in params.items():
            param.grad = gradients[name]
        for group in state.adam.param_groups:
            group["lr"] = lr
        decay = lr * recipe.optimizer.weight_decay
        if decay >= _SMALLEST_DECAY:
            for param in params.values():
                param.sub_(param, alpha=decay)
        state.adam.step()
        if state.ema is not None:
            get_ema_multi_avg_fn(recipe.ema_decay)([state.ema[name] for name in params], [param.detach() for param in params.values()], None)
    state.adam.zero_grad(set_to_none=True)
    return params, state, norm, finite


def read_moments(params: dict[str, Array], state: OptimizerState) -> tuple[int, dict[str, Array], dict[str, Array]]:
    """The number of updates so far, and AdamW's moments m and v by name."""
    moments = {name: state.adam.state[param] for name, param in params.items()}
    (updates,) = {int(moment["step"]) for moment in moments.values()}
    return updates, {name: moment["exp_avg"] for name, moment in moments.items()}, {name: moment["exp_avg_sq"] for name, moment in moments.items()}


def restore_optimizer(
    params: dict[str, Array], recipe: Recipe, updates: int, m: dict[str, Array], v: dict[str, Array], ema: dict[str, Array] | None
) -> OptimizerState:
    """The state that `read_moments` has read from."""
    rule = recipe.optimizer
    on_gpu = any(param.is_cuda for param in params.values())
    # Its own decay multiplies by 1 - lr weight_decay, whose rounding error in float32 is the same at every step and adds up; see apply_gradients.
    adam = torch.optim.AdamW(list(params.values()), lr=0.0, betas=(rule.b1, rule.b2), eps=rule.eps, weight_decay=0.0, fused=on_gpu or None)
    saved = adam.state_dict()
    for index, name in enumerate(params):
        saved["state"][index] = {"step": torch.tensor(float(updates)), "exp_avg": m[name], "exp_avg_sq": v[name]}
    adam.load_state_dict(saved)
    return OptimizerState(adam, ema)
