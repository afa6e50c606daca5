"""A checkpoint as a policy: the same actions from both backends, before and after a conversion."""

from pathlib import Path

import numpy as np
import pytest

from pi05.convert import Options, convert
from pi05.data.run_data import open_run_data
from pi05.errors import CheckpointError
from pi05.policy import Policy, load_policy
from pi05.spec import Compute
from tests.training import Runs

LIMIT = 1e-5  # float32, of the largest action


@pytest.fixture(scope="module")
def rows(runs: Runs) -> list[dict]:
    data = open_run_data(runs.straight("torch").config)
    return [data.holdout[0], data.holdout[20]]


@pytest.fixture(scope="module")
def actions(runs: Runs, rows: list[dict]) -> dict[str, np.ndarray]:
    """Of one checkpoint, by backend."""
    return {name: load_policy(runs.straight("torch").folder, backend=name, device="cpu").infer_rows(rows, [3, 4]) for name in ("jax", "torch")}


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.abs(a - b).max() <= LIMIT * np.abs(b).max())


def test_both_backends_give_the_same_actions(actions: dict[str, np.ndarray]) -> None:
    assert actions["jax"].shape == (2, 8, 4) and np.isfinite(actions["jax"]).all()
    assert same(actions["jax"], actions["torch"])
    assert np.abs(actions["jax"][0] - actions["jax"][1]).max() > 0.01


def test_equal_seed_and_index_give_equal_noise_and_others_do_not(runs: Runs, rows: list[dict], actions: dict[str, np.ndarray]) -> None:
    policy = load_policy(runs.straight("torch").outcome.checkpoint, device="cpu")
    assert policy.backend.name == "torch" and policy.config.exp_name == "torch"  # what trained it
    assert same(policy.infer_rows(rows, [3, 4]), actions["torch"])
    assert not np.allclose(policy.infer_rows(rows, [5, 4])[0], actions["torch"][0])
    other = load_policy(runs.straight("torch").folder, device="cpu", seed=1)
    assert not np.allclose(other.infer_rows(rows, [3, 4])[0], actions["torch"][0])


def test_the_policy_acts_with_the_moving_average(runs: Runs, rows: list[dict], actions: dict[str, np.ndarray]) -> None:
    run = runs.straight("torch")
    policy = load_policy(run.folder, device="cpu")

    def act(params: dict[str, np.ndarray]) -> np.ndarray:
        return Policy(policy.backend, policy.backend.init_policy(params.items()), policy.pipeline, policy.config).infer_rows(rows, [3, 4])

    state = run.state()
    assert same(act(state.served_params()), actions["torch"]) and not np.allclose(act(state.params), actions["torch"])


def test_a_converted_checkpoint_acts_like_its_run(runs: Runs, rows: list[dict], actions: dict[str, np.ndarray], tmp_path: Path) -> None:
    convert(str(runs.straight("torch").folder), tmp_path / "converted", "pi05")
    assert not (tmp_path / "converted" / "config.yaml").exists()
    policy = load_policy(tmp_path / "converted", backend="torch", device="cpu", compute=Compute("float32"))
    assert policy.config is None and policy.pipeline.robot.name == "metaworld"
    assert same(policy.infer_rows(rows, [3, 4]), actions["torch"])


def test_a_converted_checkpoint_without_what_a_robot_needs_is_refused(runs: Runs, tmp_path: Path) -> None:
    convert(str(runs.straight("torch").folder), tmp_path / "weights", "pi05", Options(weights_only=True))
    with pytest.raises(CheckpointError, match="does not say its norm_stats, tokenizer, robot"):
        load_policy(tmp_path / "weights", device="cpu")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_policy(tmp_path / "nowhere")
