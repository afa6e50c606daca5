"""One batch in one block of memory: made from rows by a worker, read as NumPy views by the main process.

Axes: B, C, T, A, M, Y, X (spec.py); n: this process's share of the batch.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pi05.batch import AUGMENT_AXES, AugmentDraws, Batch, Draws, Observation, make_draws
from pi05.data.augment import Augmentation, draw_augmentation
from pi05.data.dataset import Dataset
from pi05.errors import DataError, Pi05Error
from pi05.spec import IMAGE_CHANNELS, ModelSpec

TOKEN_MULTIPLE = 16  # text lengths are rounded up to this, so that a compiling backend sees few shapes
ALIGNMENT = 64  # bytes; jax.device_put takes an array on the CPU without a copy only if it is aligned like this

Allocate = Callable[[int], tuple[Any, np.ndarray]]  # bytes -> the memory's owner, its bytes as uint8[n]
Sample = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """One batch to make.

    step: number of the batch. epochs, places, rows: int64[n], of each sample its epoch, place in the epoch and dataset row.
    """

    step: int
    epochs: np.ndarray
    places: np.ndarray
    rows: np.ndarray


@dataclasses.dataclass(frozen=True)
class Field:
    """An array inside a block; offset in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    def view(self, block: np.ndarray) -> np.ndarray:
        """The array in `block`, uint8[bytes], without a copy."""
        size = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        return block[self.offset : self.offset + size].view(self.dtype).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Block:
    """A batch in one piece of memory: `memory` is a uint8 NumPy array or torch tensor, `fields` say what lies where."""

    memory: Any
    fields: dict[str, Field]

    def open(self) -> tuple[Batch, Draws]:
        """The batch as views of the memory, which they keep alive."""
        memory = self.memory if isinstance(self.memory, np.ndarray) else self.memory.numpy()
        return _batch({name: field.view(memory) for name, field in self.fields.items()})


class BatchMaker:
    """Makes batches out of rows.

    token_len: length of the text of every batch; None: that of the longest prompt, rounded up to TOKEN_MULTIPLE.
    augmentation: its preset. cameras: slots of the samples' images, which it depends on.
    """

    def __init__(
        self,
        dataset: Dataset,
        pipeline: Callable[[dict[str, Any]], Sample],
        spec: ModelSpec,
        seed: int,
        token_len: int | None,
        augmentation: Augmentation = "none",
        cameras: tuple[str, ...] = (),
    ) -> None:
        self.dataset, self.pipeline, self.spec, self.seed, self.token_len = dataset, pipeline, spec, seed, token_len
        self.augmentation, self.cameras = augmentation, cameras
        self.token_limit = token_len or spec.max_token_len

    def sample(self, row: int) -> Sample:
        """The transformed sample of dataset row `row`.

        Raises:
            DataError: names dataset, episode and frame.
        """
        try:
            sample = self.pipeline(self.dataset[row])
            if not np.isfinite(sample["actions"]).all():
                raise DataError("the normalised actions are not finite; look for constant dims in the statistics.")
            if len(sample["tokens"]) > self.token_limit:
                raise DataError(f"the prompt has {len(sample['tokens'])} tokens, the limit is {self.token_limit}. Shorten the task or raise the limit.")
            return sample
        except Exception as error:  # whatever it is, the user needs to know which sample it was
            where = self.dataset.describe(row)
            text = str(error) if isinstance(error, Pi05Error) else f"{type(error).__name__}: {error}"
            raise DataError(text if text.startswith(where) else f"{where}: {text}") from error

    def fields(self, batch_size: int, cameras: int, token_len: int | None = None) -> dict[str, Field]:
        """Where the arrays of a batch lie in its block, for text of `token_len` tokens (default: the limit). The same for any token_len but for T."""
        n, edge, steps, dims = batch_size, self.spec.vision.image_size, self.spec.action_horizon, self.spec.action_dim
        out: dict[str, Field] = {}
        offset = 0
        for name, dtype, shape in (
            ("images", "uint8", (n, cameras, edge, edge, IMAGE_CHANNELS)),
            ("image_mask", "bool", (n, cameras)),
            ("actions", "float32", (n, steps, dims)),
            ("action_is_pad", "bool", (n, steps)),
            ("action_dim_is_pad", "bool", (n, dims)),
            ("sample_ids", "int64", (n,)),
            ("noise", "float32", (n, steps, dims)),
            ("time", "float32", (n,)),
            *((name, "float32", (n, cameras, *axes)) for name, axes in AUGMENT_AXES.items() if self.augmentation != "none"),
            ("tokens", "int32", (n, self.token_limit)),
            ("token_mask", "bool", (n, self.token_limit)),
        ):
            used = (n, token_len) if token_len and name in ("tokens", "token_mask") else shape
            out[name] = Field(dtype, used, offset)
            offset += -(-math.prod(shape) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        return out

    def block_size(self, batch_size: int, cameras: int) -> int:
        """Bytes of a batch."""
        last = self.fields(batch_size, cameras)["token_mask"]
        return last.offset + -(-math.prod(last.shape) // ALIGNMENT) * ALIGNMENT

    def make(self, task: Task, allocate: Allocate) -> Block:
        """The batch of `task`, each sample written straight to its place in new memory.

        Raises:
            DataError: a sample cannot be read or transformed.
            BatchError: the pipeline's samples do not fit the spec.
        """
        samples, size = map(self.sample, map(int, task.rows)), len(task.rows)
        prompts: list[np.ndarray] = []
        for i, sample in enumerate(samples):
            if i == 0:
                cameras = len(sample["images"])
                memory, block = allocate(self.block_size(size, cameras))
                arrays = {name: field.view(block) for name, field in self.fields(size, cameras).items()}
            for name in ("images", "image_mask", "actions", "action_is_pad", "action_dim_is_pad"):
                arrays[name][i] = sample[name]
            arrays["sample_ids"][i] = sample["sample_id"]
            prompts.append(sample["tokens"])
        fields = self.fields(size, cameras, self._text_length(prompts))
        arrays = {name: field.view(block) for name, field in fields.items()}
        fill_text(arrays, prompts)
        self._fill_draws(arrays, task)
        _batch(arrays)[0].validate(self.spec)
        return Block(memory, fields)

    def _fill_draws(self, arrays: Mapping[str, np.ndarray], task: Task) -> None:
        for epoch in map(int, np.unique(task.epochs)):
            here = task.epochs == epoch
            draws = make_draws(self.spec, self.seed, epoch, task.places[here])
            arrays["noise"][here], arrays["time"][here] = draws.noise, draws.time
            size = self.spec.vision.image_size
            augment = draw_augmentation(self.augmentation, self.cameras, size, seed=self.seed, epoch=epoch, positions=task.places[here])
            if augment:
                present = arrays["image_mask"][here]
                for name, array in vars(augment.where(present, AugmentDraws.identity(*present.shape))).items():
                    arrays[name][here] = array

    def _text_length(self, prompts: list[np.ndarray]) -> int:
        longest = max(1, *map(len, prompts))
        return self.token_len or min(self.token_limit, -(-longest // TOKEN_MULTIPLE) * TOKEN_MULTIPLE)


def allocate_private(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Aligned memory of this process."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size], memory[start : start + size]


def allocate_shared(size: int) -> tuple[Any, np.ndarray]:
    """Shared memory, as a torch tensor that travels between processes as a handle.

    Raises:
        DataError: there is not enough.
    """
    import torch

    try:
        memory = torch.empty(size, dtype=torch.uint8).share_memory_()
    except RuntimeError as error:
        raise DataError(f"No {size / 1e6:.1f} MB of shared memory are left. Hold fewer batches, enlarge /dev/shm, or use fewer workers ({error}).") from error
    return memory, memory.numpy()


def fill_text(arrays: Mapping[str, np.ndarray], prompts: list[np.ndarray]) -> None:
    """Writes prompts, int32[n] each, into arrays["tokens"], int32[B, T], and ["token_mask"], bool[B, T]; the rest is zero."""
    lengths = np.array([len(tokens) for tokens in prompts])
    mask = np.arange(arrays["tokens"].shape[1]) < lengths[:, None]
    arrays["token_mask"][:], arrays["tokens"][:] = mask, 0
    arrays["tokens"][mask] = np.concatenate(prompts)


def _batch(arrays: Mapping[str, np.ndarray]) -> tuple[Batch, Draws]:
    observation = Observation(**{name: arrays[name] for name in ("images", "image_mask", "tokens", "token_mask")})
    rest = {name: arrays[name] for name in ("actions", "action_is_pad", "action_dim_is_pad", "sample_ids")}
    augment = AugmentDraws(**{name: arrays[name] for name in AUGMENT_AXES}) if "affine" in arrays else None
    return Batch(observation=observation, **rest), Draws(noise=arrays["noise"], time=arrays["time"], augment=augment)
