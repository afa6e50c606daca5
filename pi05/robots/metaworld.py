"""Meta-World (simulated Sawyer), as scripts/record_metaworld.py records it: a step of the hand and a gripper command, 80 Hz.

The state is the hand's position and the share of the gripper's opening. The action is relative already, so nothing is subtracted.
"""

from pi05.robots.base import Dim, Robot

ROBOT = Robot(
    name="metaworld",
    cameras={"base_0_rgb": "observation.images.corner2", "left_wrist_0_rgb": "observation.images.gripperPOV"},
    state=(*(Dim(axis, "m", -1, 1, "position") for axis in "xyz"), Dim("gripper", "1", 0, 1, "gripper")),
    actions=(*(Dim(f"d{axis}", "1", -1, 1, "displacement") for axis in "xyz"), Dim("gripper", "1", -1, 1, "gripper")),
    fps=80,
)
