"""Learning-rate schedules: the learning rate as a plain function of the step, so that both optimizers are given the same number.

Step counts start at 0: `learning_rate(schedule, k)` is what the update from k to k + 1 uses. All figures are float64 on the host.
"""

import dataclasses
import math
from typing import Literal

from pi05.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Linear warmup, then a decay.

    kind: "cosine" falls from `peak_lr` to `decay_lr` along half a cosine (Loshchilov and Hutter 2017) that ends at step `decay_steps`, warmup
        included, and stays there; "rsqrt" falls as 1 / sqrt(1 + (step - warmup_steps) / timescale); "constant" stays at `peak_lr`.
    warmup_steps: the rate rises linearly from peak_lr / (warmup_steps + 1) to peak_lr, as in openpi.
    decay_steps, decay_lr: of "cosine". timescale: of "rsqrt", in steps.
    """

    kind: Literal["cosine", "rsqrt", "constant"] = "cosine"
    peak_lr: float = 2.5e-5
    warmup_steps: int = 1_000
    decay_steps: int = 30_000
    decay_lr: float = 2.5e-6
    timescale: float = 10_000.0

    def __post_init__(self) -> None:
        if self.kind not in ("cosine", "rsqrt", "constant"):
            raise ConfigError(f"schedule.kind is {self.kind!r}; it must be cosine, rsqrt or constant.")
        if not self.peak_lr > 0 or not math.isfinite(self.peak_lr):
            raise ConfigError(f"schedule.peak_lr is {self.peak_lr}; it must be a positive number.")
        if self.warmup_steps < 0:
            raise ConfigError(f"schedule.warmup_steps is {self.warmup_steps}; it must not be negative.")
        if self.kind == "cosine" and self.decay_steps <= self.warmup_steps:
            raise ConfigError(f"schedule.decay_steps is {self.decay_steps}; it counts from step 0 and must be above warmup_steps {self.warmup_steps}.")
        if self.kind == "cosine" and not 0 <= self.decay_lr <= self.peak_lr:
            raise ConfigError(f"schedule.decay_lr is {self.decay_lr}; it must lie between 0 and peak_lr {self.peak_lr}.")
        if self.kind == "rsqrt" and not self.timescale > 0:
            raise ConfigError(f"schedule.timescale is {self.timescale}; it must be positive.")


def learning_rate(schedule: Schedule, step: int) -> float:
    """The learning rate of the update that leads from `step` to `step` + 1."""
    if step < schedule.warmup_steps:
        start = schedule.peak_lr / (schedule.warmup_steps + 1)
        return start + (schedule.peak_lr - start) * step / schedule.warmup_steps
    behind = step - schedule.warmup_steps
    if schedule.kind == "constant":
        return schedule.peak_lr
    if schedule.kind == "rsqrt":
        return schedule.peak_lr / math.sqrt(1.0 + behind / schedule.timescale)
    share = min(1.0, behind / (schedule.decay_steps - schedule.warmup_steps))
    return schedule.decay_lr + (schedule.peak_lr - schedule.decay_lr) * 0.5 * (1.0 + math.cos(math.pi * share))
