"""UR5e with a gripper: six joint targets relative to the state, gripper absolute (0 open, 1 closed), 20 Hz."""

import math

from pi05.robots.base import Dim, Robot

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")
DIMS = (*(Dim(name, "rad", -2 * math.pi, 2 * math.pi, "joint") for name in JOINTS), Dim("gripper", "1", 0, 1, "gripper"))

ROBOT = Robot(
    name="ur5",
    cameras={"base_0_rgb": "observation.images.base", "left_wrist_0_rgb": "observation.images.wrist"},
    state=DIMS,
    actions=DIMS,
    fps=20,
    delta_kinds=("joint",),
    client_cameras={"base_0_rgb": "base_rgb", "left_wrist_0_rgb": "wrist_rgb"},
    client_state=("joints", "gripper"),
)
