"""The inputs every implementation is compared on: scenes, and parameters at which a fault shows."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest

from pi05.batch import Batch, Draws, make_draws, synthetic_batch
from pi05.params import philox, rows, shape
from pi05.spec import ModelSpec

SEED = 20_261_201


@dataclasses.dataclass(frozen=True)
class Scene:
    """A named input: spec, parameters, batch and draws. `doubt` says which fault it is there to show."""

    name: str
    spec: ModelSpec
    params: dict[str, np.ndarray]
    batch: Batch
    draws: Draws
    doubt: str


def warm_params(spec: ModelSpec, *, sharpness: float = 1.0) -> dict[str, np.ndarray]:
    """Canonical float32 parameters as after some training: nothing is zero, no norm is neutral, no bias is idle.

    A fresh model hides faults: its modulations, its image projection and its norms' scales are zero. `sharpness` multiplies
    every query projection, so that attention is peaky instead of near-uniform.
    """
    out = {}
    for row in rows(spec):
        size, rng = shape(row, spec), philox(SEED, row.name)
        if row.axes.split()[-1] == "d" and row.name.endswith((".scale", ".bias")):
            values = 0.2 * rng.standard_normal(size) + (1.0 if row.init.kind == "ones" else 0.0)
        elif row.name.endswith(".bias"):
            values = 0.2 * rng.standard_normal(size)
        elif row.name in ("trunk.embed.weight", "vision.pos_embed"):
            values = rng.standard_normal(size) / np.sqrt(size[-1])
        else:
            fan_in = len(row.init.fan_in.split()) or 1
            lead = 1 if row.stacked else 0
            values = rng.standard_normal(size) / np.sqrt(np.prod(size[lead : lead + fan_in]))
        if row.name.endswith("q_proj.weight"):
            values = values * sharpness
        elif row.name.endswith(".lora_b"):
            values = 0.3 * values  # adapters add a part to a weight, they do not drown it
        out[row.name] = values.astype(np.float32)
    return out


@functools.cache
def _params(spec: ModelSpec, sharpness: float) -> dict[str, np.ndarray]:
    return warm_params(spec, sharpness=sharpness)


def _scene(name: str, doubt: str, *, spec: ModelSpec | None = None, sharpness: float = 1.0, batch_size: int = 3, token_len: int = 23, **ragged: bool) -> Scene:
    spec = ModelSpec.tiny() if spec is None else spec
    batch = synthetic_batch(spec, batch_size, seed=SEED, token_len=token_len, **ragged)
    batch.validate(spec)
    return Scene(name, spec, _params(spec, sharpness), batch, make_draws(spec, SEED, 0, np.arange(batch_size)), doubt)


_WHOLE = {"missing_cameras": False, "padded_text": False, "padded_actions": False}


def _ragged() -> Scene:
    return _scene("ragged", "masks and positions: each sample lacks another camera, prompts and chunks end early")


def _all_valid() -> Scene:
    return _scene("all_valid", "the plain case, as a benchmark would run it", **_WHOLE)


def _peaky() -> Scene:
    return _scene("peaky", "softmax, its scale and its precision: a few keys take most of the weight", sharpness=2.5)


def _far() -> Scene:
    spec = ModelSpec.tiny().replace(vision__image_size=224, vision__depth=2, max_token_len=200)
    return _scene(
        "far", "rotary embedding beyond distance 512: the published sequence lengths, 3 x 256 + 200 tokens", spec=spec, batch_size=1, token_len=200, **_WHOLE
    )


SCENES: dict[str, Callable[[], Scene]] = {"ragged": _ragged, "all_valid": _all_valid, "peaky": _peaky, "far": _far}


@functools.cache
def scene(name: str) -> Scene:
    """The scene called `name`, built once."""
    return SCENES[name]()


each_scene = pytest.mark.parametrize("scene_name", SCENES)
# The published lengths cost most and show what no other precision shows better: rotary embedding in float32.
each_scene_and_dtype = pytest.mark.parametrize(
    ("dtype", "scene_name"),
    [*((dtype, name) for dtype in ("float64", "float32", "bfloat16") for name in SCENES if name != "far"), ("float32", "far")],
)
