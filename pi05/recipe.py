"""What one training step does besides computing a gradient: which tensors learn, by which rule; the same for both backends."""

import dataclasses
from typing import Literal

from pi05.batch import LossDims, PaddedSteps
from pi05.errors import ConfigError
from pi05.params import GROUPS, Group, rows
from pi05.spec import ModelSpec

# "train": every tensor of the group. "lora": only its low-rank adapters. "freeze": nothing.
Mode = Literal["train", "lora", "freeze"]
MODES: tuple[Mode, ...] = ("train", "lora", "freeze")


@dataclasses.dataclass(frozen=True)
class Groups:
    """How each group of parameters (see params.py) is trained."""

    vision: Mode = "train"
    trunk: Mode = "train"
    expert: Mode = "train"
    heads: Mode = "train"

    def __post_init__(self) -> None:
        for group in GROUPS:
            if self.mode(group) not in MODES:
                raise ConfigError(f"groups.{group} is {self.mode(group)!r}; it must be one of {', '.join(MODES)}.")
        if self.heads == "lora":
            raise ConfigError("groups.heads is 'lora': the action and time projections carry no adapters. Use train or freeze.")
        if all(self.mode(group) == "freeze" for group in GROUPS):
            raise ConfigError("groups freezes every group: nothing would be trained. Set at least one of them to train or lora.")

    def mode(self, group: Group) -> Mode:
        return getattr(self, group)


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019): p <- p - lr (m^ / (sqrt(v^) + eps) + weight_decay p), with bias-corrected moments m^ and v^.

    clip_norm: gradients whose global norm is above it are scaled by clip_norm / norm, without an epsilon; None clips nothing.
    """

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 1e-10
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optimizer.{name} is {getattr(self, name)}; it must lie in [0, 1).")
        if not self.eps > 0:
            raise ConfigError(f"optimizer.eps is {self.eps}; it must be positive.")
        if self.weight_decay < 0:
            raise ConfigError(f"optimizer.weight_decay is {self.weight_decay}; it must not be negative.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"optimizer.clip_norm is {self.clip_norm}; it must be positive, or null to clip nothing.")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One training step.

    ema_decay: the exponential moving average ema <- decay ema + (1 - decay) p of what is trained; None keeps none.
    grad_accum_steps: the batch is computed in so many equal parts; the gradient is that of the whole batch.
    padded_steps, loss_dims: see batch.py.
    """

    groups: Groups = Groups()
    optimizer: AdamW = AdamW()
    ema_decay: float | None = 0.99
    grad_accum_steps: int = 1
    padded_steps: PaddedSteps = "ignore"
    loss_dims: LossDims = "model"

    def __post_init__(self) -> None:
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ConfigError(f"ema_decay is {self.ema_decay}; it must lie in [0, 1), or be null for none.")
        if self.grad_accum_steps < 1:
            raise ConfigError(f"grad_accum_steps is {self.grad_accum_steps}; it must be at least 1.")

    def trains(self, spec: ModelSpec) -> frozenset[str]:
        """Canonical names of the tensors that learn.

        Raises:
            ConfigError: a group is to learn by adapters and the spec gives it none, or it has adapters that would not learn.
        """
        names = set()
        for group in GROUPS:
            mode, lora = self.groups.mode(group), spec.lora(group)
            if mode == "lora" and lora is None:
                raise ConfigError(f"groups.{group} is 'lora', but the model has no adapters there: set model.lora.{group}.")
            if mode != "lora" and lora is not None:
                raise ConfigError(f"The model has adapters in {group} (model.lora.{group}), but groups.{group} is {mode!r}: set it to lora or remove them.")
            names |= {row.name for row in rows(spec) if row.group == group and (mode == "train" or (mode == "lora" and row.adapter))}
        return frozenset(names)
