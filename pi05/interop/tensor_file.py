"""Safetensors files, one tensor at a time: neither reading nor writing holds more than the tensor at hand.

The file: 8 bytes little-endian length of the header, the header in JSON, the tensors one behind another
(https://github.com/huggingface/safetensors#format). Reading is the library's; it has no way of writing a file piece by piece.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from pi05.errors import CheckpointError
from pi05.interop.ledger import Ledger

ALIGNMENT = 8  # bytes; of the first tensor, as the format recommends


class TensorFiles:
    """The tensors of one or several files.

    shapes: of every tensor. metadata: of the files.

    Raises:
        CheckpointError: a file is damaged, or two files hold a tensor of one name.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.metadata: dict[str, str] = {}
        self._paths: dict[str, Path] = {}
        for path in paths:
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    if name in self._paths:
                        raise CheckpointError(f"{path} holds {name}, and so does another file beside it. Keep one of the two.")
                    self._paths[name], self.shapes[name] = path, tuple(file.get_slice(name).get_shape())
                self.metadata |= file.metadata() or {}

    def read(self, name: str) -> np.ndarray:
        """One tensor, in its own dtype."""
        with _open(self._paths[name]) as file:  # anew each time: an open file's pages stay in memory, in the end all of them
            return file.get_tensor(name)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file ({error}). Copy or download it again.") from error


def write_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, np.ndarray]], metadata: Mapping[str, str]) -> None:
    """Writes float32 `tensors` to one file, each where it belongs as it comes; the file appears under its name when it is whole.

    Raises:
        ParamsError: the tensors are not exactly those of `shapes`.
    """
    entries, end = {"__metadata__": dict(metadata)}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    ledger = Ledger({}, shapes)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for name, array in tensors:
                ledger.fill(name)
                if name in shapes and array.shape == tuple(shapes[name]):
                    file.seek(8 + len(header) + entries[name]["data_offsets"][0])
                    file.write(np.ascontiguousarray(array, "<f4").data)
                else:
                    raise CheckpointError(f"{path}: {name} of shape {array.shape} has no place; there it would be {shapes.get(name)}.")
            file.truncate(8 + len(header) + end)
            file.flush()
            os.fsync(file.fileno())
        ledger.close()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
