"""Does an attention kernel compute what it should, on this card, with these libraries, in the shapes that a run will use?

Each scene is an input on which some kernel, version or precision has been wrong (reference: docs/numerics.md). A strategy is SAFE on a scene
if everything is finite, dead rows are exact zeros, and the error of the output and of every gradient against float64 is at most
LIMIT times that of plain explicit attention in bfloat16 (the rule of Dao et al. 2022, flash-attention's own tests).

Axes: B T S N K H (see spec.py). Dtypes: inputs are rounded to bfloat16, the truth is float64.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator

import numpy as np

from pi05.params import philox
from pi05.spec import ModelSpec

LIMIT = 2.0
FLOOR = 2.0**-9  # half an ulp of bfloat16: no honest output is closer to the truth than its own rounding
SEED = 20_261_207
HUGE, TINY = 1e10, 1e-8


@dataclasses.dataclass(frozen=True)
class Shape:
    """A call of attention: query and key heads may differ, lengths T and S too; with padding, samples have fewer valid keys."""

    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    padded: bool = True
    batch: int = 2

    def __str__(self) -> str:
        return f"T={self.queries} S={self.keys} N={self.heads} K={self.kv_heads} H={self.head_dim}{'' if self.padded else ' all valid'}"


@dataclasses.dataclass(frozen=True)
class Scene:
    """Inputs of one call, float32 arrays that bfloat16 holds exactly. valid: bool[B, S], in front; None where all are."""

    name: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    valid: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came out on one scene. ratio: the worst error in units of plain bfloat16 attention's; where: of which tensor; reason: empty if SAFE."""

    scene: str
    ratio: float
    where: str
    reason: str

    @property
    def safe(self) -> bool:
        return not self.reason


# Scene -> what it does to (q, k, v, g, dead rows bool[B, T]) of a plain Gaussian one.
SCENES: dict[str, Callable[..., tuple]] = {
    "gauss": lambda q, k, v, g, dead: (q, k, v, np.where(dead, 0, g)),
    "all valid": lambda q, k, v, g, dead: (q, k, v, g),
    "sharp": lambda q, k, v, g, dead: (6 * q, k, v, np.where(dead, 0, g)),
    "common key mean": lambda q, k, v, g, dead: (q, k + 6 * _unit(k), v, np.where(dead, 0, g)),
    "common value mean": lambda q, k, v, g, dead: (q, k, v + 6 * _unit(v), np.where(dead, 0, g)),
    # q and k point apart: every logit is near -150, so exp(0 - logsumexp) of a key that should not be there overflows.
    "log-sum-exp < -88": lambda q, k, v, g, dead: (0.3 * q + _unit(q) * _apart(q), k - _unit(k) * _apart(q), v, np.where(dead, 0, g)),
    "tiny cotangent": lambda q, k, v, g, dead: (q, k, v, TINY * np.where(dead, 0, g)),
    "huge cotangent": lambda q, k, v, g, dead: (q, k, v, HUGE * np.where(dead, 0, g)),
    "cotangent on dead rows": lambda q, k, v, g, dead: (q, k, v, np.where(dead, 1e3 * g, g)),
}


def make_scene(name: str, shape: Shape) -> Scene:
    """The scene `name` of SCENES in `shape`; the first sample is whole, the others are cut where the shape is padded."""
    rng = philox(SEED, name, shape.queries, shape.keys, shape.head_dim)
    sizes = ((shape.queries, shape.heads), (shape.keys, shape.kv_heads), (shape.keys, shape.kv_heads), (shape.queries, shape.heads))
    arrays = [rng.standard_normal((shape.batch, length, heads, shape.head_dim)) for length, heads in sizes]
    cut = 0 if name == "all valid" else 5 * shape.keys // 16
    lengths = np.array([shape.keys - cut * sample // max(1, shape.batch - 1) for sample in range(shape.batch)])
    valid = np.arange(shape.keys) < lengths[:, None] if shape.padded else None
    dead = np.zeros((shape.batch, shape.queries), bool) if valid is None or shape.queries != shape.keys else ~valid
    q, k, v, g = (round_bfloat16(x) for x in SCENES[name](*arrays, dead[:, :, None, None]))
    return Scene(name, q, k, v, g, valid)


@functools.lru_cache(8)
def make_case(name: str, shape: Shape) -> tuple[Scene, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A scene, its truth, and what plain bfloat16 attention makes of it, which together cost a second in the published shapes."""
    scene = make_scene(name, shape)
    return scene, exact_attention(scene), plain_attention(scene)


def exact_attention(scene: Scene) -> dict[str, np.ndarray]:
    """Output and gradients in float64. Padding queries of self-attention are dead: zeros, and no part in any gradient."""
    return _attend(scene, np.float64, lambda x: x, lambda x: x)


def plain_attention(scene: Scene) -> dict[str, np.ndarray]:
    """The same as the explicit strategy computes it on a GPU in bfloat16: logits, softmax and its gradient in float32, the last multiplied in TF32."""
    return _attend(scene, np.float32, round_bfloat16, lambda x: _round_mantissa(x, 10))


def _attend(scene: Scene, dtype: type, low: Callable, tensor_core: Callable) -> dict[str, np.ndarray]:
    q, k, v, g = (x.astype(dtype) for x in (scene.q, scene.k, scene.v, scene.g))
    out, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    group, scale = q.shape[2] // k.shape[2], dtype(q.shape[-1] ** -0.5)
    for b, head in np.ndindex(q.shape[0], k.shape[2]):
        keys = slice(None) if scene.valid is None else slice(0, int(scene.valid[b].sum()))
        rows, heads = keys if _is_self_attention(scene) else slice(None), slice(head * group, (head + 1) * group)
        query, cotangent = (x[b, rows, heads].reshape(-1, x.shape[-1]) for x in (q, g))  # every query head's rows, one after the other
        key, value = k[b, keys, head], v[b, keys, head]
        logits = query @ key.T * scale
        weights = np.exp(logits - logits.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        dweights = low(cotangent @ value.T)
        dlogits = tensor_core(weights * (dweights - (dweights * weights).sum(1, keepdims=True)) * scale)
        out[b, rows, heads] = low(low(weights) @ value).reshape(out[b, rows, heads].shape)
        dq[b, rows, heads] = low(dlogits @ key).reshape(dq[b, rows, heads].shape)
        dk[b, keys, head], dv[b, keys, head] = low(dlogits.T @ query), low(low(weights).T @ cotangent)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def run(backend: str, strategy: str, scene: Scene) -> dict[str, np.ndarray]:
    """Output and gradients of a backend's strategy on bfloat16 inputs, as float64."""
    module = importlib.import_module(f"pi05.{backend}_backend.attention")
    live = np.float32(1.0) if strategy != "explicit" or not _is_self_attention(scene) or scene.valid is None else scene.valid[:, :, None, None]
    # Explicit attention lets padding queries attend like any other, because nobody reads them.
    arrays = module.attention_and_gradients(scene.q, scene.k, scene.v, scene.valid, scene.g * live, strategy=strategy)
    return {name: np.asarray(x, np.float64) * (live if name == "out" else 1.0) for name, x in zip(("out", "dq", "dk", "dv"), arrays, strict=True)}


def judge(attend: Callable[[Scene], dict[str, np.ndarray]], name: str, shape: Shape) -> Verdict:
    """Compares an implementation of attention and its gradients, and plain bfloat16 attention, with the truth."""
    scene, want, plain = make_case(name, shape)
    got, worst, where = attend(scene), 0.0, "out"
    for tensor, true in want.items():
        if not np.isfinite(got[tensor]).all():
            return Verdict(name, np.inf, tensor, f"{tensor} is not finite")
        dead = got[tensor][~_live(tensor, scene)]
        if dead.any():
            return Verdict(name, np.inf, tensor, f"{tensor} is not zero in dead rows, up to {np.abs(dead).max():.1e}")
        for norm in (np.linalg.norm, lambda x: np.abs(x).max()):
            floor = FLOOR / 2 * norm(true.ravel())
            ratio = norm((got[tensor] - true).ravel()) / max(norm((plain[tensor] - true).ravel()), floor)
            worst, where = max((worst, where), (float(ratio), tensor))
    return Verdict(name, worst, where, "" if worst <= LIMIT else f"the error of {where} is {worst:.1f} times that of plain bfloat16 attention")


def check_strategy(backend: str, strategy: str, shapes: list[Shape]) -> Iterator[tuple[Shape, Verdict]]:
    """The verdict on every scene in every shape."""
    for shape in shapes:
        for name in SCENES:
            yield shape, judge(functools.partial(run, backend, strategy), name, shape)


def shapes_of(spec: ModelSpec, cameras: int, token_len: int) -> list[Shape]:
    """The calls of attention that one forward pass of the model makes."""
    prefix, trunk, vision = spec.prefix_len(cameras, token_len), spec.trunk, spec.vision
    heads = {"heads": trunk.num_heads, "kv_heads": trunk.num_kv_heads, "head_dim": trunk.head_dim}
    return [
        Shape(prefix, prefix, **heads),
        Shape(spec.action_horizon, prefix + spec.action_horizon, **heads),
        Shape(vision.num_patches, vision.num_patches, vision.num_heads, vision.num_heads, vision.head_dim, padded=False),
    ]


def round_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 array of the nearest bfloat16 values, ties to even."""
    return _round_mantissa(x, 7)


def _round_mantissa(x: np.ndarray, bits: int) -> np.ndarray:
    words, dropped = np.ascontiguousarray(x, np.float32).view(np.uint32), 23 - bits
    half = np.uint32((1 << (dropped - 1)) - 1)
    return ((words + half + ((words >> dropped) & 1)) & np.uint32(0xFFFFFFFF << dropped & 0xFFFFFFFF)).view(np.float32)


def _is_self_attention(scene: Scene) -> bool:
    return scene.q.shape[1] == scene.k.shape[1]


def _live(name: str, scene: Scene) -> np.ndarray:
    """bool[B, T or S], the rows that may be other than zero."""
    if scene.valid is None or (name in ("out", "dq") and not _is_self_attention(scene)):
        return np.ones(getattr(scene, {"out": "q", "dq": "q", "dk": "k", "dv": "v"}[name]).shape[:2], bool)
    return scene.valid


def _unit(x: np.ndarray) -> np.ndarray:
    """One fixed direction of entries +-1 in the head's space."""
    return np.where(np.arange(x.shape[-1]) % 2, 1.0, -1.0) * np.ones_like(x)


def _apart(q: np.ndarray) -> float:
    """So that -c^2 H / sqrt(H) is about -150."""
    return float(np.sqrt(150.0 / np.sqrt(q.shape[-1])))
