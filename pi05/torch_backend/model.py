"""Pi0.5: images and text to a prefix, noisy actions to a suffix, both to a velocity; the flow-matching loss; token logits.

Axes: B C P T A M D V (see spec.py).
Dtypes: parameters float32; streams in the compute dtype; time embedding, action and time projections and loss in at least float32.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor as Array
from torch import nn

from pi05.batch import Batch, Draws, LossDims, LossParts, Observation, PaddedSteps
from pi05.params import read, write
from pi05.spec import Compute, ModelSpec
from pi05.torch_backend.attention import is_fused, pack, unpack
from pi05.torch_backend.augment import augment
from pi05.torch_backend.gemma import BLOCK_TAPS, Gemma, Stream, run_layers
from pi05.torch_backend.layers import Linear, cast, promote, rotation, time_embedding
from pi05.torch_backend.siglip import Vision


class Pi05(nn.Module):
    """The model. Its parameters are named as in the parameter table; see `make_model`."""

    def __init__(self, spec: ModelSpec, compute: Compute):
        super().__init__()
        self.spec, self.compute = spec, compute
        self.vision = Vision(spec, compute)
        self.trunk = Gemma(spec.trunk, adaptive=False, vocab_size=spec.vocab_size)
        self.expert = Gemma(spec.expert, adaptive=True)
        self.action_in_proj = Linear(spec.action_dim, spec.expert.width, bias=True)
        self.action_out_proj = Linear(spec.expert.width, spec.action_dim, bias=True)
        self.time_mlp_in = Linear(spec.expert.width, spec.expert.width, bias=True)
        self.time_mlp_out = Linear(spec.expert.width, spec.expert.width, bias=True)

    def embed_prefix(self, observation: Observation, *, capture: bool = False) -> tuple[Stream, dict[str, Array]]:
        """Image tokens of every camera, then text tokens; with a fused strategy, the valid ones in front. Positions count valid tokens only."""
        image_BCPD, taps = self.vision(observation.images, capture=capture)
        text_BTD = cast(self.trunk.embed(observation.tokens), getattr(torch, self.compute.dtype))
        x_BPD = torch.concatenate((rearrange(image_BCPD, "B C P D -> B (C P) D"), text_BTD), axis=1)
        valid_BP = self._valid_prefix(observation)
        positions_BP = (torch.cumsum(valid_BP, 1, dtype=torch.int32) - 1).clip(0)
        if is_fused(self.compute.strategy):
            valid_BP, x_BPD, positions_BP = pack(valid_BP, x_BPD, positions_BP)
        taps |= {"prefix.embedded": x_BPD, "prefix.valid": valid_BP, "prefix.positions": positions_BP} if capture else {}
        return Stream(x_BPD, self._angles(positions_BP), valid_BP), taps

    def embed_suffix(self, x_t_BAM: Array, time_B: Array, valid_BA: Array, prefix: Stream, *, capture: bool = False) -> tuple[Stream, Array, dict[str, Array]]:
        """Noisy actions at flow time `time_B`, placed behind the valid prefix; returns the suffix and the adaRMS condition [B, D]."""
        full = getattr(torch, self.compute.full_dtype)
        embedded_BD = time_embedding(cast(time_B, full), self.spec.expert.width)
        cond_BD = F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(embedded_BD))))
        x_BAD = cast(self.action_in_proj(cast(x_t_BAM, full)), getattr(torch, self.compute.dtype))
        prefix_len_B1 = prefix.valid.sum(1, keepdim=True, dtype=torch.int32)
        positions_BA = (prefix_len_B1 + torch.cumsum(valid_BA, 1, dtype=torch.int32) - 1).clip(0)
        taps = {"time.embedding": embedded_BD, "time.cond": cond_BD, "suffix.embedded": x_BAD, "suffix.positions": positions_BA} if capture else {}
        return Stream(x_BAD, self._angles(positions_BA), valid_BA), cond_BD, taps

    def decode(self, suffix_BAD: Array) -> Array:
        """Velocity [B, A, M] from the final suffix, at least float32."""
        return self.action_out_proj(promote(suffix_BAD))

    def forward(self, observation: Observation, x_t_BAM: Array, time_B: Array, valid_BA: Array, *, capture: bool = False) -> tuple[Array, dict[str, Array]]:
        """Velocity v(x_t, t) [B, A, M] and, with `capture`, every named intermediate.

        valid_BA: bool, action steps that may be attended to.
        """
        prefix, taps = self.embed_prefix(observation, capture=capture)
        suffix, cond_BD, suffix_taps = self.embed_suffix(x_t_BAM, time_B, valid_BA, prefix, capture=capture)
        keep = BLOCK_TAPS if capture else ()
        final_BPD, final_BAD, kept = run_layers(self.trunk, self.expert, prefix, suffix, cond_BD, self.compute, keep=keep)
        velocity_BAM = self.decode(final_BAD)
        if not capture:
            return velocity_BAM, {}
        layers = {name.replace(".", ".layers."): tap for name, tap in kept.items()}
        ends = {"trunk.final": final_BPD, "expert.final": final_BAD, "velocity": velocity_BAM}
        return velocity_BAM, taps | suffix_taps | layers | ends

    def flow(self, batch: Batch, draws: Draws, *, padded_steps: PaddedSteps = "ignore") -> tuple[Array, Array, Array]:
        """The straight path from noise to actions (Lipman et al. 2023, with t = 1 at the noise).

        Returns x_t = t noise + (1 - t) actions and the target velocity u_t = noise - actions, both [B, A, M], and bool[B, A], the steps
        that are attended to and counted: the real ones, or with padded_steps="count", as in openpi, all.
        """
        full = getattr(torch, self.compute.full_dtype)
        counted_BA = {"ignore": ~batch.action_is_pad, "count": torch.ones_like(batch.action_is_pad)}[padded_steps]
        # What a padded step holds reaches nothing, not even as NaN.
        actions_BAM = torch.where(counted_BA[:, :, None], cast(batch.actions, full), 0)
        noise_BAM, time_B11 = cast(draws.noise, full), cast(draws.time, full)[:, None, None]
        return time_B11 * noise_BAM + (1 - time_B11) * actions_BAM, noise_BAM - actions_BAM, counted_BA

    def loss(self, batch: Batch, draws: Draws, *, padded_steps: PaddedSteps = "ignore", loss_dims: LossDims = "model") -> LossParts:
        """Flow-matching loss: squared error of the velocity, on images augmented as the draws say.

        padded_steps: see `flow`. loss_dims: "model" counts every dim of the padded action vector, as openpi; "real" the robot's own.
        """
        x_t_BAM, u_t_BAM, counted_BA = self.flow(batch, draws, padded_steps=padded_steps)
        observation = batch.observation
        if draws.augment is not None:
            observation = dataclasses.replace(observation, images=augment(observation.images, draws.augment, getattr(torch, self.compute.full_dtype)))
        v_t_BAM, _ = self(observation, x_t_BAM, draws.time, counted_BA)
        counted_BM = {"real": ~batch.action_dim_is_pad, "model": torch.ones_like(batch.action_dim_is_pad)}[loss_dims]
        weight_BAM = cast(counted_BA[:, :, None] & counted_BM[:, None, :], v_t_BAM.dtype)
        error_BAM = weight_BAM * (v_t_BAM - u_t_BAM) ** 2
        per_sample_B = error_BAM.sum((1, 2)) / weight_BAM.sum((1, 2))
        per_dim_M = error_BAM.sum((0, 1)) / weight_BAM.sum((0, 1)).clip(1)
        return LossParts(per_sample=per_sample_B, per_dim=per_dim_M)

    def token_logits(self, observation: Observation) -> Array:
        """Scores [B, T, V] of every token of the vocabulary at each text token of the prefix, through the tied embedding; at least float32."""
        prefix, _ = self.embed_prefix(observation)
        final_BPD, _, _ = run_layers(self.trunk, self.expert, prefix, None, None, self.compute)
        if is_fused(self.compute.strategy):
            final_BPD = unpack(self._valid_prefix(observation), final_BPD)
        return self.trunk.embed.logits(final_BPD[:, -observation.tokens.shape[1] :])

    def _valid_prefix(self, observation: Observation) -> Array:
        image_valid_BP = repeat(observation.image_mask, "B C -> B (C P)", P=self.spec.vision.num_patches)
        return torch.concatenate((image_valid_BP, observation.token_mask), axis=1)

    def _angles(self, positions_BT: Array) -> tuple[Array, Array]:
        return rotation(positions_BT, self.spec.trunk.head_dim, self.spec.num_positions, getattr(torch, self.compute.full_dtype))


def abstract_model(spec: ModelSpec, compute: Compute) -> Pi05:
    """The model with shapes and dtypes but without numbers or memory."""
    with torch.device("meta"):
        return Pi05(spec, compute)


def make_model(spec: ModelSpec, compute: Compute, tensors: Iterable[tuple[str, np.ndarray]]) -> Pi05:
    """A model with the given (canonical name, array) parameters, taken one at a time.

    Raises:
        ParamsError: a tensor is missing, unexpected or of a wrong shape.
        SpecError: the framework, as it is configured, does not compute in `compute.dtype`.
    """
    model = abstract_model(spec, compute)
    model.load_state_dict({name: torch.tensor(array) for name, array in write(tensors, spec, "torch")}, assign=True)
    return model


def named_params(model: Pi05) -> dict[str, Array]:
    """Every parameter by its name in this backend's layout."""
    return dict(model.named_parameters())


def with_params(model: Pi05, params: dict[str, Array]) -> Pi05:
    """The model on these parameters, by their name in this backend's layout; arrays are taken over, not copied. A torch model is changed in place."""
    model.load_state_dict(params, assign=True)
    return model


def canonical_params(model: Pi05, spec: ModelSpec) -> dict[str, np.ndarray]:
    """The parameters as canonical NumPy arrays."""
    return dict(read({name: value.detach().numpy() for name, value in named_params(model).items()}, spec, "torch"))


def map_arrays(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with function(array) in place of every array; trees are tuples, dicts and dataclasses, None stays None."""
    if dataclasses.is_dataclass(tree):
        return dataclasses.replace(tree, **{field.name: map_arrays(function, getattr(tree, field.name)) for field in dataclasses.fields(tree)})
    if isinstance(tree, dict):
        return {name: map_arrays(function, part) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_arrays(function, part) for part in tree)
    return None if tree is None else function(tree)


def from_numpy(tree: Any) -> Any:
    """A Batch, Observation or Draws of NumPy arrays as one of this backend's arrays, copied."""
    return map_arrays(torch.tensor, tree)
