"""What a Pi0.5 model is: its sizes, the sizes that follow from them, its cost. No other module knows these numbers.

Axes used as suffixes of array names, in the whole package:
    B batch | C camera | T query token | S key token | P prefix token or image patch | A action step | M action dim
    L layer | N query head | K key/value head | G = N / K | H head dim | D width | F mlp dim | V vocabulary
    Y, X image height and width; 1 marks a broadcast axis.

Source: Pi0.5 (Physical Intelligence 2025), PaliGemma (Beyer et al. 2024), Gemma (Gemma Team 2024), SigLIP (Zhai et al. 2023).
"""

import dataclasses
import difflib
import functools
from typing import Literal, Self

import numpy as np

from pi05.errors import SpecError

CAMERA_SLOTS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
IMAGE_CHANNELS = 3
NORM_EPS = 1e-6  # of every LayerNorm, RMSNorm and adaRMS norm
ROPE_BASE = 10_000.0
TIME_PERIOD_MIN, TIME_PERIOD_MAX = 4e-3, 4.0  # of the flow time's sine-cosine embedding, in units of time
TIME_SPAN = 0.999  # training times are TIME_SPAN * Beta(1.5, 1) + (1 - TIME_SPAN)


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Low-rank adapters of every matrix of a transformer (Hu et al. 2022): y = x W + (alpha / rank) (x A) B, A [in, rank], B [rank, out]."""

    rank: int
    alpha: float

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise SpecError(f"lora.rank is {self.rank!r}; it must be a positive integer.")
        if not self.alpha > 0:
            raise SpecError(f"lora.alpha is {self.alpha!r}; it must be positive.")

    @property
    def scale(self) -> float:
        """What the product of the adapters is multiplied by."""
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class VisionSpec:
    """SigLIP vision transformer and its projection to the trunk's width.

    width, depth, mlp_dim, num_heads: sizes of the transformer; head_dim follows.
    patch_size, image_size: pixels along one edge of a square patch and of a square image.
    lora: adapters, or None for none.
    """

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    patch_size: int
    image_size: int
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "vision")
        _check_divides("vision", "num_heads", self.num_heads, "width", self.width)
        _check_divides("vision", "patch_size", self.patch_size, "image_size", self.image_size)

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def num_patches(self) -> int:
        """Tokens of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_dim(self) -> int:
        """Numbers in one patch."""
        return self.patch_size**2 * IMAGE_CHANNELS


@dataclasses.dataclass(frozen=True)
class GemmaSpec:
    """One of the two Gemma transformers (trunk or action expert). lora: adapters, or None for none."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "gemma")
        _check_divides("gemma", "num_kv_heads", self.num_kv_heads, "num_heads", self.num_heads)
        if self.head_dim % 2:
            raise SpecError(f"gemma.head_dim is {self.head_dim}; rotary embedding needs an even size.")

    @property
    def queries_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A Pi0.5 model.

    vision, trunk, expert: the three transformers. Trunk and expert attend jointly, so they share depth, heads and head_dim.
    vocab_size: rows of the token embedding.
    action_dim, action_horizon: size of the (zero-padded) action vector, steps of an action chunk.
    max_token_len: the longest prompt in tokens; a limit, not a size: batches may be shorter.
    cameras: image slots, in the order of their tokens.
    """

    vision: VisionSpec
    trunk: GemmaSpec
    expert: GemmaSpec
    vocab_size: int
    action_dim: int
    action_horizon: int
    max_token_len: int
    cameras: tuple[str, ...] = CAMERA_SLOTS

    def __post_init__(self) -> None:
        _check_positive(self, "model")
        for name in ("depth", "num_heads", "num_kv_heads", "head_dim"):
            ours, theirs = getattr(self.trunk, name), getattr(self.expert, name)
            if ours != theirs:
                raise SpecError(f"trunk.{name} is {ours} but expert.{name} is {theirs}: they attend jointly, layer by layer, so both must be equal.")
        if self.expert.width % 2:
            raise SpecError(f"expert.width is {self.expert.width}; the sine-cosine time embedding needs an even size.")
        if not self.cameras or len(set(self.cameras)) != len(self.cameras):
            raise SpecError(f"cameras is {self.cameras}; it needs at least one slot and no slot twice.")

    @classmethod
    def pi05(cls) -> Self:
        """The published model: SigLIP So400m/14, gemma_2b, gemma_300m; 3,353,433,872 parameters."""
        return cls(
            vision=VisionSpec(width=1152, depth=27, mlp_dim=4304, num_heads=16, patch_size=14, image_size=224),
            trunk=GemmaSpec(width=2048, depth=18, mlp_dim=16384, num_heads=8, num_kv_heads=1, head_dim=256),
            expert=GemmaSpec(width=1024, depth=18, mlp_dim=4096, num_heads=8, num_kv_heads=1, head_dim=256),
            vocab_size=257_152,
            action_dim=32,
            action_horizon=50,
            max_token_len=200,
        )

    @classmethod
    def tiny(cls) -> Self:
        """The same structure, small enough for a laptop's CPU, no two sizes equal so that a swapped axis cannot pass.

        Like gemma_2b it keeps the one trap of the published sizes: trunk.width = num_heads * head_dim, so q and o are square.
        """
        return cls(
            vision=VisionSpec(width=60, depth=4, mlp_dim=140, num_heads=5, patch_size=14, image_size=70),
            trunk=GemmaSpec(width=96, depth=3, mlp_dim=176, num_heads=6, num_kv_heads=2, head_dim=16),
            expert=GemmaSpec(width=56, depth=3, mlp_dim=104, num_heads=6, num_kv_heads=2, head_dim=16),
            vocab_size=509,
            action_dim=11,
            action_horizon=8,
            max_token_len=72,
        )

    @classmethod
    def preset(cls, name: str) -> Self:
        """Returns the preset called `name`.

        Raises:
            SpecError: no such preset.
        """
        presets = {"pi05": cls.pi05, "tiny": cls.tiny}
        if name not in presets:
            near = difflib.get_close_matches(name, presets, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise SpecError(f"There is no model preset {name!r}; there are {', '.join(sorted(presets))}.{hint}")
        return presets[name]()

    def replace(self, **changes: object) -> Self:
        """Returns a copy with `changes`; a key like `vision__image_size` changes a part."""
        parts: dict[str, dict[str, object]] = {}
        flat: dict[str, object] = {}
        for key, value in changes.items():
            part, _, field = key.partition("__")
            if field:
                parts.setdefault(part, {})[field] = value
            else:
                flat[key] = value
        for part, fields in parts.items():
            flat[part] = dataclasses.replace(getattr(self, part), **fields)
        return dataclasses.replace(self, **flat)

    def prefix_len(self, num_cameras: int | None = None, token_len: int | None = None) -> int:
        """Tokens of the prefix: images of `num_cameras` (default: all slots), then `token_len` (default: the limit) of text."""
        num_cameras = len(self.cameras) if num_cameras is None else num_cameras
        token_len = self.max_token_len if token_len is None else token_len
        return num_cameras * self.vision.num_patches + token_len

    def lora(self, group: str) -> LoRA | None:
        """The adapters of a group of parameters (see params.GROUPS), or None."""
        return None if group == "heads" else getattr(self, group).lora

    @property
    def num_positions(self) -> int:
        """Length of the longest possible sequence, so every position is below it."""
        return self.prefix_len() + self.action_horizon

    def forward_flops(self, num_cameras: int | None = None, token_len: int | None = None) -> float:
        """Floating-point operations of one sample's forward pass: two per multiply-add of every matrix product.

        Counts what openpi's model computes (joint attention over prefix and suffix), so that figures compare.
        """
        num_cameras = len(self.cameras) if num_cameras is None else num_cameras
        vision, trunk, expert = self.vision, self.trunk, self.expert
        patches, prefix, suffix = vision.num_patches, self.prefix_len(num_cameras, token_len), self.action_horizon
        vision_weights = vision.depth * (4 * vision.width**2 + 2 * vision.width * vision.mlp_dim) + vision.width * (vision.patch_dim + trunk.width)
        vision_macs = num_cameras * patches * (vision_weights + vision.depth * 2 * patches * vision.width)
        expert_width = expert.width
        modulation_macs = (2 * expert.depth + 1) * 3 * expert_width**2 + 2 * expert_width**2  # once a sample, not a token
        head_macs = suffix * 2 * self.action_dim * expert_width
        attention_macs = 2 * trunk.depth * trunk.num_heads * trunk.head_dim * (prefix + suffix) ** 2
        dense_macs = prefix * trunk.depth * _layer_weights(trunk) + suffix * expert.depth * _layer_weights(expert)
        return 2.0 * (vision_macs + dense_macs + attention_macs + modulation_macs + head_macs)

    def training_flops(self, num_cameras: int | None = None, token_len: int | None = None) -> float:
        """Floating-point operations of one sample's training step: forward, and twice that backward, without recomputation."""
        return 3.0 * self.forward_flops(num_cameras, token_len)


@dataclasses.dataclass(frozen=True)
class Compute:
    """How a model computes, which changes speed, memory and rounding, never what it means.

    dtype: of the residual streams and matrix products: bfloat16 for training, float32, or float64 (to judge the others).
        Parameters stay float32, and what docs/numerics.md lists is computed in at least float32 whatever this says.
    attention: "explicit" works everywhere; "fused" calls a GPU's attention kernels on the valid tokens alone, see attention.py of either backend.
    attention_dtype: of the fused kernels. float16, whose cotangents are scaled; bfloat16 loses dQ where keys have a common mean and
        has let training diverge, so it needs `allow_unsafe`.
    batch_cameras: all cameras in one call of the vision tower instead of one call each.
    remat: what is computed again in the backward pass instead of kept. "none"; "elementwise", everything but matrix products and attention
        (PyTorch's compiler decides so by itself); "layer", everything but a layer's input and, in JAX, what the fused attention keeps.
    """

    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    attention: Literal["explicit", "fused"] = "explicit"
    attention_dtype: Literal["float16", "bfloat16"] = "float16"
    allow_unsafe: bool = False
    batch_cameras: bool = True
    remat: Literal["none", "elementwise", "layer"] = "none"

    def __post_init__(self) -> None:
        choices = {
            "dtype": ("bfloat16", "float32", "float64"),
            "attention": ("explicit", "fused"),
            "attention_dtype": ("float16", "bfloat16"),
            "remat": ("none", "elementwise", "layer"),
        }
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise SpecError(f"compute.{field} is {getattr(self, field)!r}; it can be {', '.join(allowed)}.")
        if self.attention == "fused" and self.dtype == "float64":
            raise SpecError(
                "compute.attention is 'fused', whose kernels compute in 16 bits, but compute.dtype is 'float64'. Set compute.attention to explicit."
            )
        if self.attention == "fused" and self.attention_dtype == "bfloat16" and not self.allow_unsafe:
            raise SpecError(
                "compute.attention_dtype is 'bfloat16': the fused kernels round their softmax gradient to it, which is 7 times less exact than explicit "
                "attention where keys have a common mean, and has let training diverge after about 1000 steps (docs/numerics.md). "
                "Take float16, or set compute.allow_unsafe if you mean it."
            )

    @property
    def strategy(self) -> str:
        """The name of the attention strategy in the backends' attention.py."""
        return f"fused_{self.attention_dtype}" if self.attention == "fused" else self.attention

    @property
    def full_dtype(self) -> str:
        """The dtype of what is computed in at least float32."""
        return "float64" if self.dtype == "float64" else "float32"


@functools.cache
def rope_table(head_dim: int, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of rotary embedding, float64[num_positions, head_dim / 2] each (Su et al. 2021, eq. 15).

    Computed once in double precision and gathered by position, so that no backend multiplies a position of hundreds by a
    rounded frequency (the error of low-precision frequencies grows with distance; openpi's PyTorch port loses 0.37 % there).
    """
    frequency = ROPE_BASE ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angle = np.arange(num_positions, dtype=np.float64)[:, None] * frequency[None, :]
    return np.cos(angle), np.sin(angle)


@functools.cache
def time_frequencies(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Frequencies of the time embedding in turns per unit of time, float64[width / 2], as a sum (coarse, fine).

    `coarse` is a multiple of 1/16, so coarse * (a multiple of 1/4096) is exact in float32: layers.time_embedding uses this
    to keep full float32 accuracy although the angle reaches 250 turns.
    """
    period = TIME_PERIOD_MIN * (TIME_PERIOD_MAX / TIME_PERIOD_MIN) ** np.linspace(0.0, 1.0, width // 2)
    coarse = np.round(16.0 / period) / 16.0
    return coarse, 1.0 / period - coarse


def _layer_weights(gemma: GemmaSpec) -> int:
    attention = gemma.width * gemma.head_dim * (2 * gemma.num_heads + 2 * gemma.num_kv_heads)
    return attention + 3 * gemma.width * gemma.mlp_dim


def _check_positive(spec: object, where: str) -> None:
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if value is None or isinstance(value, (VisionSpec, GemmaSpec, LoRA, tuple)):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise SpecError(f"{where}.{field.name} is {value!r}; it must be a positive integer.")


def _check_divides(where: str, small: str, divisor: int, large: str, number: int) -> None:
    if number % divisor:
        raise SpecError(f"{where}.{large} is {number}, which {where}.{small} = {divisor} does not divide.")
