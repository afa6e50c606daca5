"""XTac-UMI, one hand-held tactile gripper: tool pose in the tracker's world frame and jaw (0 closed, 1 open), 10-D, wrist camera, 30 Hz.

Its tactile views (observation.images.tactile_left, .tactile_right) are left out: no published checkpoint has seen them. To try one:
ROBOT.replace(cameras=ROBOT.cameras | {"right_wrist_0_rgb": "observation.images.tactile_left"}).
Published recipes subtract the rotation's numbers plainly; rotation_delta="relative" makes rotations independent of the world frame.
"""

from pi05.robots.base import Dim, Robot, pose_dims

DIMS = (*pose_dims(reach=3), Dim("gripper.pos", "1", 0, 1, "gripper"))

ROBOT = Robot(
    name="xtac_umi",
    cameras={"left_wrist_0_rgb": "observation.images.wrist_cam"},
    state=DIMS,
    actions=DIMS,
    fps=30,
    delta_kinds=("position", "rotation6d"),
    rotation_delta="plain",
    client_cameras={"left_wrist_0_rgb": "images/observation/wrist_image_left"},
    client_layout="CHW",
)
