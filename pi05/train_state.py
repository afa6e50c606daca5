"""The state of a training run as plain NumPy: what a checkpoint holds, what one backend hands to the other."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and writes. Names and shapes are canonical (see params.py), all float32.

    step: batches consumed. updates: steps that changed the weights, AdamW's count; smaller than `step` where a step was not finite.
    params: every tensor, frozen ones and adapters included. m, v: AdamW's moments of the tensors that learn.
    ema: moving average of the tensors that learn, or None where the run keeps none.
    """

    step: int
    updates: int
    params: dict[str, np.ndarray]
    m: dict[str, np.ndarray]
    v: dict[str, np.ndarray]
    ema: dict[str, np.ndarray] | None

    def served_params(self) -> dict[str, np.ndarray]:
        """The weights to act with: the moving average where there is one."""
        return self.params | (self.ema or {})


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """What one step tells. Scalars may be arrays that a device is still computing; `fetch` waits for them.

    loss: mean over the batch. per_dim: float32[M], see batch.LossParts. finite: whether loss and gradient were; if not, nothing was changed.
    grad_norm: global norm before clipping. param_norm: global norm of what learns, after the step; None on steps that do not ask for it.
    """

    loss: Any
    per_dim: Any
    grad_norm: Any
    finite: Any
    param_norm: Any = None

    def fetch(self) -> dict[str, float | bool | np.ndarray]:
        """Python numbers and a NumPy array; what is NaN stays NaN."""
        out: dict[str, float | bool | np.ndarray] = {"loss": float(self.loss), "grad_norm": float(self.grad_norm), "finite": bool(self.finite)}
        if self.param_norm is not None:
            out["param_norm"] = float(self.param_norm)
        return out | {"per_dim": np.asarray(self.per_dim)}
