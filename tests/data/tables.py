"""Small v3.0 datasets of numbers alone, and a robot to read them with."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from pi05.robots import Dim, Robot

DIMS = tuple(Dim(f"joint_{i}", "rad", -10, 10, "joint") for i in range(3))
GRIPPER = Dim("gripper", "1", 0, 1, "gripper")
ARM = Robot(name="arm", cameras={}, state=(*DIMS, GRIPPER), actions=(*DIMS, GRIPPER), fps=None, delta_kinds=("joint",))


def write_v3(root: Path, episodes: Sequence[tuple[np.ndarray, np.ndarray]], *, episodes_a_file: int = 2) -> Path:
    """A v3.0 dataset without a camera: (state, actions) of each episode."""
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    (root / "data/chunk-000").mkdir(parents=True)
    rows = [{"episode_index": i, "length": len(s), "data/chunk_index": 0, "data/file_index": i // episodes_a_file} for i, (s, _) in enumerate(episodes)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), root / "meta/episodes/chunk-000/file-000.parquet")
    pyarrow.parquet.write_table(pa.table({"task_index": [0], "task": ["go"]}), root / "meta/tasks.parquet")
    first = 0
    for file in range(-(-len(episodes) // episodes_a_file)):
        chosen = range(file * episodes_a_file, min((file + 1) * episodes_a_file, len(episodes)))
        state, actions = (np.concatenate([episodes[i][j] for i in chosen]).astype(np.float32) for j in (0, 1))
        numbers = np.repeat(chosen, [len(episodes[i][0]) for i in chosen])
        table = {"observation.state": list(state), "action": list(actions), "episode_index": numbers, "index": first + np.arange(len(numbers))}
        pyarrow.parquet.write_table(pa.table(table | {"task_index": np.zeros(len(numbers), np.int64)}), root / f"data/chunk-000/file-{file:03d}.parquet")
        first += len(numbers)
    sizes = {"observation.state": [episodes[0][0].shape[1]], "action": [episodes[0][1].shape[1]]}
    described = {name: {"dtype": "float32", "shape": shape} for name, shape in sizes.items()}
    described |= {name: {"dtype": "int64", "shape": [1]} for name in ("index", "episode_index", "task_index")}
    paths = {"data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet", "video_path": None}
    (root / "meta/info.json").write_text(json.dumps({"codebase_version": "v3.0", "fps": 10, "total_frames": first, "features": described} | paths))
    return root


def episodes(*lengths: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Made-up episodes of ARM."""
    rng = np.random.default_rng(seed)
    return [(rng.uniform(0, 3, (n, 4)).astype(np.float32), rng.uniform(-2, 1, (n, 4)).astype(np.float32)) for n in lengths]
