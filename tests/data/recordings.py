"""Small datasets for the tests: written by LeRobot itself, or by hand in the v2.1 layout (faster, and free to be wrong)."""

import dataclasses
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from pi05.spec import ModelSpec

FPS = 10
LENGTHS = (11, 14, 9)
TASKS = ("push the dot", "lift the dot", "push the dot")
CAMERAS = ("observation.images.front", "observation.images.wrist")
STATE_DIM, ACTION_DIM = 5, 4
EDGE = 64


@dataclasses.dataclass(frozen=True)
class TinyRobot:
    """What open_dataset needs to know of a robot."""

    name: str = "tiny"
    cameras: dict[str, str] = dataclasses.field(default_factory=lambda: {"base_0_rgb": CAMERAS[0], "left_wrist_0_rgb": CAMERAS[1]})
    state_column: str = "observation.state"
    action_column: str = "action"
    prompt_column: str = "task"
    fps: float | None = FPS


@dataclasses.dataclass(frozen=True)
class TinyPipeline:
    """Rows to samples with as little as possible; the second token says whether JAX is loaded in this process.

    fails_at: frame index at which it raises; hangs_at: at which it never returns.
    """

    spec: ModelSpec
    fails_at: int | None = None
    hangs_at: int | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        if row["index"] == self.fails_at:
            raise KeyError("gripper")
        while row["index"] == self.hangs_at:
            time.sleep(0.01)  # as on a hanging file system; spinning would starve the process that is to notice
        spec, edge = self.spec, self.spec.vision.image_size
        images = np.zeros((len(CAMERAS), edge, edge, 3), np.uint8)
        images[:, :EDGE, :EDGE] = np.stack([row[camera] for camera in CAMERAS])
        actions = np.zeros((spec.action_horizon, spec.action_dim), np.float32)
        actions[:, :ACTION_DIM] = row["action"]
        return {
            "images": images,
            "image_mask": np.ones(len(CAMERAS), bool),
            "tokens": np.array([2, int("jax" in sys.modules)] + [7] * (row["index"] % 20), np.int32),
            "actions": actions,
            "action_is_pad": row["action_is_pad"],
            "action_dim_is_pad": np.arange(spec.action_dim) >= ACTION_DIM,
            "sample_id": row["index"],
        }


def numbers(episode: int, frame: int) -> tuple[np.ndarray, np.ndarray]:
    """State and action of a frame: every value tells where it comes from."""
    tag = np.float32(100 * episode + frame)
    return tag + np.arange(STATE_DIM, dtype=np.float32) / 8, -tag - np.arange(ACTION_DIM, dtype=np.float32) / 8


def picture(episode: int, frame: int, camera: int) -> np.ndarray:
    """A frame whose number and episode can be read off after lossy coding: a white column at `frame` on the episode's gray."""
    image = np.full((EDGE, EDGE, 3), 40 * episode + 10 * camera, np.uint8)
    image[:, frame * 4 : frame * 4 + 4] = 255
    return image


def seen(image: np.ndarray) -> tuple[int, int]:
    """The episode and frame that `picture` drew."""
    gray = image[..., 1].astype(float).mean(0).reshape(-1, 4).mean(1)
    return int(np.median(gray) + 5) // 40, int(gray.argmax())


def where(lengths: tuple[int, ...] = LENGTHS) -> list[tuple[int, int]]:
    """Episode and frame of each row."""
    return [(episode, frame) for episode, length in enumerate(lengths) for frame in range(length)]


def write_with_lerobot(root: Path, *, video: bool) -> None:
    """A v3.0 dataset by LeRobot's recorder."""
    from lerobot.datasets import LeRobotDataset

    camera = {"dtype": "video" if video else "image", "shape": (EDGE, EDGE, 3), "names": ["height", "width", "channels"]}
    vectors = {"observation.state": STATE_DIM, "action": ACTION_DIM}
    features = dict.fromkeys(CAMERAS, camera) | {name: {"dtype": "float32", "shape": (dim,), "names": None} for name, dim in vectors.items()}
    dataset = LeRobotDataset.create("test/tiny", FPS, features, root=root, use_videos=video)
    for episode, length in enumerate(LENGTHS):
        for frame in range(length):
            state, action = numbers(episode, frame)
            images = {name: picture(episode, frame, camera) for camera, name in enumerate(CAMERAS)}
            dataset.add_frame(images | {"observation.state": state, "action": action, "task": TASKS[episode]})
        dataset.save_episode(parallel_encoding=False)
    dataset.finalize()


def write_by_hand(root: Path, *, video: bool = False, lengths: tuple[int, ...] = LENGTHS, fps: float = FPS, video_fps: int = FPS) -> None:
    """A v2.1 dataset with images in its tables, or videos beside them."""
    import pyarrow as pa
    import pyarrow.parquet

    (root / "meta").mkdir(parents=True)
    (root / "data/chunk-000").mkdir(parents=True)
    row = 0
    for episode, length in enumerate(lengths):
        values = [numbers(episode, frame) for frame in range(length)]
        table = {"observation.state": [state for state, _ in values], "action": [action for _, action in values]}
        for camera, name in enumerate(CAMERAS):
            pictures = [picture(episode, frame, camera) for frame in range(length)]
            if video:
                encode(root / f"videos/chunk-000/{name}/episode_{episode:06d}.mp4", pictures, video_fps)
            else:
                table[name] = [png(image) for image in pictures]
        table |= {
            "instruction": [f"{TASKS[episode]} {frame}" for frame in range(length)],
            "index": list(range(row, row + length)),
            "episode_index": [episode] * length,
            "task_index": [episode % 2] * length,
        }
        pyarrow.parquet.write_table(pa.table(table), root / f"data/chunk-000/episode_{episode:06d}.parquet")
        row += length
    features: dict[str, Any] = {name: {"dtype": "video" if video else "image", "shape": [EDGE, EDGE, 3]} for name in CAMERAS}
    features |= {"observation.state": {"dtype": "float32", "shape": [STATE_DIM]}, "action": {"dtype": "float32", "shape": [ACTION_DIM]}}
    features |= {name: {"dtype": "int64", "shape": [1]} for name in ("index", "episode_index", "task_index")}
    features["instruction"] = {"dtype": "string", "shape": [1]}
    paths = {
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }
    info = {"codebase_version": "v2.1", "fps": fps, "total_frames": row, "chunks_size": 1000, "features": features} | paths
    (root / "meta/info.json").write_text(json.dumps(info))
    write_lines(root / "meta/episodes.jsonl", [{"episode_index": episode, "length": length} for episode, length in enumerate(lengths)])
    write_lines(root / "meta/tasks.jsonl", [{"task_index": index, "task": TASKS[index]} for index in range(2)])


def encode(path: Path, pictures: list[np.ndarray], fps: int) -> None:
    """Writes an H.264 file with a key frame every 5th frame and B-frames between, so that decoding order is not showing order."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"g": "5", "bf": "2", "crf": "18"})
        stream.width, stream.height, stream.pix_fmt = EDGE, EDGE, "yuv420p"
        for image in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def change_json(path: Path, **values: Any) -> None:
    """Overwrites top-level fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def png(image: np.ndarray) -> dict[str, object]:
    """A cell of an image column."""
    buffer = io.BytesIO()
    PIL.Image.fromarray(image).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    """A file with a JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
