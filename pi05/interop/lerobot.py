"""LeRobot's PI05Policy: published tensors under the prefix "model.", a configuration, and the processors before and behind the model.

Nothing of LeRobot is imported: its files are JSON and safetensors, and a version that reads them need not be installed here.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pi05.data.norm_stats import ARRAYS, FieldStats, NormStats
from pi05.data.transforms import QUANTILES_IN_STD, Normalization, suggest, unnormalise
from pi05.errors import CheckpointError
from pi05.interop.assets import LEROBOT_TOKENIZER, OPENPI_TOKENIZER, Assets, Sidecar, read_json
from pi05.interop.openpi_torch import FILE, open_published, refuse_lora, write_published
from pi05.interop.source import Source
from pi05.interop.tensor_file import TensorFiles, write_tensors
from pi05.robots.base import Robot
from pi05.spec import ModelSpec

PREFIX = "model."
CONFIG = "config.json"
PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor", "policy_postprocessor"
STATE, ACTION = "observation.state", "action"  # the only names that its policies take
MODES: dict[Normalization, str] = {"quantile": "QUANTILES", "zscore": "MEAN_STD"}


def is_lerobot(folder: Path) -> bool:
    """Whether the folder's configuration is one of LeRobot's policies."""
    return (folder / CONFIG).is_file() and "type" in read_json(folder / CONFIG)


def open_lerobot(folder: Path, *, like: ModelSpec | None = None) -> Source:
    """Opens what PI05Policy.save_pretrained wrote.

    Raises:
        CheckpointError: it is another policy, or has adapters of PEFT.
    """
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if config.get("type", "pi05") != "pi05":
        raise CheckpointError(f"{folder} is a policy of type {config['type']!r}. pi05 reads Pi0.5 only, which LeRobot calls 'pi05'.")
    if config.get("use_peft"):
        raise CheckpointError(f"{folder} was trained with PEFT. Merge its adapters with PEFT and save the policy again.")
    return open_published(
        folder,
        "lerobot",
        prefix=PREFIX,
        horizon=config.get("chunk_size"),
        token_len=config.get("tokenizer_max_length"),
        like=like,
        assets=lambda: _read_assets(folder),
    )


def write_lerobot(folder: Path, tensors: Iterator[tuple[str, np.ndarray]], spec: ModelSpec, assets: Assets, history: tuple[str, ...]) -> None:
    """Writes a policy that PI05Policy.from_pretrained and LeRobot's processors load, with pi05.json beside it.

    Without a robot only the model can be loaded: there are no processors then.

    Raises:
        CheckpointError: LeRobot has no way to do what the assets ask for; names it.
    """
    refuse_lora(spec, "LeRobot")
    robot = None if assets.robot is None else assets.load_robot()
    files = _json_files(spec, assets, robot)
    write_published(folder / FILE, tensors, spec, both_heads=True, metadata={"format": "pt"}, prefix=PREFIX)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=4) + "\n")
    if robot is not None and assets.norm_stats is not None:
        stats = _lerobot_stats(assets, robot)
        for content in (files[f"{PREPROCESSOR}.json"], files[f"{POSTPROCESSOR}.json"]):
            name = next(step["state_file"] for step in content["steps"] if "state_file" in step)
            write_tensors(folder / name, {key: value.shape for key, value in stats.items()}, iter(stats.items()), {})
    Sidecar(spec, assets, history).save(folder)


def _json_files(spec: ModelSpec, assets: Assets, robot: Robot | None) -> dict[str, Any]:
    """The configuration and, for a robot with statistics, both processors."""
    mode, edge = MODES[assets.normalization], spec.vision.image_size
    norm_map = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    columns = (
        [f"observation.images.{slot}" for slot in spec.cameras] if robot is None else [robot.cameras[slot] for slot in spec.cameras if slot in robot.cameras]
    )
    state, actions = (spec.action_dim, spec.action_dim) if robot is None else (len(robot.state), len(robot.actions))
    inputs = {column: {"type": "VISUAL", "shape": [3, edge, edge]} for column in columns} | {STATE: {"type": "STATE", "shape": [state]}}
    outputs = {ACTION: {"type": "ACTION", "shape": [actions]}}
    relative, excluded, names = (False, [], None) if robot is None else _relative(robot)
    config = {
        "type": "pi05",
        "input_features": inputs,
        "output_features": outputs,
        "normalization_mapping": norm_map,
        "chunk_size": spec.action_horizon,
        "n_action_steps": spec.action_horizon,
        "max_action_dim": spec.action_dim,
        "max_state_dim": max(spec.action_dim, state),
        "image_resolution": [edge, edge],
        "tokenizer_max_length": spec.max_token_len,
        "use_relative_actions": relative,
        "relative_exclude_joints": excluded,
        "action_feature_names": names,
        "dtype": "float32",
    }
    if robot is None or assets.norm_stats is None:
        return {CONFIG: config}
    if not assets.discrete_state:
        raise CheckpointError("The prompt is without the state (discrete_state: false); LeRobot's processor for Pi0.5 always puts it in.")
    before = [
        _step("rename_observations_processor", rename_map={} if robot.state_column == STATE else {robot.state_column: STATE}),
        _step("to_batch_processor"),
        _step("relative_actions_processor", enabled=relative, exclude_joints=excluded, action_names=names),
        _step("normalizer_processor", eps=1e-8, features=inputs | outputs, norm_map=norm_map),
        _step("pi05_prepare_state_tokenizer_processor_step"),
        _step(
            "tokenizer_processor",
            max_length=spec.max_token_len,
            task_key="task",
            padding_side="right",
            padding="max_length",
            truncation=True,
            tokenizer_name=_tokenizer_name(assets.tokenizer),
        ),
        _step("device_processor", device="cpu", float_dtype=None),
    ]
    behind = [
        _step("unnormalizer_processor", eps=1e-8, features=outputs, norm_map=norm_map),
        _step("absolute_actions_processor", enabled=relative),
        _step("device_processor", device="cpu", float_dtype=None),
    ]
    return {CONFIG: config, f"{PREPROCESSOR}.json": _pipeline(PREPROCESSOR, before), f"{POSTPROCESSOR}.json": _pipeline(POSTPROCESSOR, behind)}


def _step(registry_name: str, **config: Any) -> dict[str, Any]:
    return {"registry_name": registry_name, "config": config}


def _pipeline(name: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    for i, step in enumerate(steps):
        if "norm_map" in step["config"]:
            step["state_file"] = f"{name}_step_{i}_{step['registry_name']}.safetensors"
    return {"name": name, "steps": steps}


def _relative(robot: Robot) -> tuple[bool, list[str], list[str]]:
    """LeRobot's words for the robot's relative actions: whether there are some, names that stay absolute, all names.

    Raises:
        CheckpointError: LeRobot would compute other numbers than the robot does.
    """
    names, mask = list(robot.action_names), robot.delta_mask
    absolute = [name for name, delta in zip(names, mask, strict=True) if not delta]
    faults = {
        "converts its numbers (its file subclasses Robot)": robot.fingerprint["conversion"] != "Robot",
        "composes rotations (rotation_delta: relative)": robot.rotation_delta == "relative" and mask.any(),
        "has relative actions at other places than the state dims they are relative to": any(
            delta and (i >= len(robot.state) or robot.state_names[i] != name) for i, (name, delta) in enumerate(zip(names, mask, strict=True))
        ),
        "has names of absolute actions within those of relative ones, which LeRobot would take for absolute": mask.any()
        and any(word.lower() in name.lower() for word in absolute for name, delta in zip(names, mask, strict=True) if delta),
    }
    if found := [fault for fault, present in faults.items() if present]:
        raise CheckpointError(f"LeRobot cannot serve robot {robot.name!r}: it {found[0]}. Serve it from pi05, or export the model alone, --weights-only.")
    return bool(mask.any()), absolute if mask.any() else [], names


def _tokenizer_name(tokenizer: str | None) -> str:
    """What transformers' AutoTokenizer loads for the sentencepiece model `tokenizer`.

    Raises:
        CheckpointError: it cannot load that.
    """
    if tokenizer in (OPENPI_TOKENIZER, LEROBOT_TOKENIZER):
        return LEROBOT_TOKENIZER
    folder = Path(tokenizer or "").expanduser()
    folder = folder if folder.is_dir() else folder.parent
    if (folder / "tokenizer.json").is_file():
        return str(folder.resolve())
    if tokenizer and "://" not in tokenizer and not Path(tokenizer).exists() and tokenizer.count("/") == 1:
        return tokenizer
    raise CheckpointError(
        f"LeRobot loads tokenizers through transformers, which needs a tokenizer.json; {tokenizer!r} has none. "
        f"Give the same tokenizer in that form, a folder or a Hub id: --tokenizer {LEROBOT_TOKENIZER}."
    )


def _lerobot_stats(assets: Assets, robot: Robot) -> dict[str, np.ndarray]:
    """Statistics under which LeRobot's normaliser, which knows neither floor nor epsilon, computes what ours does."""
    out = {}
    for key, column, dims in (("state", STATE, robot.state), ("actions", ACTION, robot.actions)):
        if key not in assets.norm_stats.fields:
            raise CheckpointError(f"The statistics have no {key!r}, only {', '.join(assets.norm_stats.fields)}. Give complete ones: --norm-stats FILE.")
        stats, count = assets.norm_stats.fields[key], len(dims)
        share = assets.floor if assets.normalization == "quantile" else assets.floor / QUANTILES_IN_STD
        floor, ones = share * np.array([dim.high - dim.low for dim in dims]), np.ones(count)
        low, high = (unnormalise(sign * ones, stats, assets.normalization, floor) for sign in (-1, 1))
        kept = {name: getattr(stats, name)[:count] for name in ARRAYS if np.isfinite(getattr(stats, name)[:count]).all()}
        kept |= {"q01": low, "q99": high} if assets.normalization == "quantile" else {"mean": (low + high) / 2, "std": (high - low) / 2}
        out |= {f"{column}.{name}": value.astype(np.float32) for name, value in kept.items()}
    return out


def _read_assets(folder: Path) -> Assets:
    """What the processors of a saved policy say; nothing where there are none."""
    path = folder / f"{PREPROCESSOR}.json"
    if not path.is_file():
        return Assets()
    steps = {step.get("registry_name"): step for step in read_json(path).get("steps", [])}
    tokenizer = steps.get("tokenizer_processor", {}).get("config", {}).get("tokenizer_name")
    relative = steps.get("relative_actions_processor", {}).get("config", {})
    normaliser = steps.get("normalizer_processor", {})
    if "state_file" not in normaliser:
        return Assets(tokenizer=tokenizer)
    modes = normaliser["config"]["norm_map"]
    methods = {mode: method for method, mode in MODES.items()}
    if modes["STATE"] != modes["ACTION"] or modes["STATE"] not in methods:
        raise CheckpointError(f"{path} normalises by {modes}; pi05 has one of {', '.join(MODES.values())} for both. {suggest(modes['STATE'], methods)}")
    files = TensorFiles([folder / normaliser["state_file"]])
    fields = {key: _field(files, column) for key, column in (("state", STATE), ("actions", ACTION)) if f"{column}.mean" in files.shapes}
    mask = _delta_mask(relative, len(fields["actions"].mean)) if "actions" in fields else None
    stats = NormStats(fields, {"source": "LeRobot"}) if fields else None
    return Assets(stats, normalization=methods[modes["STATE"]], floor=0.0, tokenizer=tokenizer, delta_mask=mask)


def _field(files: TensorFiles, column: str) -> FieldStats:
    mean = files.read(f"{column}.mean").astype(np.float64)
    arrays = {name: files.read(f"{column}.{name}").astype(np.float64) if f"{column}.{name}" in files.shapes else np.full_like(mean, np.nan) for name in ARRAYS}
    count = int(files.read(f"{column}.count").max()) if f"{column}.count" in files.shapes else 0
    return FieldStats(**arrays, count=count)


def _delta_mask(config: Mapping[str, Any], dims: int) -> tuple[bool, ...]:
    """LeRobot's rule: a dim is absolute if one of the words is part of its name."""
    if not config.get("enabled"):
        return (False,) * dims
    words, names = [word.lower() for word in config.get("exclude_joints") or []], config.get("action_names")
    return tuple(not (names and any(word in names[i].lower() for word in words)) for i in range(dims))
