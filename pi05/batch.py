"""What a model reads: an Observation, a Batch to train on, and the Draws that are all the randomness there is.

Axes: B C P T A M, Y X (see spec.py). Arrays are NumPy here; each backend holds the same classes with its own arrays.
Dtypes: images uint8 or float32, masks bool, tokens int32, everything else float32.
"""

import dataclasses
from typing import Any, Literal, Self

import numpy as np

from pi05.errors import BatchError
from pi05.params import philox
from pi05.spec import IMAGE_CHANNELS, TIME_SPAN, ModelSpec

# What happens to steps behind the end of an episode: "ignore" neither attends to nor counts them, "count" does both, as openpi.
PaddedSteps = Literal["ignore", "count"]
# Which action dims the loss counts: all of the padded vector, as openpi, or those that the robot has.
LossDims = Literal["model", "real"]
# Axes of the fields of AugmentDraws behind [B, C].
AUGMENT_AXES = {"affine": (2, 3), "hsv": (3,), "colour": (3,)}
LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue in the grey that saturation mixes with (ITU-R BT.601)

Array = Any  # a NumPy array here, a jax.Array or torch.Tensor inside a backend


@dataclasses.dataclass(frozen=True)
class Observation:
    """What the robot sees and is told; C may be smaller than the spec's number of slots: an absent camera is not computed.

    images: uint8[B, C, Y, X, 3] in 0..255, or float32 in [-1, 1]; cameras in the order of `spec.cameras`.
    image_mask: bool[B, C], whether the camera exists in this sample.
    tokens: int32[B, T], the tokenised prompt, padded at the end; T is the batch's own length, at most `spec.max_token_len`.
    token_mask: bool[B, T], real tokens.
    """

    images: Array
    image_mask: Array
    tokens: Array
    token_mask: Array

    def validate(self, spec: ModelSpec) -> None:
        """Checks shapes, dtypes and content once, at the border.

        Raises:
            BatchError: names the field, what it is and what it must be.
        """
        edge = spec.vision.image_size
        sizes = {"images": self.images, "image_mask": self.image_mask, "tokens": self.tokens, "token_mask": self.token_mask}
        _check_arrays(sizes)
        batch = len(self.tokens)
        cameras = self.images.shape[1] if self.images.ndim == 5 else "C"
        length = self.tokens.shape[1] if self.tokens.ndim == 2 else "T"
        _check_shape("images", self.images, (batch, cameras, edge, edge, IMAGE_CHANNELS), "[B, C, Y, X, 3]")
        _check_shape("image_mask", self.image_mask, (batch, cameras), "[B, C]")
        _check_shape("tokens", self.tokens, (batch, length), "[B, T]")
        _check_shape("token_mask", self.token_mask, (batch, length), "[B, T]")
        _check_dtype("images", self.images, ("uint8", "float32"))
        _check_dtype("image_mask", self.image_mask, ("bool",))
        _check_dtype("tokens", self.tokens, ("int32",))
        _check_dtype("token_mask", self.token_mask, ("bool",))
        if cameras > len(spec.cameras):
            raise BatchError(f"images holds {cameras} cameras; the spec has the slots {spec.cameras}.")
        if length > spec.max_token_len:
            raise BatchError(f"tokens has {length} tokens a sample; spec.max_token_len is {spec.max_token_len}. Shorten the prompt or raise the limit.")
        if self.images.dtype == np.float32:
            _check_images(self.images)
        low, high = (int(self.tokens.min()), int(self.tokens.max())) if self.tokens.size else (0, 0)
        if low < 0 or high >= spec.vocab_size:
            raise BatchError(f"tokens holds ids from {low} to {high}; spec.vocab_size {spec.vocab_size} allows 0 to {spec.vocab_size - 1}.")
        empty = ~(self.image_mask.any(1) | self.token_mask.any(1))
        if empty.any():
            raise BatchError(f"Sample {int(empty.argmax())} has neither a camera in image_mask nor a token in token_mask: nothing to attend to.")


@dataclasses.dataclass(frozen=True)
class Batch:
    """Samples to train on.

    observation: see Observation.
    actions: float32[B, A, M], normalised action chunks, zero-padded to the model's action dim.
    action_is_pad: bool[B, A], steps behind the end of the episode (LeRobot's column); the first step is always real.
    action_dim_is_pad: bool[B, M], dims that the robot of this sample does not have.
    sample_ids: int64[B], index of the sample in its dataset, for replay and messages.
    """

    observation: Observation
    actions: Array
    action_is_pad: Array
    action_dim_is_pad: Array
    sample_ids: Array

    def validate(self, spec: ModelSpec) -> None:
        """Checks shapes, dtypes and content once, at the border.

        Raises:
            BatchError: names the field, what it is and what it must be.
        """
        self.observation.validate(spec)
        _check_arrays({name: getattr(self, name) for name in ("actions", "action_is_pad", "action_dim_is_pad", "sample_ids")})
        batch = len(self.observation.tokens)
        _check_shape("actions", self.actions, (batch, spec.action_horizon, spec.action_dim), "[B, A, M]")
        _check_shape("action_is_pad", self.action_is_pad, (batch, spec.action_horizon), "[B, A]")
        _check_shape("action_dim_is_pad", self.action_dim_is_pad, (batch, spec.action_dim), "[B, M]")
        _check_shape("sample_ids", self.sample_ids, (batch,), "[B]")
        _check_dtype("actions", self.actions, ("float32",))
        _check_dtype("action_is_pad", self.action_is_pad, ("bool",))
        _check_dtype("action_dim_is_pad", self.action_dim_is_pad, ("bool",))
        _check_dtype("sample_ids", self.sample_ids, ("int64",))
        _check_finite("actions", self.actions)
        for name, mask in (("action_is_pad", self.action_is_pad[:, :1]), ("action_dim_is_pad", self.action_dim_is_pad)):
            if (all_padding := mask.all(1)).any():
                what = "its first step" if name == "action_is_pad" else "every dim"
                raise BatchError(f"{name} of sample {int(all_padding.argmax())} marks {what} as padding: there is nothing to learn from.")


@dataclasses.dataclass(frozen=True)
class AugmentDraws:
    """How each image is changed before the model sees it, in this order; pixels are meant in [0, 1]. See the backends' augment.py.

    affine: float32[B, C, 2, 3], pixels; where an output pixel is read: (row, column) of the input = affine (row, column, 1) of the
        output, counted from the centre of the first pixel.
    hsv: float32[B, C, 3], changes of value and hue: brightness in [-1, 1] towards black or white, 0 is none; slope > 0 of the tone curve at
        its middle, 1 is none; turn of the hue in turns, 0 is none.
    colour: float32[B, C, 3], factors >= 0 of brightness, of contrast around mid-grey and of saturation; 1 is none.
    """

    affine: Array
    hsv: Array
    colour: Array

    @classmethod
    def identity(cls, batch_size: int, cameras: int) -> Self:
        """Draws that change no pixel."""
        single = (np.eye(2, 3, dtype=np.float32), np.array([0, 1, 0], np.float32), np.ones(3, np.float32))
        return cls(*(np.broadcast_to(value, (batch_size, cameras, *value.shape)).copy() for value in single))

    def where(self, chosen: np.ndarray, other: Self) -> Self:
        """These draws for the `chosen` images, bool[B, C] or broadcast to it, and `other` for the rest."""
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in dataclasses.fields(self))
        return type(self)(*(np.where(chosen.reshape(chosen.shape + (1,) * (mine.ndim - 2)), mine, its) for mine, its in pairs))

    def validate(self, spec: ModelSpec, batch_size: int) -> None:
        """Checks shapes, dtypes and ranges.

        Raises:
            BatchError: names the field, what it is and what it must be.
        """
        arrays = {f"augment.{name}": (getattr(self, name), axes) for name, axes in AUGMENT_AXES.items()}
        _check_arrays({name: array for name, (array, _) in arrays.items()})
        cameras = self.affine.shape[1] if self.affine.ndim == 4 else "C"
        for name, (array, axes) in arrays.items():
            _check_shape(name, array, (batch_size, cameras, *axes), f"[B, C, {', '.join(map(str, axes))}]")
            _check_dtype(name, array, ("float32",))
            _check_finite(name, array)
        if cameras > len(spec.cameras):
            raise BatchError(f"augment holds {cameras} cameras; the spec has the slots {spec.cameras}.")
        if not (np.abs(self.hsv[..., 0]) <= 1).all() or not (self.hsv[..., 1] > 0).all() or not (self.colour >= 0).all():
            raise BatchError("augment.hsv or augment.colour is out of range: brightness must lie in [-1, 1], slopes be positive, factors not negative.")


@dataclasses.dataclass(frozen=True)
class Draws:
    """Every random number of one training step.

    noise: float32[B, A, M], standard normal. time: float32[B] in (0, 1]; 1 is pure noise.
    augment: changes of the images of a training batch; None: the images as they are.
    """

    noise: Array
    time: Array
    augment: AugmentDraws | None = None

    def validate(self, spec: ModelSpec, batch_size: int) -> None:
        """Checks shapes, dtypes and ranges.

        Raises:
            BatchError: names the field, what it is and what it must be.
        """
        _check_arrays({"noise": self.noise, "time": self.time})
        _check_shape("noise", self.noise, (batch_size, spec.action_horizon, spec.action_dim), "[B, A, M]")
        _check_shape("time", self.time, (batch_size,), "[B]")
        _check_dtype("noise", self.noise, ("float32",))
        _check_dtype("time", self.time, ("float32",))
        _check_finite("noise", self.noise)
        if not ((self.time > 0) & (self.time <= 1)).all():
            raise BatchError(f"time runs from {self.time.min()} to {self.time.max()}; it must lie in (0, 1].")
        if self.augment is not None:
            self.augment.validate(spec, batch_size)


@dataclasses.dataclass(frozen=True)
class LossParts:
    """The flow-matching loss before it is averaged.

    per_sample: float32[B], mean over the counted action steps and dims; the loss is its mean, so equal shards of a batch
        (devices, accumulation) average to the loss of the whole.
    per_dim: float32[M], mean over samples and counted steps, for the log; 0 where no sample counts the dim.
    """

    per_sample: Array
    per_dim: Array

    @property
    def loss(self) -> Array:
        """float32 scalar."""
        return self.per_sample.mean()


def make_draws(spec: ModelSpec, seed: int, epoch: int, positions: np.ndarray) -> Draws:
    """Draws for the samples at `positions` (int[B]) of the order of `epoch`.

    Each sample has its own Philox key, so its numbers depend neither on the batch it is in nor on workers, devices or backend.
    Normals by Box and Muller (1958) in float64; time = 0.999 Beta(1.5, 1) + 0.001 by the inverse u^(2/3) (openpi's schedule).
    """
    size = spec.action_horizon * spec.action_dim
    noise, time = np.empty((len(positions), size), np.float32), np.empty(len(positions), np.float32)
    for i, position in enumerate(positions):
        uniform = uniforms(size + size % 2 + 1, seed, "draws", epoch, int(position))
        time[i] = TIME_SPAN * uniform[0] ** (2.0 / 3.0) + (1.0 - TIME_SPAN)
        radius, angle = np.sqrt(-2.0 * np.log1p(-uniform[1::2])), 2.0 * np.pi * uniform[2::2]
        noise[i] = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]
    return Draws(noise=noise.reshape(-1, spec.action_horizon, spec.action_dim), time=time)


def uniforms(size: int, seed: int, stream: str, *counters: int) -> np.ndarray:
    """float64[size] in [0, 1) of the Philox key (seed, stream, counters).

    Built from raw generator words, not NumPy's distributions, whose streams may change between releases.
    """
    words = philox(seed, stream, *counters).bit_generator.random_raw(size)
    return (words >> np.uint64(11)) * 2.0**-53


def synthetic_batch(
    spec: ModelSpec,
    batch_size: int,
    *,
    seed: int = 0,
    token_len: int | None = None,
    missing_cameras: bool = True,
    padded_text: bool = True,
    padded_actions: bool = True,
) -> Batch:
    """A valid random batch with every irregularity a real one can have; for tests and benchmarks, not for training.

    missing_cameras: sample b lacks camera b % C (so the leading camera is missing somewhere), where more than one camera exists.
    padded_text: prompts of different lengths in a batch of `token_len` tokens (default: the spec's limit).
    padded_actions: some chunks end early, some robots have fewer dims.
    """
    rng = philox(seed, "synthetic", batch_size)
    token_len = spec.max_token_len if token_len is None else token_len
    cameras, edge = len(spec.cameras), spec.vision.image_size
    image_mask = np.ones((batch_size, cameras), bool)
    token_mask = np.ones((batch_size, token_len), bool)
    action_is_pad = np.zeros((batch_size, spec.action_horizon), bool)
    action_dim_is_pad = np.zeros((batch_size, spec.action_dim), bool)
    if missing_cameras and cameras > 1:
        image_mask[np.arange(batch_size), np.arange(batch_size) % cameras] = False
    if padded_text:
        token_mask &= np.arange(token_len) < rng.integers(1, token_len + 1, (batch_size, 1))
    if padded_actions:
        action_is_pad |= np.arange(spec.action_horizon) >= rng.integers(1, spec.action_horizon + 1, (batch_size, 1))
        action_dim_is_pad |= np.arange(spec.action_dim) >= rng.integers(1, spec.action_dim + 1, (batch_size, 1))
    actions = rng.standard_normal((batch_size, spec.action_horizon, spec.action_dim), np.float32)
    return Batch(
        observation=Observation(
            images=rng.integers(0, 256, (batch_size, cameras, edge, edge, IMAGE_CHANNELS), np.uint8),
            image_mask=image_mask,
            tokens=rng.integers(0, spec.vocab_size, (batch_size, token_len), np.int32),
            token_mask=token_mask,
        ),
        actions=actions * ~action_dim_is_pad[:, None],
        action_is_pad=action_is_pad,
        action_dim_is_pad=action_dim_is_pad,
        sample_ids=np.arange(batch_size, dtype=np.int64),
    )


def _check_arrays(fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if not isinstance(value, np.ndarray):
            raise BatchError(f"{name} is a {type(value).__name__}; it must be a NumPy array.")


def _check_shape(name: str, array: np.ndarray, wanted: tuple[int | str, ...], axes: str) -> None:
    if tuple(array.shape) != wanted:
        raise BatchError(f"{name} has shape {tuple(array.shape)}; it must be {axes} = ({', '.join(map(str, wanted))}).")


def _check_dtype(name: str, array: np.ndarray, wanted: tuple[str, ...]) -> None:
    if array.dtype.name not in wanted:
        raise BatchError(f"{name} has dtype {array.dtype}; it must be {' or '.join(wanted)}.")


def _check_finite(name: str, array: np.ndarray) -> None:
    bad = ~np.isfinite(array)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise BatchError(f"{name}{list(where)} is {array[where]}; {int(bad.sum())} of {array.size} values are not finite.")


def _check_images(images: np.ndarray) -> None:
    _check_finite("images", images)
    low, high = float(images.min(initial=0)), float(images.max(initial=0))
    if low < -1 or high > 1:
        raise BatchError(f"images runs from {low:g} to {high:g}; float images must lie in [-1, 1] (uint8 images are scaled by the model).")
