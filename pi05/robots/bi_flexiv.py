"""Two Flexiv Rizon 4 arms under Cartesian control, 20-D: left pose, right pose, then both grippers (so these are dims 18 and 19).

Published recipes subtract the rotations' numbers plainly; set rotation_delta="relative" for a fresh model. Setups run at 20 to 60 Hz, so
the dataset's rate decides.
"""

from pi05.robots.base import Dim, Robot, pose_dims

DIMS = (
    *pose_dims("left_tcp", reach=1.5),
    *pose_dims("right_tcp", reach=1.5),
    *(Dim(f"{side}_gripper.pos", "1", 0, 1, "gripper") for side in ("left", "right")),
)

ROBOT = Robot(
    name="bi_flexiv",
    cameras={
        "base_0_rgb": "observation.images.head",
        "left_wrist_0_rgb": "observation.images.left_wrist",
        "right_wrist_0_rgb": "observation.images.right_wrist",
    },
    state=DIMS,
    actions=DIMS,
    fps=None,
    delta_kinds=("position", "rotation6d"),
    rotation_delta="plain",
    client_layout="CHW",
)
