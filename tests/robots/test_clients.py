"""Observations as openpi's own clients send them, robot by robot."""

from typing import Any

import numpy as np
import pytest

from pi05.errors import DataError
from pi05.robots import load_robot
from tests.robots.rows import frozen

RNG = np.random.default_rng(0)


def picture(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, np.uint8)


def three_cameras(*names: str) -> dict[str, np.ndarray]:
    return {name: picture(3, 8, 10) for name in names}


ALOHA = {"state": RNG.random(14), "images": three_cameras("cam_high", "cam_left_wrist", "cam_right_wrist", "cam_low"), "prompt": "fold"}
DROID = {
    "observation/exterior_image_1_left": picture(8, 10, 3),
    "observation/wrist_image_left": picture(8, 10, 3),
    "observation/joint_position": RNG.random(7),
    "observation/gripper_position": 0.5,
    "prompt": b"put",
}
LIBERO = {"observation/image": picture(8, 10, 3), "observation/wrist_image": picture(8, 10, 3), "observation/state": RNG.random(8), "prompt": "put"}
UR5 = {"base_rgb": picture(8, 10, 3), "wrist_rgb": picture(8, 10, 3), "joints": RNG.random(6), "gripper": RNG.random(1), "prompt": "put"}
FLEXIV = {"state": RNG.random(10), "images": {"observation/wrist_image_left": picture(3, 8, 10)}, "prompt": "put"}
BI_FLEXIV = {"state": RNG.random(20), "images": three_cameras("head", "left_wrist", "right_wrist"), "images_raw": {}, "prompt": "put"}

CLIENTS = {
    "aloha": (ALOHA, ("images/cam_high", "images/cam_left_wrist", "images/cam_right_wrist"), 14),
    "droid": (DROID, ("observation/exterior_image_1_left", "observation/wrist_image_left"), 8),
    "libero": (LIBERO, ("observation/image", "observation/wrist_image"), 8),
    "ur5": (UR5, ("base_rgb", "wrist_rgb"), 7),
    "flexiv": (FLEXIV, ("images/observation/wrist_image_left",), 10),
    "bi_flexiv": (BI_FLEXIV, ("images/head", "images/left_wrist", "images/right_wrist"), 20),
}


def sent(observation: dict[str, Any], place: str) -> np.ndarray:
    image = observation[place] if place in observation else observation["images"][place.removeprefix("images/")]
    return image.transpose(1, 2, 0) if image.shape[0] == 3 else image


@pytest.mark.parametrize("name", CLIENTS)
def test_an_unmodified_clients_observation_is_understood(name: str) -> None:
    observation, places, dims = CLIENTS[name]
    robot = load_robot(name)
    out = robot.to_model(robot.from_client(frozen(observation)))
    assert out["state"].shape == (dims,)
    assert out["prompt"] == ("fold" if name == "aloha" else "put")
    for slot, place in zip(robot.cameras, places, strict=True):
        assert np.array_equal(out["images"][slot], sent(observation, place)), f"{slot} does not show {place}"


def test_state_parts_are_joined_in_order() -> None:
    row = load_robot("droid").from_client(DROID)
    assert np.allclose(row["observation.state"], [*DROID["observation/joint_position"], 0.5])


def test_a_float_image_of_a_client_becomes_uint8() -> None:
    observation = LIBERO | {"observation/image": LIBERO["observation/image"] / 255}
    assert np.array_equal(load_robot("libero").from_client(observation)["image"], LIBERO["observation/image"])
    with pytest.raises(DataError, match=r"image is float and runs from .*\[0, 1\]"):
        load_robot("libero").from_client(LIBERO | {"observation/image": LIBERO["observation/image"] / 127.5 - 1})


def test_a_camera_that_is_served_without_is_not_asked_for() -> None:
    robot = load_robot("aloha")
    robot = robot.replace(cameras=robot.cameras | {"right_wrist_0_rgb": None})
    observation = ALOHA | {"images": {name: image for name, image in ALOHA["images"].items() if name != "cam_right_wrist"}}
    assert set(robot.to_model(robot.from_client(observation))["images"]) == {"base_0_rgb", "left_wrist_0_rgb"}


@pytest.mark.parametrize(("name", "first"), [("aloha", True), ("libero", False)])
def test_where_the_shape_leaves_it_open_the_robot_says_where_a_clients_channels_are(name: str, first: bool) -> None:
    robot, image = load_robot(name), picture(3, 3, 3)
    observation = dict(CLIENTS[name][0])
    place = robot.client_cameras.get("base_0_rgb", "images/cam_high")
    observation = observation | ({place: image} if name == "libero" else {"images": observation["images"] | {"cam_high": image}})
    assert np.array_equal(robot.from_client(observation)[robot.cameras["base_0_rgb"]], image.transpose(1, 2, 0) if first else image)
