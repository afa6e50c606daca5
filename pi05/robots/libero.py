"""LIBERO (simulated Panda, operational-space control): actions are steps already, 10 Hz; columns of the dataset that openpi converted.

openpi's pi05_libero was trained without the state in the prompt: load_tokenizer(..., discrete_state=False). Its client turns images by 180 degrees.
"""

from pi05.robots.base import Dim, Robot

ROBOT = Robot(
    name="libero",
    cameras={"base_0_rgb": "image", "left_wrist_0_rgb": "wrist_image"},
    state=(
        *(Dim(f"eef_{axis}", "m", -2, 2, "position") for axis in "xyz"),
        *(Dim(f"eef_axis_angle_{axis}", "rad", -6.3, 6.3, "rotation") for axis in "xyz"),
        *(Dim(f"finger_{side}", "m", -0.05, 0.05, "gripper") for side in ("left", "right")),
    ),
    actions=(
        *(Dim(f"delta_{axis}", "1", -1, 1, "displacement") for axis in "xyz"),
        *(Dim(f"delta_{axis}", "1", -1, 1, "displacement") for axis in ("roll", "pitch", "yaw")),
        Dim("gripper", "1", -1, 1, "gripper"),  # -1 opens, 1 closes
    ),
    fps=10,
    state_column="state",
    action_column="actions",
    client_cameras={"base_0_rgb": "observation/image", "left_wrist_0_rgb": "observation/wrist_image"},
    client_state=("observation/state",),
)
