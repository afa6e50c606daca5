"""SO-100 and SO-101 as LeRobot records them with use_degrees: five joints in degrees, the gripper in percent of its travel, 30 Hz.

Datasets recorded without use_degrees hold -100..100 instead: give them a robot file of their own.
"""

from pi05.robots.base import Dim, Robot

JOINTS = (("shoulder_pan", 110), ("shoulder_lift", 100), ("elbow_flex", 97), ("wrist_flex", 95), ("wrist_roll", 180))
DIMS = (*(Dim(f"{name}.pos", "deg", -limit, limit, "joint") for name, limit in JOINTS), Dim("gripper.pos", "%", 0, 100, "gripper"))

ROBOT = Robot(
    name="so100",
    cameras={"base_0_rgb": "observation.images.base", "left_wrist_0_rgb": "observation.images.wrist"},
    state=DIMS,
    actions=DIMS,
    fps=30,
    delta_kinds=("joint",),
)
