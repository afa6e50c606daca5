"""Flexiv Rizon 4, one arm under Cartesian control: tool pose (metres and rotation6d) and gripper, 10-D, one wrist camera.

Published recipes subtract the rotation's numbers plainly; set rotation_delta="relative" for a fresh model. Setups run at 20 to 60 Hz, so
the dataset's rate decides.
"""

from pi05.robots.base import Dim, Robot, pose_dims

DIMS = (*pose_dims(reach=1.5), Dim("gripper.pos", "1", 0, 1, "gripper"))

ROBOT = Robot(
    name="flexiv",
    cameras={"left_wrist_0_rgb": "observation.images.wrist_cam"},
    state=DIMS,
    actions=DIMS,
    fps=None,
    delta_kinds=("position", "rotation6d"),
    rotation_delta="plain",
    client_cameras={"left_wrist_0_rgb": "images/observation/wrist_image_left"},
    client_layout="CHW",
)
