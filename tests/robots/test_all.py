"""Every robot of the folder: a new file is tested without a new test."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi05.robots import Robot, load_robot, robot_names
from pi05.spec import CAMERA_SLOTS
from tests.robots.rows import frozen, make_row

SEEDS = st.integers(0, 2**32 - 1)
# What openpi's and the fork's recipes subtract (+n: n dims relative, -n: n dims as they are), written down from their facts, not from ours.
DELTAS = {
    "aloha": (6, -1, 6, -1),
    "bi_flexiv": (18, -1, -1),
    "dobot_nova5": (6, -1),
    "dobot_nova5_dual": (12, -2),
    "droid": (-8,),
    "droid_joint_position": (7, -1),
    "flexiv": (9, -1),
    "libero": (-7,),
    "metaworld": (-4,),
    "so100": (5, -1),
    "ur5": (6, -1),
    "xtac_umi": (9, -1),
}

each_robot = pytest.mark.parametrize("robot", [pytest.param(load_robot(name), id=name) for name in robot_names()])


def both_rotations(robot: Robot) -> list[Robot]:
    """The robot, and if it subtracts rotations plainly, also with composed ones."""
    return [robot, robot.replace(rotation_delta="relative")] if robot.rotation_delta == "plain" else [robot]


def test_the_folder_is_the_registry() -> None:
    assert set(robot_names()) == set(DELTAS), "a new robot? say in DELTAS which of its actions are relative"
    assert all(load_robot(name).name == name for name in robot_names())


@each_robot
def test_delta_mask_follows_the_published_recipe(robot: Robot) -> None:
    assert robot.delta_mask.tolist() == [run > 0 for run in DELTAS[robot.name] for _ in range(abs(run))]


@each_robot
def test_slots_are_the_models(robot: Robot) -> None:
    assert robot.cameras and set(robot.cameras) <= set(CAMERA_SLOTS) and set(robot.client_cameras) <= set(robot.cameras)


@each_robot
def test_every_dim_has_a_name_a_unit_and_limits_and_grippers_are_never_relative(robot: Robot) -> None:
    for dim in (*robot.state, *robot.actions):
        assert dim.name and dim.unit in {"rad", "deg", "m", "%", "1"} and dim.low < dim.high
    assert robot.gripper_dims and not robot.delta_mask[list(robot.gripper_dims)].any()


@each_robot
@given(seed=SEEDS)
@settings(max_examples=20, deadline=None, derandomize=True)
def test_actions_return_from_the_model_as_they_went(robot: Robot, seed: int) -> None:
    for variant in both_rotations(robot):
        row = make_row(variant, seed)
        out = variant.to_model(row)
        assert out["actions"].dtype == out["state"].dtype == np.float32
        back = variant.from_model(out["actions"], row[variant.state_column])
        span = [dim.high - dim.low for dim in variant.actions]
        assert np.abs((back - row[variant.action_column]) / span).max() < 1e-6


@each_robot
def test_reading_a_row_twice_gives_the_same_and_changes_nothing(robot: Robot) -> None:
    for variant in both_rotations(robot):
        row = frozen(make_row(variant, 7))
        first, second = variant.to_model(row), variant.to_model(row)
        np.testing.assert_equal(first, second)
        actions, state = first["actions"].copy(), row[variant.state_column]
        actions.flags.writeable = False
        assert np.array_equal(variant.from_model(actions, state), variant.from_model(actions, state))


@each_robot
def test_a_batch_of_numbers_is_converted_like_its_rows(robot: Robot) -> None:
    for variant in both_rotations(robot):
        rows = [make_row(variant, seed) for seed in range(4)]
        state, actions = (np.stack([row[column] for row in rows]) for column in (variant.state_column, variant.action_column))
        out = [variant.to_model(row) for row in rows]
        assert np.array_equal(variant.state_to_model(state), np.stack([sample["state"] for sample in out]))
        assert np.allclose(variant.actions_to_model(actions, state), np.stack([sample["actions"] for sample in out]), rtol=0, atol=1e-6)


@each_robot
def test_a_row_becomes_images_by_slot_numbers_and_a_prompt(robot: Robot) -> None:
    row = make_row(robot, 5)
    out = robot.to_model(row)
    assert out["prompt"] == row[robot.prompt_column] and out["sample_id"] == 1005 and out["action_is_pad"].tolist() == row["action_is_pad"].tolist()
    assert list(out["images"]) == list(robot.cameras)
    assert all(np.array_equal(out["images"][slot], row[column]) for slot, column in robot.cameras.items())


@each_robot
def test_a_row_without_actions_is_an_observation(robot: Robot) -> None:
    row = {key: value for key, value in make_row(robot, 5).items() if key in (*robot.cameras.values(), robot.state_column, robot.prompt_column)}
    assert set(robot.to_model(row)) == {"images", "state", "prompt"}


@each_robot
def test_limits_hold_for_values_within_and_warn_for_values_beyond(robot: Robot) -> None:
    row = make_row(robot, 1, horizon=50)
    assert robot.limit_warnings(row[robot.action_column]) == robot.limit_warnings(row[robot.state_column], "state") == []
    beyond = np.array([2 * max(abs(dim.low), abs(dim.high)) for dim in robot.actions])
    assert len(robot.limit_warnings(beyond)) == len(robot.actions)


@each_robot
def test_a_robot_travels_to_a_worker_process(robot: Robot) -> None:
    robot.to_model(make_row(robot, 1))
    assert pickle.loads(pickle.dumps(robot)) == robot
