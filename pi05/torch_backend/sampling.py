"""Sampling an action chunk: the prefix once into a key/value cache, then Euler steps of the suffix from noise (t = 1) to actions (t = 0).

Axes: B A M L P K H (see spec.py).
Dtypes: the actions and the Euler steps in at least float32.
"""

import torch
from torch import Tensor as Array

from pi05.batch import Observation
from pi05.torch_backend.gemma import CACHE_TAPS, Stream, run_layers
from pi05.torch_backend.layers import cast
from pi05.torch_backend.model import Pi05


def encode_prefix(model: Pi05, observation: Observation) -> tuple[Stream, dict[str, Array]]:
    """Runs the prefix; returns it and the keys and values {"k", "v"} [L, B, P, K, H] that the suffix will attend to."""
    prefix, _ = model.embed_prefix(observation)
    _, _, kept = run_layers(model.trunk, model.expert, prefix, None, None, model.compute, keep=CACHE_TAPS)
    return prefix, {name[-1]: kept[name] for name in CACHE_TAPS}


def cached_velocity(model: Pi05, prefix: Stream, cache: dict[str, Array], x_t_BAM: Array, time_B: Array) -> Array:
    """Velocity [B, A, M] at (x_t, t), computing only the suffix; every action step is real."""
    valid_BA = torch.ones(x_t_BAM.shape[:2], dtype=torch.bool, device=x_t_BAM.device)
    suffix, cond_BD, _ = model.embed_suffix(x_t_BAM, time_B, valid_BA, prefix)
    _, final_BAD, _ = run_layers(model.trunk, model.expert, prefix, suffix, cond_BD, model.compute, cache=cache)
    return model.decode(final_BAD)


def sample_actions(model: Pi05, observation: Observation, noise_BAM: Array, num_steps: int = 10) -> tuple[Array, Array]:
    """Integrates dx = v dt from t = 1 to t = 0 in `num_steps` Euler steps (Black et al. 2024, eq. 3).

    Returns the actions [B, A, M] in normalised units, and x after each step [num_steps, B, A, M].
    """
    full = getattr(torch, model.compute.full_dtype)
    prefix, cache = encode_prefix(model, observation)
    x_BAM, steps = cast(noise_BAM, full), []
    for index in range(num_steps):
        time_B = torch.full(x_BAM.shape[:1], 1.0 - index / num_steps, dtype=full, device=x_BAM.device)
        x_BAM = x_BAM - cached_velocity(model, prefix, cache, x_BAM, time_B) / num_steps
        steps.append(x_BAM)
    return x_BAM, torch.stack(steps)
