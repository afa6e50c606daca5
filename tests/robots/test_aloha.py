"""ALOHA's conversion to Pi0's space, against numbers worked out by hand."""

import math

import numpy as np

from pi05.robots import load_robot

ROBOT = load_robot("aloha")
STATE = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.0], np.float32)


def test_shoulders_and_elbows_are_flipped_in_state_and_action() -> None:
    flipped = [0.1, -0.2, -0.3, 0.4, 0.5, 0.6], [1.1, -1.2, -1.3, 1.4, 1.5, 1.6]
    state = ROBOT.state_to_model(STATE)
    assert np.allclose([state[:6], state[7:13]], flipped)
    actions = ROBOT.replace(delta_kinds=()).actions_to_model(STATE[None], STATE)[0]
    assert np.allclose([actions[:6], actions[7:13]], flipped)


def test_a_grippers_opening_becomes_the_angle_of_the_crank() -> None:
    closed = math.asin((0.022**2 + 0.01844**2 - 0.036**2) / (2 * 0.022 * 0.01844))
    wide = math.pi / 2  # at 0.058 m = horn + arm the crank is stretched
    want = [(angle - 0.5476) / (1.6296 - 0.5476) for angle in (closed, wide)]
    assert np.allclose(ROBOT.state_to_model(STATE)[[6, 13]], want, atol=1e-6)
    assert np.allclose(want, [-1.0799, 0.9457], atol=5e-4)


def test_a_grippers_action_becomes_an_angle_and_is_not_relative() -> None:
    actions = np.stack([STATE, STATE])
    assert np.allclose(ROBOT.actions_to_model(actions, STATE)[:, [6, 13]], [[-0.6213 - 0.5476, 1.4910 - 0.5476]] * 2)


def test_joint_deltas_are_taken_between_flipped_joints() -> None:
    moved = STATE + np.float32(0.25)
    delta = ROBOT.actions_to_model(moved[None], STATE)[0]
    assert np.allclose(delta[:6], [0.25, -0.25, -0.25, 0.25, 0.25, 0.25], atol=1e-6)
    assert np.allclose(ROBOT.from_model(delta[None], STATE), moved, atol=1e-6)


def test_a_gripper_beyond_its_travel_gives_a_finite_state() -> None:
    for value in (-0.1, -0.01844 / (0.05800 - 0.01844), 1.2):
        assert np.isfinite(ROBOT.state_to_model(np.full(14, value))).all()
