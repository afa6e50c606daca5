"""Dobot Nova5, one arm under joint control: six joints in degrees and the gripper (0 closed, 1 open), 30 Hz.

Its one wrist camera takes the right wrist's slot: the arm is the right one of the pair in dobot_nova5_dual.py.
"""

from pi05.robots.base import Dim, Robot

LIMITS = (360, 180, 160, 360, 360, 360)  # degrees to both sides


def joint_dims(side: str = "") -> tuple[Dim, ...]:
    """The six joints of an arm; `side` is "", "left_" or "right_"."""
    return tuple(Dim(f"{side}joint_{i}.pos", "deg", -limit, limit, "joint") for i, limit in enumerate(LIMITS, 1))


DIMS = (*joint_dims(), Dim("gripper.pos", "1", 0, 1, "gripper"))

ROBOT = Robot(
    name="dobot_nova5",
    cameras={"base_0_rgb": "observation.images.head", "right_wrist_0_rgb": "observation.images.wrist"},
    state=DIMS,
    actions=DIMS,
    fps=30,
    delta_kinds=("joint",),
    client_layout="CHW",
)
