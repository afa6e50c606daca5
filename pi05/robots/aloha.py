"""ALOHA, two ViperX 300 arms: 14-D joints and grippers, 50 Hz, converted to the space that Pi0 was pre-trained in (openpi's adapt_to_pi)."""

import numpy as np

from pi05.robots.base import Dim, Robot

JOINTS = (
    ("waist", -3.14158, 3.14158),
    ("shoulder", -1.85005, 1.25664),
    ("elbow", -1.76278, 1.60570),
    ("forearm_roll", -3.14158, 3.14158),
    ("wrist_angle", -1.86750, 2.23402),
    ("wrist_rotate", -3.14158, 3.14158),
)
FLIPS = np.array([1, -1, -1, 1, 1, 1, 1] * 2)  # Pi0's shoulders and elbows turn the other way
GRIPPERS = [6, 13]
OPENING = (0.01844, 0.05800)  # m between the fingers at gripper 0 and 1 of an ALOHA observation
ARM, HORN = 0.036, 0.022  # m, the crank that turns the servo's angle into the opening
PI_ANGLES = (0.5476, 1.6296)  # rad, Pi0's gripper 0 and 1
ACTION_ANGLES = (-0.6213, 1.4910)  # rad, gripper 0 and 1 of an ALOHA action


class Aloha(Robot):
    """Joint signs and gripper units of Pi0's pre-training; deltas are taken after this conversion."""

    def state_to_model(self, state: np.ndarray) -> np.ndarray:
        """Returns the model's state: joints flipped, grippers from opening to the share of Pi0's angles."""
        out = np.asarray(state, np.float64) * FLIPS
        opening = out[..., GRIPPERS] * (OPENING[1] - OPENING[0]) + OPENING[0]
        with np.errstate(divide="ignore", invalid="ignore"):
            angle = np.arcsin(np.clip((HORN**2 + opening**2 - ARM**2) / (2 * HORN * opening), -1, 1))
        out[..., GRIPPERS] = (angle - PI_ANGLES[0]) / (PI_ANGLES[1] - PI_ANGLES[0])
        return super().state_to_model(out)

    def actions_to_model(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Returns the model's actions: joints flipped, grippers to angles above Pi0's zero, then deltas."""
        out = np.asarray(actions, np.float64) * FLIPS
        out[..., GRIPPERS] = out[..., GRIPPERS] * (ACTION_ANGLES[1] - ACTION_ANGLES[0]) + ACTION_ANGLES[0] - PI_ANGLES[0]
        return super().actions_to_model(out, state)

    def from_model(self, actions: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Returns the robot's actions; inverse of actions_to_model."""
        out = super().from_model(actions, state).astype(np.float64)
        out[..., GRIPPERS] = (out[..., GRIPPERS] + PI_ANGLES[0] - ACTION_ANGLES[0]) / (ACTION_ANGLES[1] - ACTION_ANGLES[0])
        return (out * FLIPS).astype(np.float32)


DIMS = tuple(
    dim
    for side in ("left", "right")
    for dim in (*(Dim(f"{side}_{name}", "rad", low, high, "joint") for name, low, high in JOINTS), Dim(f"{side}_gripper", "1", 0, 1, "gripper"))
)

ROBOT = Aloha(
    name="aloha",
    cameras={
        "base_0_rgb": "observation.images.cam_high",
        "left_wrist_0_rgb": "observation.images.cam_left_wrist",
        "right_wrist_0_rgb": "observation.images.cam_right_wrist",
    },
    state=DIMS,
    actions=DIMS,
    fps=50,
    delta_kinds=("joint",),
    client_layout="CHW",
)
