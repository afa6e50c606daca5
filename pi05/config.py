"""What a training run is: one validated, frozen TrainConfig, read from a YAML file whose stem is its name.

    python -m pi05.config list | explain NAME [--any.field value] | docs

docs/configs.md lists every field. Each of them is honoured by both backends or refused here; a new one needs its reader first.
"""

import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import yaml
from pydantic import ConfigDict, Field

from pi05.backend import BackendName, Device
from pi05.batch import LossDims, PaddedSteps
from pi05.config_files import (
    NAME,
    PLACE,
    SUFFIX,
    Tree,
    clean,
    find_config,
    find_origin,
    item_kind,
    merge,
    parse_fields,
    read_layers,
    read_overrides,
    section_fields,
)
from pi05.data.augment import Augmentation
from pi05.data.tokenizer import Overflow
from pi05.data.transforms import FLOOR, LIMIT, Normalization, suggest
from pi05.errors import ConfigError, SpecError
from pi05.recipe import AdamW, Groups, Recipe
from pi05.robots import Robot, load_robot, robot_names
from pi05.schedule import Schedule
from pi05.spec import Compute, LoRA, ModelSpec

RANDOM = "random"


def _check_place(value: str) -> str:
    """Refuses a relative path that looks like a Hub id."""
    if not value.startswith((".", "/", "~")) and "://" not in value and value != RANDOM:
        if Path(value).exists():
            raise ConfigError(f"{value!r} reads as a Hub id, but there is such a path here. Write ./{value} if you mean it.")
        if value.count("/") < 1:
            raise ConfigError(f"{value!r} is no path (./, ../, / or ~ in front), no Hub id (owner/name) and no URL.")
    return value


Place = Annotated[str, PLACE, pydantic.AfterValidator(_check_place)]
Count = Annotated[int, Field(ge=1)]
Interval = Annotated[int, Field(ge=0)]
Mapped = Annotated[Mapping[str, str | None], pydantic.AfterValidator(types.MappingProxyType), pydantic.PlainSerializer(dict)]


class Section(pydantic.BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class AdapterConfig(Section):
    """Low-rank adapters by group, each {rank, alpha} or null for none; what they compute is scaled by alpha / rank.

    openpi's variants are trunk {rank: 16, alpha: 16} and expert {rank: 32, alpha: 32}.
    """

    vision: LoRA | None = Field(None, description="adapters of SigLIP")
    trunk: LoRA | None = Field(None, description="adapters of Gemma 2B")
    expert: LoRA | None = Field(None, description="adapters of the action expert")


class ModelConfig(Section):
    """Which model."""

    preset: str = Field(description="sizes: `pi05` (3.35 G parameters, the published one) or `tiny` (same structure, for a CPU)")
    action_horizon: int | None = Field(None, description="steps of an action chunk; null: the preset's")
    action_dim: int | None = Field(None, description="dims of the padded action vector; null: the preset's, as published weights need")
    max_token_len: int | None = Field(None, description="longest prompt in tokens, a limit and not a size; null: the preset's")
    lora: AdapterConfig = Field(AdapterConfig(), description="adapters")


class DatasetConfig(Section):
    """One LeRobot dataset (v2.0, v2.1 or v3.0), by `path` or by `repo_id`."""

    path: Path | None = Field(None, description="its folder; read without any network")
    repo_id: str | None = Field(None, description="its id on the Hub, such as lerobot/aloha_sim; downloaded once")
    revision: str | None = Field(None, description="of `repo_id`: branch, tag or commit")
    weight: float | None = Field(None, gt=0, description="share of the samples, relative to the other datasets; null (for all): every frame once an epoch")
    episodes: tuple[int, ...] | None = Field(None, description="episode numbers to use; null: all")
    exclude: tuple[int, ...] = Field((), description="episode numbers to leave out")

    @property
    def source(self) -> Path | str:
        """What data.dataset.open_dataset takes."""
        return self.path if self.path is not None else str(self.repo_id)

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.repo_id is None):
            raise ConfigError("A dataset needs either `path` (a folder) or `repo_id` (on the Hub), the other one null.")
        if self.revision is not None and self.path is not None:
            raise ConfigError("revision belongs to repo_id; a folder has none. Remove it.")
        return self


class DataConfig(Section):
    """What the model sees."""

    datasets: tuple[DatasetConfig, ...] = Field(description="one or several, all of the same robot")
    robot: str = Field(description="a file of pi05/robots, or a module of yours by its dotted path (docs/add_a_robot.md)")
    cameras: Mapped = Field(
        {}, description="changes to the robot's cameras, {slot: column}; a slot that is null is neither read nor computed", validate_default=True
    )
    accept_fps: tuple[float, ...] = Field((), description="rates of datasets, besides the robot's own, that may be taken for it")
    norm_stats: Path | None = Field(
        None, description="statistics to normalise with, written by scripts/compute_norm_stats.py; null: computed from the datasets"
    )
    normalization: Normalization = Field("quantile", description="quantile (Pi0.5) or mean and deviation")
    floor: float = Field(FLOOR, ge=0, description="narrowest range of a dim, as a share of the robot's own range; 0 is openpi's behaviour")
    limit: float = Field(LIMIT, gt=0, description="largest normalised value of a real step; beyond it the run stops")
    tokenizer: Place = Field(description="sentencepiece model: a path, owner/name of the Hub, or a URL such as gs://big_vision/paligemma_tokenizer.model")
    discrete_state: bool = Field(True, description="the state is part of the prompt; false for openpi's pi05_libero")
    overflow: Overflow = Field("error", description="of a prompt beyond model.max_token_len; shorten_task cuts words from the task's end, never the state")
    augmentation: Augmentation = Field("openpi", description="of training images, see pi05/data/augment.py")
    holdout_episodes: int | tuple[int, ...] = Field(
        0, description="not trained on, for evaluation: the last N episodes of each dataset, or, of one dataset, a list of numbers"
    )
    num_workers: Interval = Field(2, description="loader processes; 0 reads in the main one")

    @property
    def weights(self) -> tuple[float, ...] | None:
        """What data.dataset.mix takes."""
        weights = tuple(dataset.weight for dataset in self.datasets if dataset.weight is not None)
        return weights or None

    def load_robot(self) -> Robot:
        """The robot with `cameras` applied.

        Raises:
            DataError: there is no such module, or the description contradicts itself.
        """
        robot = load_robot(self.robot)
        return robot.replace(cameras={**robot.cameras, **self.cameras}) if self.cameras else robot

    @pydantic.field_validator("robot")
    @classmethod
    def _check_robot(cls, name: str) -> str:
        if "." not in name and name not in robot_names():
            raise ConfigError(
                f"data.robot: there is no robot {name!r}. {suggest(name, robot_names())} A private one is named by its module, my_lab.arms.my_arm."
            )
        return name

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if not self.datasets:
            raise ConfigError("data.datasets is empty; it needs at least one `path` or `repo_id`.")
        weighted = [dataset.weight is not None for dataset in self.datasets]
        if any(weighted) and not all(weighted):
            raise ConfigError(f"data.datasets.{weighted.index(False)} has no weight, another one has. Give every dataset a weight, or none.")
        holdout = self.holdout_episodes
        if isinstance(holdout, int):
            if holdout < 0:
                raise ConfigError(f"data.holdout_episodes is {holdout}; it must be 0 or more, or a list of episode numbers.")
        elif len(self.datasets) > 1:
            raise ConfigError("data.holdout_episodes lists episode numbers, which mean nothing for several datasets. Say how many of each.")
        elif both := sorted(set(holdout) & set(self.datasets[0].exclude)):
            raise ConfigError(f"Episode {both[0]} is in data.holdout_episodes and in exclude. Take it out of one.")
        return self


class WandbConfig(Section):
    """Weights & Biases. The run never waits for it; TensorBoard is always written."""

    enabled: bool = Field(False, description="log there as well")
    project: str = Field("pi05", description="name of the project")
    entity: str | None = Field(None, description="user or team; null: your default one")


class TrainConfig(Section):
    """A training run."""

    name: str = Field(pattern=f"^{NAME.pattern}$", description="the file's stem; only a file that to_yaml wrote holds it")
    model: ModelConfig = Field(description="which model")
    compute: Compute = Field(Compute(), description="how it computes")
    data: DataConfig = Field(description="what it sees")
    weights: Place = Field(description="to start from: a checkpoint's path, owner/name of the Hub, a gs:// URL, or `random`, which has to be written out")
    on_shape_mismatch: Literal["error", "slice", "reinit"] = Field(
        "error",
        description="of weights with another action_dim than model.action_dim: slice keeps the first dims, reinit starts these tensors anew; "
        "to pad the data instead, give model.action_dim the weights' size",
    )
    schedule: Schedule = Field(Schedule(), description="learning rate")
    optimizer: AdamW = Field(AdamW(), description="update rule")
    groups: Groups = Field(Groups(), description="what of the model learns")
    ema_decay: float | None = Field(0.99, description="moving average of the weights, which is then what acts; null: none")
    grad_accum_steps: Count = Field(1, description="equal parts in which a batch is computed, for memory; the gradient is the whole batch's")
    padded_steps: PaddedSteps = Field("ignore", description="steps behind an episode's end, in the loss and in statistics; count: as openpi does")
    loss_dims: LossDims = Field("model", description="action dims in the loss: the padded vector, as openpi, or the robot's own (real)")
    backend: BackendName = Field("jax", description="framework that computes")
    device: Device = Field("auto", description="auto: the GPU where there is one")
    seed: int = Field(42, ge=0, description="of initial weights, order, noise, times and augmentation")
    batch_size: Count = Field(32, description="samples of a step")
    num_train_steps: Count = Field(30_000, description="steps of the whole run")
    log_interval: Count = Field(100, description="steps between lines of the log; the loss of every step is recorded")
    eval_interval: Interval = Field(0, description="steps between evaluations on held-out episodes; 0: only at the end")
    save_interval: Count = Field(1_000, description="steps between checkpoints; the last step is always saved")
    keep_last: Count = Field(1, description="newest checkpoints that are kept")
    keep_period: Count | None = Field(None, description="checkpoints of every such step are kept for good; null: none")
    keep_best: bool = Field(False, description="the checkpoint with the best evaluation is kept too")
    max_bad_steps: Count = Field(1, description="steps with a loss or gradient that is not finite before the run stops")
    checkpoint_dir: Path = Field(default_factory=lambda: Path.cwd() / "checkpoints", description="runs are saved in checkpoint_dir/name/exp_name")
    exp_name: str = Field("run", pattern=f"^{NAME.pattern}$", description="name of this run of the config (`--exp-name`)")
    wandb: WandbConfig = Field(WandbConfig(), description="Weights & Biases")

    def spec(self) -> ModelSpec:
        """The model.

        Raises:
            SpecError: there is no such preset, or sizes contradict each other.
        """
        sizes = {name: size for name in ("action_horizon", "action_dim", "max_token_len") if (size := getattr(self.model, name)) is not None}
        adapters = {f"{group}__lora": getattr(self.model.lora, group) for group in section_fields(AdapterConfig)}
        return ModelSpec.preset(self.model.preset).replace(**sizes, **adapters)

    def recipe(self) -> Recipe:
        """What one step does."""
        return Recipe(self.groups, self.optimizer, self.ema_decay, self.grad_accum_steps, self.padded_steps, self.loss_dims)

    @property
    def run_dir(self) -> Path:
        """Where this run's checkpoints are."""
        return self.checkpoint_dir / self.name / self.exp_name

    def to_yaml(self) -> str:
        """Every field, the name too, for parse_yaml; paths are absolute. get_config reads such a file by its path."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        self.recipe().trains(self.spec())
        if self.batch_size % self.grad_accum_steps:
            raise ConfigError(f"batch_size {self.batch_size} does not divide into grad_accum_steps {self.grad_accum_steps} equal parts. Change one of them.")
        if self.compute.dtype == "float64":
            raise ConfigError("compute.dtype is 'float64', which only the proof in parity/ uses: weights are trained in float32. Take float32 or bfloat16.")
        if self.compute.attention == "fused" and self.device == "cpu":
            raise ConfigError("compute.attention is 'fused', whose kernels run on a GPU, but device is 'cpu'. Set compute.attention to explicit.")
        if not self.data.holdout_episodes and (wants := [name for name in ("eval_interval", "keep_best") if getattr(self, name)]):
            raise ConfigError(f"{wants[0]} asks for evaluations, but data.holdout_episodes holds out nothing. Set it, or set {wants[0]} to its default.")
        if self.keep_best and not self.eval_interval:
            raise ConfigError("keep_best needs evaluations to compare, but eval_interval is 0 (only at the end). Set eval_interval.")
        return self


def get_config(name: str, overrides: Mapping[str, str] | None = None) -> TrainConfig:
    """The config with this name, or of the file with this path (.yaml).

    overrides: dotted field to text, as on the command line: {"schedule.peak_lr": "1e-4"}.

    Raises:
        ConfigError: no such config or field (gives the nearest), a value of the wrong type, or values that contradict each other.
    """
    return load_config(name, overrides)[0]


def load_config(name: str, overrides: Mapping[str, str] | None = None) -> tuple[TrainConfig, dict[str, str]]:
    """get_config, and the origin of each dotted name that a file or the command line sets (see config_files.find_origin)."""
    path = find_config(name)
    layers = read_layers(path, TrainConfig)
    if overrides:
        layers.append(read_overrides(overrides, TrainConfig))
    tree, origins = merge(layers)
    saved = name.endswith(SUFFIX) and origins.get("name") == f"file {path.name}"  # by to_yaml
    if "name" in tree and not saved:
        raise ConfigError(f"{path}: name is set by the {origins['name']}, but a config's name is the stem of its file. Remove it.")
    return _validate({"name": path.stem} | tree, str(path), origins), origins


def parse_yaml(text: str, *, where: str) -> TrainConfig:
    """The config that to_yaml wrote. `where` is for messages.

    Raises:
        ConfigError: a field is missing, unknown or wrong; lists everything.
    """
    return _validate(clean(parse_fields(text, where), TrainConfig, where=where, folder=Path.cwd()), where, {})


def _validate(tree: Tree, where: str, origins: Mapping[str, str]) -> TrainConfig:
    try:
        return TrainConfig.model_validate_json(json.dumps(tree, default=str))  # JSON: strict types, but lists for tuples
    except pydantic.ValidationError as error:
        lines = list(dict.fromkeys(_explain_error(detail, origins) for detail in error.errors()))
    raise ConfigError("\n  ".join([f"{where}:", *lines]) if len(lines) > 1 else f"{where}: {lines[0]}")


def _explain_error(detail: Any, origins: Mapping[str, str]) -> str:
    cause = detail.get("ctx", {}).get("error")
    name, description = _locate(detail["loc"])
    if isinstance(cause, (ConfigError, SpecError)):
        named = not name or name in str(cause) or f"{name.partition('.')[0]}." in str(cause)
        return str(cause) if named else f"{name}: {cause}"
    if detail["type"] == "missing":
        return f"{name} is missing{f': {description}' if description else ''}."
    message = detail["msg"].replace("Input should be", "it must be")
    return f"{name} is {detail['input']!r} ({find_origin(origins, name)}); {message}."


def _locate(loc: tuple[str | int, ...]) -> tuple[str, str | None]:
    """Dotted name and description of the field that pydantic points at; its marks of union members are left out."""
    kind: Any = TrainConfig
    name, description = [], None
    for part in loc:
        fields = section_fields(kind)
        if isinstance(part, int) and item_kind(kind) is not None:
            kind, description = item_kind(kind), None
        elif part in fields:
            described = getattr(kind, "model_fields", {}).get(part)
            kind, description = fields[part], described.description if described else None
        elif not isinstance(part, int):
            continue
        name.append(str(part))
    return ".".join(name), description


if __name__ == "__main__":
    import sys

    from pi05.config_cli import main

    sys.exit(main(sys.argv[1:]))
