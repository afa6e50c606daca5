"""What a checkpoint needs beside its weights in order to act, and the file that says so in folders whose format has no place for it."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pi05.data.norm_stats import NormStats, load_openpi
from pi05.data.transforms import FLOOR, Normalization
from pi05.errors import CheckpointError
from pi05.robots.base import Robot, load_robot
from pi05.spec import GemmaSpec, LoRA, ModelSpec, VisionSpec

SIDECAR = "pi05.json"
NORM_STATS = "norm_stats.json"
FORMAT_VERSION = 1
OPENPI_TOKENIZER = "gs://big_vision/paligemma_tokenizer.model"  # the one that openpi always takes
LEROBOT_TOKENIZER = "google/paligemma-3b-pt-224"  # the same, as LeRobot takes it


@dataclasses.dataclass(frozen=True)
class Assets:
    """What turns a robot's numbers into a model's and back; None: the checkpoint does not say.

    norm_stats: statistics of state and actions. asset_id: openpi's name for them. normalization: how they are applied.
    floor: narrowest range of a dim, see transforms.Pipeline. tokenizer: what load_tokenizer takes. discrete_state: whether the prompt holds
    the state. robot: what load_robot takes; cameras: changes to its cameras, slot to column or None.
    choices: ids of all the statistics there are, where one has to be chosen. delta_mask: which action dims are relative, where the format says.
    """

    norm_stats: NormStats | None = None
    asset_id: str | None = None
    normalization: Normalization = "quantile"
    floor: float = FLOOR
    tokenizer: str | None = None
    discrete_state: bool = True
    robot: str | None = None
    cameras: dict[str, str | None] = dataclasses.field(default_factory=dict)
    choices: tuple[str, ...] = ()
    delta_mask: tuple[bool, ...] | None = None

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with those `changes` that are not None."""
        return dataclasses.replace(self, **{name: value for name, value in changes.items() if value is not None})

    def require(self, where: object, *, robot: bool) -> None:
        """Raises unless a policy can be made: here, and not when the robot waits.

        robot: whether the target has a place for the robot and so needs one.

        Raises:
            CheckpointError: names what is missing and the option that gives it.
        """
        needed = {"norm_stats": "--norm-stats FILE", "tokenizer": "--tokenizer ID"} | ({"robot": "--robot NAME"} if robot else {})
        if self.norm_stats is None and self.choices:
            raise CheckpointError(f"{where} has statistics of {', '.join(self.choices)}. Say which: --asset-id ID; or --norm-stats FILE, or --weights-only.")
        if missing := {name: option for name, option in needed.items() if getattr(self, name) is None}:
            raise CheckpointError(
                f"{where} does not say its {', '.join(missing)}, without which no robot can be served. Give {' and '.join(missing.values())}; "
                "or say --weights-only if the result is only to start a training from."
            )

    def load_robot(self) -> Robot:
        """The robot, with its changed cameras.

        Raises:
            CheckpointError: no robot is named, or statistics or relative actions contradict it.
            DataError: there is no such robot.
        """
        if self.robot is None:
            raise CheckpointError("The checkpoint names no robot. Give one: --robot NAME.")
        robot = load_robot(self.robot)
        robot = robot.replace(cameras={**robot.cameras, **self.cameras}) if self.cameras else robot
        sizes = {"state": len(robot.state), "actions": len(robot.actions)}
        for key, stats in (self.norm_stats.fields if self.norm_stats else {}).items():
            if len(stats.mean) < sizes.get(key, 0):
                raise CheckpointError(f"The statistics of {key} have {len(stats.mean)} dims, robot {robot.name!r} has {sizes[key]}. Name another robot.")
        if self.delta_mask is not None and self.delta_mask != tuple(robot.delta_mask.tolist()):
            raise CheckpointError(
                f"The checkpoint's relative action dims are {_numbers(self.delta_mask)}, those of robot {robot.name!r} {_numbers(robot.delta_mask)}. "
                "Name the robot it was trained for."
            )
        return robot


@dataclasses.dataclass(frozen=True)
class Sidecar:
    """The file pi05.json that a conversion leaves beside the tensors: what they cannot say. history: one line a conversion."""

    spec: ModelSpec
    assets: Assets
    history: tuple[str, ...] = ()

    def save(self, folder: Path) -> None:
        """Writes pi05.json, and norm_stats.json where there are statistics."""
        told = {name: value for name, value in vars(self.assets).items() if name not in ("norm_stats", "choices", "delta_mask")}
        content = {"format_version": FORMAT_VERSION, "spec": dataclasses.asdict(self.spec), "assets": told, "history": list(self.history)}
        (folder / SIDECAR).write_text(json.dumps(content, indent=2) + "\n")
        if self.assets.norm_stats is not None:
            self.assets.norm_stats.save(folder / NORM_STATS)

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Reads what `save` wrote; None where there is no such file.

        Raises:
            CheckpointError: the file is of a later release or damaged.
        """
        path = folder / SIDECAR
        if not path.is_file():
            return None
        content = read_json(path)
        if content.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(f"{path} has the format version {content.get('format_version')}; this release reads {FORMAT_VERSION}.")
        try:
            spec, assets = spec_from_dict(content["spec"]), Assets(**content["assets"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}). Remove it to have the model inferred from its tensors.") from error
        return cls(spec, assets.replace(norm_stats=read_norm_stats(folder / NORM_STATS)), tuple(content["history"]))


def _numbers(mask: Sequence[bool]) -> str:
    return ", ".join(str(i) for i, flag in enumerate(mask) if flag) or "none"


def spec_from_dict(content: dict[str, Any]) -> ModelSpec:
    """The spec that dataclasses.asdict took apart."""

    def tower(kind: type, fields: dict[str, Any]) -> Any:
        lora = fields.get("lora")
        return kind(**fields | {"lora": None if lora is None else LoRA(**lora)})

    towers = {"vision": tower(VisionSpec, content["vision"]), "trunk": tower(GemmaSpec, content["trunk"]), "expert": tower(GemmaSpec, content["expert"])}
    return ModelSpec(**content | towers | {"cameras": tuple(content["cameras"])})


def read_openpi_assets(root: Path, asset_id: str | None) -> Assets:
    """What an openpi checkpoint has under assets/; without `asset_id`, statistics only where there is no choice.

    Raises:
        CheckpointError: there are no statistics of that id.
    """
    files = {str(path.parent.relative_to(root / "assets")): path for path in sorted((root / "assets").rglob(NORM_STATS))}
    if asset_id is not None and asset_id not in files:
        raise CheckpointError(f"{root / 'assets'} has no statistics {asset_id!r}; it has {', '.join(files) or 'none'}.")
    chosen = asset_id or (next(iter(files)) if len(files) == 1 else None)
    return Assets(read_norm_stats(files[chosen]) if chosen else None, chosen, tokenizer=OPENPI_TOKENIZER, choices=tuple(files))


def write_openpi_assets(root: Path, assets: Assets) -> None:
    """Writes the statistics where openpi looks for them, under their id or the robot's name."""
    if assets.norm_stats is not None:
        assets.norm_stats.save(root / "assets" / (assets.asset_id or assets.robot or "pi05") / NORM_STATS)


def read_norm_stats(path: Path) -> NormStats | None:
    """Our statistics or openpi's, whichever the file holds; None where there is none."""
    if not path.is_file():
        return None
    return NormStats.load(path) if "format_version" in read_json(path) else load_openpi(path)


def read_json(path: Path) -> dict[str, Any]:
    """The file's content.

    Raises:
        CheckpointError: it is no JSON object.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON ({error}). Copy or download it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object. Copy or download it again.")
    return content
