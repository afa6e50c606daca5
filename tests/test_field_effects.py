"""Every field of a config does what it says, or is refused: no backend ignores one in silence.

Here: a run with the field changed hands something else to its backend, and nothing but that; seen by a backend that writes down all it is
given. What both backends do with it: test_backend_effects.py.
"""

import dataclasses
import functools
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.console

import pi05.train
from pi05.batch import Batch, Draws, LossParts, Observation
from pi05.config import TrainConfig, get_config
from pi05.config_cli import RunFlags
from pi05.config_files import field_names
from pi05.errors import NonFiniteLoss, Pi05Error
from pi05.metrics import read_log
from pi05.run_folder import list_steps
from pi05.spec import ModelSpec
from pi05.train_state import StepMetrics, TrainState

ROOT = Path(__file__).resolve().parents[1]
BASE = {
    "data.datasets.0.episodes": "[0, 5]",
    "data.holdout_episodes": "[5]",
    "data.num_workers": "0",
    "batch_size": "2",
    "num_train_steps": "2",
    "schedule.warmup_steps": "1",
    "schedule.decay_steps": "4",
}
MODEL = {"spec", "weights"}
BATCHES, DATA = {"batches"}, {"batches", "stats"}


@dataclasses.dataclass(frozen=True)
class Effect:
    """value: of the changed field. parts: what a run does differently then, see Recorder. given: fields in both runs that are compared.

    at: the name that is set, where it is one that holds the field. "{run}" in a value is the folder of the run with nothing changed.
    """

    value: str
    parts: set[str]
    given: dict[str, str] = dataclasses.field(default_factory=dict)
    at: str = ""


@dataclasses.dataclass(frozen=True)
class Refused:
    """value: of the changed field, which is an error with this text. instead: a value that is none, all else equal."""

    value: str
    text: str
    given: dict[str, str] = dataclasses.field(default_factory=dict)
    instead: str = ""


def lora(group: str) -> dict[str, str]:
    return {f"model.lora.{group}.rank": "2", f"model.lora.{group}.alpha": "2.0", f"groups.{group}": "lora"}


def two_datasets(weight: float) -> str:
    dataset = f"path: {ROOT}/data/metaworld_mini, weight"
    return f"[{{{dataset}: {weight}, episodes: [0]}}, {{{dataset}: 1.0, episodes: [6]}}]"


THREE, FOUR = {"num_train_steps": "3"}, {"num_train_steps": "4", "save_interval": "1"}
OTHER = {"data.datasets.0.episodes": "[0, 1, 5]"}
RULE = {"b1": "0.5", "b2": "0.5", "eps": "1e-3", "weight_decay": "0.1", "clip_norm": "0.1"}
EFFECTS: dict[str, Effect | Refused] = {
    "model.preset": Refused("tinny", "no model preset 'tinny'"),
    "model.action_horizon": Effect("6", {"spec", "batches", "stats", "draws"}),
    "model.action_dim": Effect("9", {"spec", "weights", "batches", "draws"}),
    "model.max_token_len": Effect("80", {"spec"}),
    **{f"model.lora.{group}.rank": Effect("3", MODEL, lora(group)) for group in ("vision", "trunk", "expert")},
    **{f"model.lora.{group}.alpha": Effect("3.0", {"spec"}, lora(group)) for group in ("vision", "trunk", "expert")},
    "compute.dtype": Effect("bfloat16", {"compute"}),
    "compute.attention": Refused("fused", "kernels run on a GPU, but device is 'cpu'"),
    "compute.attention_dtype": Effect("bfloat16", {"compute"}),
    "compute.allow_unsafe": Effect("true", {"compute"}),
    "compute.batch_cameras": Effect("false", {"compute"}),
    "compute.remat": Effect("layer", {"compute"}),
    "data.datasets.0.repo_id": Refused("owner/name", "needs either"),
    "data.datasets.0.revision": Refused("main", "revision belongs to repo_id"),
    "data.datasets.0.weight": Effect(two_datasets(9.0), BATCHES, {"data.datasets": two_datasets(1.0), "data.holdout_episodes": "0"}, "data.datasets"),
    "data.datasets.0.episodes": Effect("[0, 1, 5]", DATA),
    "data.datasets.0.exclude": Effect("[1]", DATA, OTHER),
    "data.robot": Refused("libero", "no number column 'state' that robot 'libero' reads"),
    "data.cameras": Effect("{left_wrist_0_rgb: null}", BATCHES),
    "data.norm_stats": Refused("{run}/checkpoints/2/norm_stats.json", "episodes|other", OTHER),
    "data.normalization": Effect("zscore", BATCHES),
    "data.floor": Effect("1.5", BATCHES),
    "data.limit": Refused("0.01", "beyond the limit 0.01"),
    "data.tokenizer": Refused("./no_such.model", "There is no tokenizer file"),
    "data.discrete_state": Effect("false", BATCHES),
    "data.overflow": Refused("error", "The prompt has 33 tokens", {"model.max_token_len": "30"}, "shorten_task"),
    "data.augmentation": Effect("standard", {"draws"}),
    "data.holdout_episodes": Effect("0", DATA | {"evaluations"}),
    "on_shape_mismatch": Effect("reinit", {"weights"}, {"weights": "{run}", "model.action_dim": "9", "on_shape_mismatch": "slice"}),
    "weights": Effect("{run}", {"weights"}, {"seed": "7"}),
    "schedule.kind": Effect("constant", {"rates"}, THREE),
    "schedule.peak_lr": Effect("2e-3", {"rates"}),
    "schedule.warmup_steps": Effect("2", {"rates"}),
    "schedule.decay_steps": Effect("3", {"rates"}, THREE),
    "schedule.decay_lr": Effect("1e-5", {"rates"}, THREE),
    "schedule.timescale": Effect("2.0", {"rates"}, THREE | {"schedule.kind": "rsqrt"}),
    **{f"optimizer.{name}": Effect(value, {"recipe"}) for name, value in RULE.items()},
    **{f"groups.{group}": Effect("freeze", {"recipe"}) for group in ("vision", "trunk", "expert", "heads")},
    "ema_decay": Effect("0.5", {"recipe"}),
    "grad_accum_steps": Effect("2", {"recipe"}),
    "padded_steps": Effect("count", {"recipe", "stats"}),
    "loss_dims": Effect("real", {"recipe"}),
    "device": Effect("auto", {"device"}),
    "backend": Effect("torch", {"backend"}),
    "seed": Effect("7", {"weights", "batches", "draws"}),
    "batch_size": Effect("3", {"batches", "draws"}),
    "num_train_steps": Effect("3", {"batches", "draws", "rates", "norms", "saves", "evaluations"}),
    "log_interval": Effect("1", {"norms"}),
    "eval_interval": Effect("1", {"evaluations"}),
    "save_interval": Effect("1", {"saves"}, {"keep_last": "9"}),
    "keep_last": Effect("2", {"saves"}, FOUR),
    "keep_period": Effect("3", {"saves"}, FOUR),
    "keep_best": Effect("true", {"saves"}, FOUR | {"eval_interval": "1"}),
    "max_bad_steps": Effect("2", {"stopped", "evaluations"}, {"schedule.peak_lr": "666.0"}),  # the recorder's loss is NaN at this rate
}
# Fields that decide nothing about numbers, and why.
NEUTRAL = {
    "name": "the file's stem, the name of the run's folder",
    "exp_name": "the name of the run's folder",
    "checkpoint_dir": "where the run's folder is",
    "data.datasets.0.path": "where the data are; that other data are other batches is shown by the field `episodes`",
    "data.num_workers": "who reads the batches; tests/data/test_loader.py shows that they are equal",
    "data.accept_fps": "which datasets are taken for the robot's; tests/data/test_dataset.py",
    "wandb.enabled": "where numbers are shown; tests/test_sinks.py",
    "wandb.project": "where numbers are shown; tests/test_sinks.py",
    "wandb.entity": "where numbers are shown; tests/test_sinks.py",
}


class Recorder:
    """A backend that computes nothing and writes down what it is given, by part."""

    def __init__(self, name: str, spec: ModelSpec, compute: Any, recipe: Any, *, device: str) -> None:
        self.name, self.spec, self.recipe = name, spec, recipe
        self.parts: dict[str, Any] = {"backend": name, "spec": repr(spec), "compute": repr(compute), "recipe": repr(recipe), "device": device}
        self.parts |= {"batches": [], "draws": [], "rates": [], "norms": []}

    def describe(self) -> str:
        return "nothing"

    def peak_memory(self) -> None:
        return None

    def init_state(self, tensors: Iterator[tuple[str, np.ndarray]]) -> int:
        self.params = dict(tensors)
        self.parts["weights"] = digest(self.params)
        return 0

    def train_step(self, state: int, batch: Batch, draws: Draws, lr: float, *, norms: bool) -> tuple[int, StepMetrics]:
        for part, value in (("batches", digest(batch)), ("draws", digest(draws)), ("rates", lr), ("norms", norms)):
            self.parts[part].append(value)
        bad = lr == 666.0
        return state + 1, StepMetrics(np.nan if bad else 1.0, np.ones(self.spec.action_dim), 1.0, not bad, 1.0 if norms else None)

    def eval_step(self, state: int, batch: Batch, draws: Draws) -> LossParts:
        return LossParts(np.ones(len(batch.actions)), np.ones(self.spec.action_dim))

    def sample_actions(self, state: int, observation: Observation, noise: np.ndarray, num_steps: int) -> np.ndarray:
        return np.full_like(noise, state)  # worse every step

    def export_state(self, state: int) -> TrainState:
        return TrainState(state, state, self.params, {}, {}, None)


def digest(value: Any) -> str:
    """A hash of every array in nested dataclasses and dicts."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return hashlib.sha256("".join(f"{name}:{digest(part)};" for name, part in value.items()).encode()).hexdigest()
    return "none" if value is None else hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.tobytes()).hexdigest()


@pytest.fixture(scope="module")
def observe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, str]], dict[str, Any]]:
    """Trains by the real loop on the real data with a Recorder for a backend, and returns what it saw; equal configs once."""

    @functools.cache
    def run(items: tuple[tuple[str, str], ...]) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("effects")
        config = get_config("tiny", dict(items) | {"checkpoint_dir": str(folder)})
        made: list[Recorder] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pi05.train, "load_backend", lambda *args, **options: made.append(Recorder(*args, **options)) or made[0])
            patch.setattr(pi05.train, "first_batch_sheet", lambda *args, **options: None)
            patch.setattr(pi05.train, "loss_curve_png", lambda *args, **options: None)
            stopped = None
            try:
                pi05.train.train(config, RunFlags(), rich.console.Console(file=io.StringIO()))
            except NonFiniteLoss:
                stopped = read_log(config.run_dir / "metrics.jsonl")[-1]["step"]
        evaluations = [line["step"] for line in read_log(config.run_dir / "metrics.jsonl") if "evaluation" in line]
        stats = next((path.read_text() for path in config.run_dir.glob("checkpoints/*/norm_stats.json")), "")
        return made[0].parts | {"saves": list_steps(config.run_dir), "evaluations": evaluations, "stats": stats, "stopped": stopped, "folder": config.run_dir}

    def observe(fields: dict[str, str]) -> dict[str, Any]:
        base = {name: value for name, value in BASE.items() if not any(name.startswith(f"{other}.") for other in fields)}
        if any("{run}" in value for value in fields.values()):
            fields = {name: value.replace("{run}", str(observe({})["folder"])) for name, value in fields.items()}
        return run(tuple(sorted((base | fields).items())))

    return observe


def test_every_field_is_in_the_table_or_says_why_not() -> None:
    every = set(field_names(TrainConfig))
    assert every == EFFECTS.keys() | NEUTRAL.keys(), "a new field needs a line here: what does changing it do?"
    assert not EFFECTS.keys() & NEUTRAL.keys() and all(NEUTRAL.values())


@pytest.mark.parametrize("field", EFFECTS)
def test_a_changed_field_changes_what_it_says_and_nothing_else(observe: Callable, field: str) -> None:
    effect = EFFECTS[field]
    if isinstance(effect, Refused):
        with pytest.raises(Pi05Error, match=effect.text):
            observe(effect.given | {field: effect.value})
        assert not effect.instead or observe(effect.given | {field: effect.instead})["saves"]
        return
    before, after = observe(effect.given), observe(effect.given | {effect.at or field: effect.value})
    changed = {part for part in before if before[part] != after[part]} - {"folder"}
    assert changed == effect.parts
