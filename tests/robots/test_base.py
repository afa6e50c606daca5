"""The Robot description: what it refuses, and what its messages say."""

import sys
from pathlib import Path

import numpy as np
import pytest

from pi05.errors import DataError
from pi05.robots import Dim, Robot, load_robot
from pi05.robots.base import pose_dims
from tests.robots.rows import make_row, random_rotation

JOINTS = tuple(Dim(f"joint_{i}", "rad", -3, 3, "joint") for i in range(3))
GRIPPER = Dim("gripper", "1", 0, 1, "gripper")
CAMERAS = {"base_0_rgb": "observation.images.front", "left_wrist_0_rgb": "observation.images.wrist"}


def arm(**changes: object) -> Robot:
    fields = {"name": "arm", "cameras": CAMERAS, "state": (*JOINTS, GRIPPER), "actions": (*JOINTS, GRIPPER), "fps": 10, "delta_kinds": ("joint",)}
    return Robot(**fields | changes)


def test_unknown_robot_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(DataError, match=r"no robot 'bi_flexi'.*Did you mean 'bi_flexiv'\?"):
        load_robot("bi_flexi")
    with pytest.raises(DataError, match="no robot 'base'"):
        load_robot("base")


@pytest.mark.parametrize("name", ["no_such_lab.arm", "tests.robots.no_such_arm"])
def test_unknown_module_is_an_error_that_says_where_it_is_looked_for(name: str) -> None:
    with pytest.raises(DataError, match=f"no module '{name}'.*Python path"):
        load_robot(name)


def test_a_module_without_a_robot_is_refused() -> None:
    with pytest.raises(DataError, match="must end in ROBOT"):
        load_robot("tests.robots.rows")


def test_a_private_robot_with_a_broken_import_shows_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_lab_arm").mkdir()
    (tmp_path / "broken_lab_arm" / "arm.py").write_text("import module_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="module_that_is_not_there"):
        load_robot("broken_lab_arm.arm")
    sys.modules.pop("broken_lab_arm", None)


def test_delta_is_subtracted_by_name_not_by_position() -> None:
    robot = arm(state=(GRIPPER, *JOINTS[::-1]))
    state, actions = np.array([0.5, 3, 2, 1], np.float32), np.full((2, 4), 10, np.float32)
    assert robot.actions_to_model(actions, state).tolist() == [[9, 8, 7, 10]] * 2


def test_integer_actions_become_deltas() -> None:
    row = make_row(arm(), 0) | {"action": np.full((2, 4), 3), "observation.state": np.array([1, 1, 1, 1])}
    row["action_is_pad"] = np.zeros(2, bool)
    assert arm().to_model(row)["actions"].tolist() == [[2, 2, 2, 3]] * 2


def test_a_delta_without_its_state_dim_is_refused() -> None:
    with pytest.raises(DataError, match="takes the action 'joint_2' relative to a state dim of that name, which it lacks; its state is joint_0, joint_1"):
        arm(state=JOINTS[:2])


@pytest.mark.parametrize("kind", ["velocity", "displacement"])
def test_steps_are_not_made_relative_twice(kind: str) -> None:
    dims = (Dim("x", "m", -1, 1, kind),)
    with pytest.raises(DataError, match=f"lists '{kind}' in delta_kinds, but such an action is a step already"):
        arm(state=dims, actions=dims, delta_kinds=(kind,))


def test_rotations_refuse_plain_subtraction_unless_it_is_asked_for_by_name() -> None:
    pose = pose_dims(reach=1)
    fields = {"state": pose, "actions": pose, "delta_kinds": ("position", "rotation6d")}
    with pytest.raises(DataError, match="rotations cannot be subtracted like lengths"):
        arm(**fields)
    assert arm(**fields, rotation_delta="plain").delta_mask.all()
    euler = tuple(Dim(axis, "rad", -4, 4, "rotation") for axis in ("roll", "pitch", "yaw"))
    fields = {"state": euler, "actions": euler, "delta_kinds": ("rotation",)}
    with pytest.raises(DataError, match="rotations cannot be subtracted like lengths"):
        arm(**fields)
    with pytest.raises(DataError, match="composes rotations that are not rotation6d"):
        arm(**fields, rotation_delta="relative")


def test_relative_rotation_is_the_turn_between_two_frames_and_plain_is_the_difference_of_the_numbers() -> None:
    pose, rng = pose_dims(reach=1), np.random.default_rng(0)
    state_matrix, turn = random_rotation(rng), random_rotation(rng)
    target_matrix = state_matrix @ turn

    def numbers(matrix: np.ndarray) -> np.ndarray:
        return np.array([0.1, 0.2, 0.3, *matrix[:, 0], *matrix[:, 1]], np.float32)

    state, action = numbers(state_matrix), numbers(target_matrix)[None]
    fields = {"state": pose, "actions": pose, "delta_kinds": ("position", "rotation6d")}
    relative = arm(**fields, rotation_delta="relative").actions_to_model(action, state)[0]
    assert np.allclose(relative, [0, 0, 0, *turn[:, 0], *turn[:, 1]], atol=1e-6)
    assert np.array_equal(arm(**fields, rotation_delta="plain").actions_to_model(action, state)[0], (action - state)[0])
    reordered = arm(**fields | {"state": (GRIPPER, *pose)}, rotation_delta="relative")
    assert np.allclose(reordered.actions_to_model(action, np.array([0.5, *state]))[0], relative, atol=1e-6), "found by name, not by position"
    moved = random_rotation(rng)  # another world frame
    again = arm(**fields, rotation_delta="relative").actions_to_model(numbers(moved @ target_matrix)[None], numbers(moved @ state_matrix))[0]
    assert np.allclose(again, relative, atol=1e-6)


def test_rotations_stay_absolute_where_their_kind_is_not_listed() -> None:
    pose = pose_dims(reach=1)
    robot = arm(state=pose, actions=pose, delta_kinds=("position",), rotation_delta="relative")
    row = make_row(robot, 0)
    assert np.array_equal(robot.to_model(row)["actions"][:, 3:], row["action"][:, 3:])


def test_a_misspelt_choice_is_refused_not_ignored() -> None:
    with pytest.raises(DataError, match="lists 'joints' in delta_kinds, but no action is of that kind.*Did you mean 'joint'"):
        arm(delta_kinds=("joints",))
    pose = pose_dims(reach=1)
    with pytest.raises(DataError, match="has rotation_delta 'relativ'; it is one of relative, plain"):
        arm(state=pose, actions=pose, delta_kinds=("rotation6d",), rotation_delta="relativ")


def test_a_rotation_of_five_numbers_is_refused() -> None:
    with pytest.raises(DataError, match="5 state dims of kind rotation6d in a row, tcp.r1, .*; a rotation has 6"):
        arm(state=pose_dims(reach=1)[:-1])


def test_a_chunk_that_names_no_rotation_never_reaches_the_robot() -> None:
    pose = pose_dims(reach=1)
    robot = arm(state=pose, actions=pose, delta_kinds=("rotation6d",), rotation_delta="relative")
    with pytest.raises(DataError, match="names no rotation"):
        robot.from_model(np.zeros((1, 9)), make_row(robot, 0)["observation.state"])


@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 1), (0, np.inf), (np.nan, 1)])
def test_limits_must_be_finite_and_ordered(low: float, high: float) -> None:
    with pytest.raises(DataError, match="Dim 'x' runs from"):
        Dim("x", "m", low, high, "position")


def test_an_unknown_kind_is_an_error_with_the_nearest() -> None:
    with pytest.raises(DataError, match="kind 'rotation_6d'.*Did you mean 'rotation6d'"):
        Dim("x", "1", 0, 1, "rotation_6d")


def test_doubled_names_and_doubled_cameras_are_refused() -> None:
    with pytest.raises(DataError, match="no name twice"):
        arm(actions=(GRIPPER, GRIPPER), delta_kinds=())
    with pytest.raises(DataError, match="reads the camera 'front' into two slots"):
        arm(cameras={"base_0_rgb": "front", "left_wrist_0_rgb": "front"})


def test_a_missing_camera_is_an_error_that_proposes_the_mapping() -> None:
    row = make_row(arm(), 4)
    row["observation.images.front_left"] = row.pop("observation.images.front")
    with pytest.raises(DataError) as caught:
        arm().to_model(row)
    for words in (
        "'observation.images.front' of sample 1004 is missing",
        "observation.images.wrist",
        "Did you mean 'observation.images.front_left'",
        "base_0_rgb: null",
    ):
        assert words in str(caught.value)


def test_a_camera_set_to_null_is_neither_read_nor_missed() -> None:
    row = make_row(arm(), 4)
    del row["observation.images.wrist"]
    robot = arm(cameras=CAMERAS | {"left_wrist_0_rgb": None})
    assert list(robot.cameras.values()) == ["observation.images.front"]
    assert list(robot.to_model(row)["images"]) == ["base_0_rgb"]


def test_a_misnamed_action_column_is_an_error_not_an_observation() -> None:
    row = make_row(arm(), 4)
    row["actions"] = row.pop("action")
    with pytest.raises(DataError, match="Column 'action' of sample 1004 is missing.*Did you mean 'actions'"):
        arm().to_model(row)


def test_another_number_of_dims_is_an_error_that_lists_the_names() -> None:
    row = make_row(arm(), 4) | {"observation.state": np.zeros(26)}
    with pytest.raises(DataError, match=r"observation.state of sample 1004 has shape \(26,\); robot 'arm' has the 4 dims joint_0, joint_1, joint_2, gripper"):
        arm().to_model(row)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_an_error_that_names_dim_and_sample(bad: float) -> None:
    row = make_row(arm(), 4)
    row["observation.state"][2] = bad
    with pytest.raises(DataError, match="observation.state dim 'joint_2' of sample 1004 is"):
        arm().to_model(row)
    row = make_row(arm(), 4)
    row["action"][3, 1] = bad
    with pytest.raises(DataError, match="action dim 'joint_1', step 3 of sample 1004 is"):
        arm().to_model(row)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_chunk_that_is_not_finite_never_reaches_the_robot(bad: float) -> None:
    actions = np.zeros((3, 4))
    actions[1, 3] = bad
    with pytest.raises(DataError, match="model's actions dim 'gripper', step 1 is"):
        arm().from_model(actions, np.zeros(4))


def test_values_in_the_wrong_unit_are_warned_of_with_a_hint() -> None:
    in_degrees = np.random.default_rng(0).uniform(-150, 150, (200, 4)) * [1, 1, 0.01, 0]
    lines = arm().limit_warnings(in_degrees)
    assert len(lines) == 2 and all("joint_" in line and "rad. They look like degrees." in line for line in lines)
    in_percent = np.linspace([0, 0, 0, 0], [0, 0, 0, 100], 50)
    assert "'gripper'" in arm().limit_warnings(in_percent)[0] and "They look like percent." in arm().limit_warnings(in_percent)[0]
    few = np.zeros((100, 4))
    few[:5, 0] = 9
    assert arm().limit_warnings(few) == []
    assert "Check the unit and the order of the dims." in arm().limit_warnings(in_degrees * 1000)[0]


def test_fingerprint_tells_apart_everything_that_changes_the_numbers() -> None:
    degrees = tuple(Dim(dim.name, "deg", -180, 180, dim.kind) for dim in JOINTS)
    variants = [
        arm(),
        arm(delta_kinds=()),
        arm(state=(*degrees, GRIPPER)),
        arm(actions=(*degrees, GRIPPER)),
        arm(actions=(GRIPPER, *JOINTS)),
        arm(action_column="action.joint"),
        load_robot("flexiv"),
        load_robot("flexiv").replace(rotation_delta="relative"),
    ]
    assert len({tuple(robot.fingerprint.items()) for robot in variants}) == len(variants)
    assert arm(cameras={"base_0_rgb": "front"}).fingerprint == arm().fingerprint


def test_the_clients_prompt_wins_over_the_default() -> None:
    observation = {"images": {"front": np.zeros((4, 4, 3), np.uint8), "wrist": np.zeros((4, 4, 3), np.uint8)}, "state": np.zeros(4)}
    assert arm().from_client(observation | {"prompt": "theirs"}, "ours")["task"] == "theirs"
    assert arm().from_client(observation, "ours")["task"] == "ours"
    with pytest.raises(DataError, match="client sent no 'prompt', and there is no default"):
        arm().from_client(observation)


def test_what_a_client_does_not_send_is_named_with_what_it_sends() -> None:
    observation = {"images": {"front": np.zeros((4, 4, 3), np.uint8), "wrst": np.zeros((4, 4, 3), np.uint8)}, "state": np.zeros(4), "prompt": "x"}
    with pytest.raises(DataError) as caught:
        arm().from_client(observation)
    for words in ("no 'images/wrist'", "images/front", "Did you mean 'images/wrst'", "left_wrist_0_rgb: null"):
        assert words in str(caught.value)
    with pytest.raises(DataError, match="no 'state'.*as the robot's state"):
        arm().from_client(
            {key: value for key, value in observation.items() if key != "state"}
            | {"images": {"front": np.zeros((4, 4, 3), np.uint8)} | {"wrist": np.zeros((4, 4, 3), np.uint8)}}
        )
