"""How good a policy is on episodes that it was not trained on, without a robot.

    python -m pi05.evaluate CHECKPOINT [--backend jax|torch] [--device auto|cpu|cuda] [--any.field value]

CHECKPOINT is a run or one of its checkpoints; fields are those of its config, such as --data.datasets.0.path where the data have moved.
Action chunks are sampled from the same observations and the same noise every time, so two evaluations differ by the weights alone.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.console

from pi05.backend import Backend, load_backend
from pi05.batch import Batch, Draws
from pi05.checkpoint import load_params, locate_checkpoint
from pi05.config import get_config
from pi05.config_cli import split_arguments
from pi05.data.collate import BatchMaker, Sample, Task, allocate_private
from pi05.data.norm_stats import NormStats
from pi05.data.run_data import RunData, open_run_data
from pi05.errors import CheckpointError, ConfigError, DataError, Pi05Error

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
    """Held-out observations with their noise, read once and kept.

    batches: these, in the order in which they are scored.
    """

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
        robot = data.pipeline.robot
        self._robot_rows: list[dict[str, np.ndarray]] = []  # the robot's own numbers of each observation, in the order of the batches

        def read(row: Mapping[str, Any]) -> Sample:
            self._robot_rows.append({key: row[key] for key in (robot.state_column, robot.action_column)})
            return data.pipeline(row)

        maker = BatchMaker(data.holdout, read, data.spec, NOISE_SEED, data.spec.max_token_len, cameras=data.pipeline.slots)
        self.batches: list[tuple[Batch, Draws]] = []
        for step, chunk in enumerate(rows.reshape(-1, size)):
            task = Task(step=step, epochs=np.zeros(size, np.int64), places=chunk, rows=chunk)
            self.batches.append(maker.make(task, allocate_private).open())

    def __call__(self, backend: Backend, state: Any, num_steps: int = 10) -> Score:
        """Scores the weights that `state` would act with, sampling in `num_steps` Euler steps."""
        parts = [self._score_batch(backend, state, i, num_steps) for i in range(len(self.batches))]
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
        batch, draws = self.batches[index]
        robot, pipeline = self._data.pipeline.robot, self._data.pipeline
        real = slice(0, len(robot.actions))
        actions = backend.sample_actions(state, batch.observation, draws.noise, num_steps)
        mean = pipeline.normalised_mean("actions")
        want = batch.actions[..., real]
        rows = self._robot_rows[index * len(actions) : (index + 1) * len(actions)]
        robot_error = [pipeline.inverse(chunk, row[robot.state_column]) - row[robot.action_column] for chunk, row in zip(actions, rows, strict=True)]
        return (
            np.asarray(backend.eval_step(state, batch, draws).per_sample),
            ((actions[..., real] - want) ** 2).mean(-1),
            ~batch.action_is_pad,
            ((mean - want) ** 2).mean(-1),
            np.square(robot_error),
        )


def evaluate_checkpoint(checkpoint: Path, overrides: Mapping[str, str] | None = None) -> tuple[Score, str]:
    """Scores a checkpoint on its run's held-out episodes; also returns a line that says what was scored where.

    overrides: fields of the run's config, {"backend": "torch"}; statistics and tokenizer are always the checkpoint's.

    Raises:
        CheckpointError: there is no whole checkpoint, or it is not of a run.
        ConfigError, DataError, SpecError: its config or its data do not fit this release or this machine, or nothing is held out.
    """
    folder = locate_checkpoint(checkpoint)
    if not (folder / "config.yaml").is_file():
        raise CheckpointError(f"{folder} has no config.yaml, so nothing says which episodes to evaluate it on. Give a training run or one of its checkpoints.")
    config = get_config(str(folder / "config.yaml"), {"data.tokenizer": str((folder / "tokenizer.model").absolute()), **(overrides or {})})
    backend = load_backend(config.backend, config.spec(), config.compute, config.recipe(), device=config.device)
    evaluation = Evaluation(open_run_data(config, NormStats.load(folder / "norm_stats.json")))
    score = evaluation(backend, backend.init_policy(load_params(folder, config.spec())))
    return score, f"{folder}; backend {backend.name} on {backend.describe()}"


def main(arguments: Sequence[str]) -> int:
    """`python -m pi05.evaluate`; returns the exit code: 0, or 1 after an error that has been printed."""
    console = rich.console.Console(highlight=False, markup=False, soft_wrap=True)
    if set(arguments) & {"-h", "--help"}:
        console.print(__doc__.strip())
        return 0
    try:
        checkpoint, overrides, _ = split_arguments(arguments)
        if checkpoint is None:
            raise ConfigError("Which checkpoint? Give a run or one of its checkpoints: python -m pi05.evaluate CHECKPOINT.")
        score, what = evaluate_checkpoint(Path(checkpoint), overrides)
    except Pi05Error as error:
        console.print(f"error: {error}", style="bold red")
        return 1
    console.print(f"{what}\n{score.describe()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
