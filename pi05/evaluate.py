"""How good a policy is on episodes that it was not trained on, without a robot.

    python -m pi05.evaluate CHECKPOINT [--backend jax|torch] [--device auto|cpu|cuda]

Action chunks are sampled from the same observations and the same noise every time, so two evaluations differ by the weights alone.
"""

import dataclasses
from typing import Any

import numpy as np

from pi05.backend import Backend
from pi05.batch import Batch, Draws
from pi05.data.augment import Augmentation
from pi05.data.collate import BatchMaker, Task, allocate_private
from pi05.data.run_data import RunData
from pi05.errors import DataError

SAMPLES = 64  # observations, evenly spread over the held-out rows
NOISE_SEED = 20_251_201  # of noise and times; not the run's seed, so that runs compare


@dataclasses.dataclass(frozen=True)
class Score:
    """Errors on held-out episodes.

    loss: flow-matching loss. action_mse: mean squared error of sampled actions over real steps and the robot's dims, normalised.
    baseline_mse: the same for a policy that always gives the mean training action. joint_rmse: root mean squared error of each dim of
    the robot's own actions, by its name with unit. samples: observations.
    """

    loss: float
    action_mse: float
    baseline_mse: float
    joint_rmse: dict[str, float]
    samples: int

    @property
    def skill(self) -> float:
        """1 - action_mse / baseline_mse: 1 is perfect, 0 is the mean action."""
        return 1.0 - self.action_mse / self.baseline_mse

    def describe(self) -> str:
        """One line for a person."""
        joints = ", ".join(f"{name} {value:.3g}" for name, value in self.joint_rmse.items())
        return (
            f"action MSE {self.action_mse:.4f} ({100 * self.skill:.0f} % below the mean action's {self.baseline_mse:.4f}), loss {self.loss:.4f}, "
            f"RMSE {joints}; {self.samples} held-out observations"
        )


class Evaluation:
    """Held-out observations with their noise, read once and kept."""

    def __init__(self, data: RunData, *, samples: int = SAMPLES, batch_size: int | None = None):
        """Reads `samples` rows, or all if there are fewer, in batches of `batch_size` (default: the config's).

        Raises:
            DataError: nothing is held out, or a row cannot be read.
        """
        if data.holdout is None:
            raise DataError("There is nothing to evaluate on: data.holdout_episodes holds out no episode. Set it to 1 or more.")
        self._data, rows = data, np.unique(np.linspace(0, len(data.holdout) - 1, min(samples, len(data.holdout))).round().astype(np.int64))
        size = min(batch_size or data.config.batch_size, len(rows))
        rows = rows[: len(rows) // size * size]  # whole batches: a shorter one would compile again
        none: Augmentation = "none"
        maker = BatchMaker(data.holdout, data.pipeline, data.spec, NOISE_SEED, data.spec.max_token_len, none, data.pipeline.slots)
        self._batches: list[tuple[Batch, Draws]] = []
        for step, chunk in enumerate(rows.reshape(-1, size)):
            task = Task(step=step, epochs=np.zeros(size, np.int64), places=chunk, rows=chunk)
            self._batches.append(maker.make(task, allocate_private).open())
        robot = data.pipeline.robot
        self._robot_rows = [
            [{key: data.holdout[int(row)][key] for key in (robot.state_column, robot.action_column)} for row in chunk] for chunk in rows.reshape(-1, size)
        ]

    def __call__(self, backend: Backend, state: Any, num_steps: int = 10) -> Score:
        """Scores the weights that `state` would act with, sampling in `num_steps` Euler steps."""
        parts = [self._score_batch(backend, state, i, num_steps) for i in range(len(self._batches))]
        loss, squared, counted, baseline, robot_squared = (np.concatenate(part) for part in zip(*parts, strict=True))
        steps = counted.sum()
        dims = self._data.pipeline.robot.actions
        rmse = np.sqrt((robot_squared * counted[..., None]).sum((0, 1)) / steps)
        return Score(
            loss=float(loss.mean()),
            action_mse=float((squared * counted).sum() / steps),
            baseline_mse=float((baseline * counted).sum() / steps),
            joint_rmse={f"{dim.name} [{dim.unit}]": float(value) for dim, value in zip(dims, rmse, strict=True)},
            samples=len(loss),
        )

    def _score_batch(self, backend: Backend, state: Any, index: int, num_steps: int) -> tuple[np.ndarray, ...]:
        """Loss [B], squared error [B, A], counted steps [B, A], the baseline's error [B, A], squared error in the robot's units [B, A, D]."""
        batch, draws = self._batches[index]
        robot, pipeline = self._data.pipeline.robot, self._data.pipeline
        real = slice(0, len(robot.actions))
        actions = backend.sample_actions(state, batch.observation, draws.noise, num_steps)
        mean = pipeline.normalised_mean("actions")
        want = batch.actions[..., real]
        robot_error = [
            pipeline.inverse(chunk, row[robot.state_column]) - row[robot.action_column] for chunk, row in zip(actions, self._robot_rows[index], strict=True)
        ]
        return (
            np.asarray(backend.eval_step(state, batch, draws).per_sample),
            ((actions[..., real] - want) ** 2).mean(-1),
            ~batch.action_is_pad,
            ((mean - want) ** 2).mean(-1),
            np.square(robot_error),
        )
