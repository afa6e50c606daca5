"""DROID, a Franka Panda: joint velocities and a gripper position, 15 Hz; the action space of the published pi05_droid.

A velocity is a step already, so nothing is subtracted. droid_joint_position.py is the same arm with joint targets.
"""

from pi05.robots.base import Dim, Robot

LIMITS = ((-2.8973, 2.8973), (-1.7628, 1.7628), (-2.8973, 2.8973), (-3.0718, -0.0698), (-2.8973, 2.8973), (-0.0175, 3.7525), (-2.8973, 2.8973))
GRIPPER = Dim("gripper_position", "1", 0, 1, "gripper")  # 0 open, 1 closed
STATE = (*(Dim(f"joint_position_{i}", "rad", low, high, "joint") for i, (low, high) in enumerate(LIMITS)), GRIPPER)

ROBOT = Robot(
    name="droid",
    cameras={"base_0_rgb": "observation.images.exterior_1_left", "left_wrist_0_rgb": "observation.images.wrist_left"},
    state=STATE,
    actions=(*(Dim(f"joint_velocity_{i}", "1", -1, 1, "velocity") for i in range(7)), GRIPPER),  # shares of DROID's top speed
    fps=15,
    client_cameras={"base_0_rgb": "observation/exterior_image_1_left", "left_wrist_0_rgb": "observation/wrist_image_left"},
    client_state=("observation/joint_position", "observation/gripper_position"),
)
