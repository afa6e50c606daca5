"""Everything a config's `data` section names, opened and checked against the model: what training, evaluation and the doctor read."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from pi05.config import DatasetConfig, TrainConfig
from pi05.data.dataset import Dataset, find_dataset, mix, open_dataset
from pi05.data.loader import Loader, make_loader
from pi05.data.measure import compute_norm_stats, make_fingerprint
from pi05.data.norm_stats import NormStats
from pi05.data.tokenizer import Tokenizer, load_tokenizer
from pi05.data.transforms import Pipeline
from pi05.errors import DataError
from pi05.robots import Robot
from pi05.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class RunData:
    """The data of a run.

    train, holdout: rows to learn from and rows to judge with; holdout is None where the config holds out nothing.
    pipeline: rows to samples and back. stats_origin: where the statistics are from, for a person.
    """

    config: TrainConfig
    spec: ModelSpec
    train: Dataset
    holdout: Dataset | None
    pipeline: Pipeline
    stats_origin: str

    def make_loader(self) -> Loader:
        """The loader of training batches."""
        data = self.config.data
        return make_loader(
            self.train,
            self.pipeline,
            self.spec,
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            num_workers=data.num_workers,
            augmentation=data.augmentation,
            cameras=self.pipeline.slots,
        )


@dataclasses.dataclass(frozen=True)
class Split:
    """One dataset's episodes. source: its folder or Hub id. root: its folder here."""

    source: Path | str
    revision: str | None
    root: Path
    train: tuple[int, ...]
    holdout: tuple[int, ...]
    unused: tuple[int, ...]


def open_run_data(config: TrainConfig, stats: NormStats | None = None, *, images: bool = True) -> RunData:
    """Opens datasets, statistics and tokenizer.

    stats: those of a checkpoint; None takes the config's, or computes them from the episodes that are trained on.
    images: False where nothing but numbers is read; the videos need not exist.

    Raises:
        DataError: a dataset, an episode, the statistics, the tokenizer or the robot does not fit the others.
    """
    spec, data, robot = config.spec(), config.data, config.data.load_robot()
    splits = [split_episodes(dataset, data.holdout_episodes) for dataset in data.datasets]

    def open_part(part: str) -> Dataset | None:
        chosen = [(split, getattr(split, part)) for split in splits if getattr(split, part)]
        options = {"robot": robot, "action_horizon": spec.action_horizon, "images": images, "accept_fps": data.accept_fps}
        opened = [open_dataset(split.source, episodes=episodes, revision=split.revision, **options) for split, episodes in chosen]
        return mix(opened, data.weights if part == "train" else None, accept_fps=data.accept_fps) if opened else None

    tokenizer = load_tokenizer(data.tokenizer, max_token_len=spec.max_token_len, discrete_state=data.discrete_state, overflow=data.overflow)
    origin = "the checkpoint"
    if stats is None:
        stats, origin = _find_stats(config, spec, robot, splits)
    return RunData(config, spec, open_part("train"), open_part("holdout"), make_pipeline(config, stats, tokenizer), origin)


def make_pipeline(config: TrainConfig, stats: NormStats, tokenizer: Tokenizer) -> Pipeline:
    """The transforms of a config.

    Raises:
        DataError: robot, statistics, tokenizer and model do not fit together.
    """
    data = config.data
    return Pipeline(config.spec(), data.load_robot(), stats, tokenizer, normalization=data.normalization, floor=data.floor, limit=data.limit)


def split_episodes(dataset: DatasetConfig, holdout: int | Sequence[int]) -> Split:
    """Which of a dataset's episodes are for what.

    holdout: episode numbers, or how many of the last of those that are used.

    Raises:
        DataError: there is no such episode, or none is left to train on.
    """
    folder = find_dataset(dataset.source, revision=dataset.revision)
    numbers = folder.episodes.numbers.tolist()
    folder.check_episodes({*(dataset.episodes or ()), *dataset.exclude, *(() if isinstance(holdout, int) else holdout)})
    used = [number for number in (numbers if dataset.episodes is None else sorted(set(dataset.episodes))) if number not in dataset.exclude]
    held = used[len(used) - min(holdout, len(used)) :] if isinstance(holdout, int) else [number for number in used if number in holdout]
    train = [number for number in used if number not in held]
    if not train:
        raise DataError(f"{folder.name}: none of {len(numbers)} episodes is left to train on; {len(held)} are held out, {len(dataset.exclude)} excluded.")
    unused = tuple(number for number in numbers if number not in train)
    return Split(dataset.source, dataset.revision, folder.root, tuple(train), tuple(held), unused)


def _find_stats(config: TrainConfig, spec: ModelSpec, robot: Robot, splits: Sequence[Split]) -> tuple[NormStats, str]:
    roots = [split.root for split in splits]
    options: Mapping = {"action_horizon": spec.action_horizon, "padded_steps": config.padded_steps, "exclude": [split.unused for split in splits]}
    path = config.data.norm_stats
    if path is None:
        return compute_norm_stats(roots, robot, **options), "computed from the training episodes"
    stats = NormStats.load(path)
    stats.check_fingerprint(make_fingerprint(roots, robot, **options))
    return stats, str(path)
