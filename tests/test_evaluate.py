"""Held-out evaluation: `python -m pi05.evaluate` gives what the run itself logged, in either backend."""

from pathlib import Path

import numpy as np
import pytest

from pi05.data.run_data import open_run_data
from pi05.errors import DataError
from pi05.evaluate import Evaluation, evaluate_checkpoint, main
from tests.training import Runs, small_config


def test_a_checkpoint_scores_what_its_run_logged(runs: Runs) -> None:
    run = runs.straight("torch")
    score, what = evaluate_checkpoint(run.folder)
    logged = run.evaluations[-1]["evaluation"]
    assert str(run.outcome.checkpoint) in what and "backend torch" in what
    scored = {"loss": score.loss, "action_mse": score.action_mse, "baseline_mse": score.baseline_mse}
    assert scored | {f"rmse {name}": value for name, value in score.joint_rmse.items()} == pytest.approx(logged, rel=1e-6)
    assert score.samples == 52  # of 55 held-out rows, whole batches of 4
    assert score.skill == 1 - score.action_mse / score.baseline_mse


def test_the_command_prints_the_score_of_the_other_backend_too(runs: Runs, capsys: pytest.CaptureFixture) -> None:
    run = runs.straight("torch")
    assert main([str(run.outcome.checkpoint), "--backend", "jax", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    logged = run.evaluations[-1]["evaluation"]
    assert "backend jax on CPU" in text and "52 held-out observations" in text
    assert float(text.partition("action MSE ")[2].split()[0]) == pytest.approx(logged["action_mse"], abs=1e-4)  # four decimals are printed
    assert all(name in text for name in ("dx [1]", "dy [1]", "dz [1]", "gripper [1]"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Which checkpoint?"),
        (["{run}", "--backend", "numpy"], "backend"),
        (["{run}", "--data.holdout_episodes", "0"], "data.holdout_episodes holds out no episode"),
        (["{empty}"], "neither a checkpoint"),
        (["{converted}"], "has no config.yaml"),
    ],
)
def test_what_cannot_be_scored_is_an_error(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture, arguments: list[str], message: str) -> None:
    for name in ("empty", "converted"):
        (tmp_path / name).mkdir()
    (tmp_path / "converted" / "checkpoint.json").write_text("{}")
    places = {"run": runs.straight("torch").folder, "empty": tmp_path / "empty", "converted": tmp_path / "converted"}
    assert main([argument.format(**places) for argument in arguments]) == 1
    assert message in capsys.readouterr().out


def test_the_baseline_is_the_mean_training_action_and_a_perfect_policy_has_no_error(tmp_path: Path) -> None:
    data = open_run_data(small_config(tmp_path))

    class Oracle:
        """Knows the actions: of the observation that it is shown."""

        def __init__(self, evaluation: Evaluation) -> None:
            self.answers = iter([batch for batch, _ in evaluation.batches])

        def sample_actions(self, state: None, observation: object, noise: np.ndarray, num_steps: int) -> np.ndarray:
            self.batch = next(self.answers)
            assert self.batch.observation is observation
            return self.batch.actions

        def eval_step(self, state: None, batch: object, draws: object) -> object:
            import pi05.batch

            return pi05.batch.LossParts(np.zeros(len(self.batch.actions)), np.zeros(11))

    evaluation = Evaluation(data, samples=8)
    score = evaluation(Oracle(evaluation), None)
    assert score.action_mse == 0 and score.skill == 1 and score.samples == 8
    assert max(score.joint_rmse.values()) < 1e-6
    batches = [batch for batch, _ in evaluation.batches]
    real = np.concatenate([batch.actions[~batch.action_is_pad][:, :4] for batch in batches])
    assert score.baseline_mse == pytest.approx(np.mean((real - data.pipeline.normalised_mean("actions")) ** 2), rel=1e-6)


def test_nothing_held_out_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="data.holdout_episodes holds out no episode"):
        Evaluation(open_run_data(small_config(tmp_path, data__holdout_episodes="0")))
