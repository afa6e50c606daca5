"""A trained checkpoint as a function from what a robot sees to what it should do."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pi05.backend import Backend, Device, load_backend
from pi05.batch import Observation, make_draws
from pi05.checkpoint import load_params, locate_checkpoint
from pi05.config import TrainConfig, get_config
from pi05.data.collate import fill_text
from pi05.data.norm_stats import NormStats
from pi05.data.run_data import make_pipeline
from pi05.data.tokenizer import load_tokenizer
from pi05.data.transforms import Pipeline
from pi05.interop.sources import open_source
from pi05.recipe import Groups, Recipe
from pi05.spec import Compute, ModelSpec


@dataclasses.dataclass(frozen=True)
class Policy:
    """Weights, transforms and backend of a checkpoint.

    pipeline: the robot's side. config: of the run; None for a converted checkpoint, which has none. seed: of the noise that actions are
    sampled from. num_steps: Euler steps of sampling.
    """

    backend: Backend
    state: Any
    pipeline: Pipeline
    config: TrainConfig | None
    seed: int = 0
    num_steps: int = 10

    def infer(self, observation: Mapping[str, Any], *, index: int = 0, default_prompt: str | None = None) -> np.ndarray:
        """The robot's next actions, float32[A, D], in its own units, for one observation as a client sends it (Robot.from_client).

        index: counts the calls; equal (seed, index) give equal noise, so that both backends give the same actions.

        Raises:
            DataError: something is missing or not finite; names it.
        """
        return self.infer_rows([self.pipeline.robot.from_client(observation, default_prompt)], [index])[0]

    def infer_rows(self, rows: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> np.ndarray:
        """float32[B, A, D] for rows under the dataset's column names."""
        samples = [self.pipeline(row) for row in rows]
        size = (len(rows), self.backend.spec.max_token_len)
        text = {"tokens": np.zeros(size, np.int32), "token_mask": np.zeros(size, bool)}
        fill_text(text, [sample["tokens"] for sample in samples])
        images, image_mask = (np.stack([sample[key] for sample in samples]) for key in ("images", "image_mask"))
        noise = make_draws(self.backend.spec, self.seed, 0, np.asarray(indices)).noise
        actions = self.backend.sample_actions(self.state, Observation(images, image_mask, **text), noise, self.num_steps)
        column = self.pipeline.robot.state_column
        return np.stack([self.pipeline.inverse(chunk, row[column]) for chunk, row in zip(actions, rows, strict=True)])


def load_policy(
    checkpoint: Path, *, backend: str | None = None, device: Device = "auto", compute: Compute | None = None, seed: int = 0, num_steps: int = 10
) -> Policy:
    """The policy of a run's checkpoint, of a run's newest one, or of what `pi05.convert --to pi05` wrote.

    backend: default the one that trained it, for a converted checkpoint jax. compute: default as it was trained, for a converted one Compute().

    Raises:
        CheckpointError: there is no whole checkpoint, or it does not say what a robot needs.
        ConfigError, DataError: its config or its data assets do not fit this release.
        SpecError: the backend cannot honour `compute` on this device.
    """
    folder = locate_checkpoint(checkpoint)
    config = get_config(str(folder / "config.yaml")) if (folder / "config.yaml").is_file() else None
    spec, pipeline = _converted(folder) if config is None else (config.spec(), _trained(folder, config))
    name, computes, groups = ("jax", Compute(), _groups(spec)) if config is None else (config.backend, config.compute, config.groups)
    engine = load_backend(backend or name, spec, compute or computes, Recipe(groups), device=device)
    return Policy(engine, engine.init_policy(load_params(folder, spec)), pipeline, config, seed, num_steps)


def _trained(folder: Path, config: TrainConfig) -> Pipeline:
    """The transforms of a run's checkpoint, from the files beside its weights."""
    data = config.data
    options = {"max_token_len": config.spec().max_token_len, "discrete_state": data.discrete_state, "overflow": data.overflow}
    return make_pipeline(config, NormStats.load(folder / "norm_stats.json"), load_tokenizer(folder / "tokenizer.model", **options))


def _converted(folder: Path) -> tuple[ModelSpec, Pipeline]:
    """Model and transforms of a converted checkpoint, as its pi05.json has them."""
    source = open_source(folder)
    spec, assets = source.spec, source.assets
    assets.require(folder, robot=True)
    tokenizer = load_tokenizer(assets.tokenizer, max_token_len=spec.max_token_len, discrete_state=assets.discrete_state)
    return spec, Pipeline(spec, assets.load_robot(), assets.norm_stats, tokenizer, normalization=assets.normalization, floor=assets.floor)


def _groups(spec: ModelSpec) -> Groups:
    """Groups that fit a model with adapters; nothing is trained here."""
    return Groups(**{group: "lora" for group in ("vision", "trunk", "expert") if spec.lora(group) is not None})
