"""Two Dobot Nova5 arms under joint control, 14-D: all left joints, all right joints, then both grippers (0 closed, 1 open), 30 Hz."""

from pi05.robots.base import Dim, Robot
from pi05.robots.dobot_nova5 import joint_dims

DIMS = (*joint_dims("left_"), *joint_dims("right_"), *(Dim(f"{side}_gripper.pos", "1", 0, 1, "gripper") for side in ("left", "right")))

ROBOT = Robot(
    name="dobot_nova5_dual",
    cameras={
        "base_0_rgb": "observation.images.head",
        "left_wrist_0_rgb": "observation.images.left_wrist",
        "right_wrist_0_rgb": "observation.images.right_wrist",
    },
    state=DIMS,
    actions=DIMS,
    fps=30,
    delta_kinds=("joint",),
    client_layout="CHW",
)
