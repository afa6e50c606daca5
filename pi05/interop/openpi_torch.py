"""Published PyTorch tensors, model.safetensors, as openpi writes them; LeRobot's are the same under a prefix.

What such files hold beyond the parameters, and what becomes of it here:
    paligemma.lm_head        the token embedding: openpi ties both and stores this name alone; where a file has both names, embed_tokens is
                             the one that is read, as the head takes no part in Pi0.5
    gemma_expert.lm_head     never used by anyone; dropped in reading, zeros in writing, because openpi and LeRobot load strictly
    expert norms' weight     left over beside an adaRMS norm by some loaders; dropped
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from pi05.errors import CheckpointError
from pi05.interop.assets import Assets, Sidecar, read_json, read_openpi_assets, write_openpi_assets
from pi05.interop.infer import check_is_pi05, infer_spec
from pi05.interop.source import Kind, Source, has_lora, table_build, table_places
from pi05.interop.tensor_file import TensorFiles, write_tensors
from pi05.params import ROWS, shapes, write
from pi05.spec import ModelSpec

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING = ROWS["trunk.embed.weight"].published[0]
TIED_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
DEAD_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"
EXPERT_NORM = re.compile(r"paligemma_with_expert\.gemma_expert\.model\.(layers\.\d+\.(input|post_attention)_layernorm|norm)\.weight")
# Names of newer transformers, in which SigLIP lost a level of its module tree.
RENAMED = (("paligemma.model.vision_tower.", "vision_model."),)


def find_files(folder: Path) -> list[Path]:
    """The files of tensors in `folder`: one, or those of an index; none if there are none."""
    if (folder / FILE).is_file():
        return [folder / FILE]
    if (folder / INDEX).is_file():
        return [folder / name for name in sorted(set(read_json(folder / INDEX)["weight_map"].values()))]
    return []


def open_torch(folder: Path, *, like: ModelSpec | None = None, asset_id: str | None = None) -> Source:
    """Opens a checkpoint of openpi's PyTorch trainer or converter.

    Raises:
        CheckpointError: it is no Pi0.5, or there are several statistics to choose from.
    """
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    told = {"horizon": config.get("action_horizon"), "token_len": config.get("max_token_len")}
    return open_published(folder, "openpi-torch", **told, like=like, assets=lambda: read_openpi_assets(folder, asset_id))


def open_published(
    folder: Path,
    kind: Kind,
    *,
    prefix: str = "",
    horizon: int | None = None,
    token_len: int | None = None,
    like: ModelSpec | None = None,
    assets: Callable[[], Assets] | None = None,
) -> Source:
    """Opens the tensors of a folder; `prefix` stands in front of every name that has it.

    horizon, token_len: what a configuration beside the tensors says. assets: reads them where there is no pi05.json.

    Raises:
        CheckpointError: the tensors are those of another model.
    """
    files = TensorFiles(find_files(folder))
    names = standard_names(list(files.shapes), prefix)
    check_is_pi05(list(names), folder)
    dropped = _dropped(names)
    if EMBEDDING not in names and TIED_HEAD not in names:
        raise CheckpointError(f"{folder} has no token embedding: neither {EMBEDDING} nor {TIED_HEAD}, which openpi ties to it. Copy or convert it again.")
    if EMBEDDING not in names:
        names[EMBEDDING] = names.pop(TIED_HEAD)
        dropped.pop(TIED_HEAD, None)
    sizes = {name: files.shapes[own] for name, own in names.items()}
    sidecar = Sidecar.load(folder)
    spec = infer_spec(sizes, "published", folder, sidecar.spec if sidecar else like)
    told = {"action_horizon": horizon, "max_token_len": token_len} if sidecar is None else {}
    spec = spec.replace(**{field: value for field, value in told.items() if value is not None})
    return Source(
        kind=kind,
        where=folder,
        spec=spec,
        sizes=sizes,
        read=lambda name: files.read(names[name]),
        places=table_places(spec, "published"),
        build=table_build(spec, "published"),
        dropped=dropped,
        assets=sidecar.assets if sidecar else (assets() if assets else Assets()),
        history=sidecar.history if sidecar else (),
        notes=tuple(f"dropped {name}: {reason}" for name, reason in dropped.items()),
    )


def standard_names(names: Sequence[str], prefix: str = "") -> dict[str, str]:
    """The standard name of each tensor -> its name in the file.

    Raises:
        CheckpointError: two tensors have one standard name.
    """
    found: dict[str, str] = {}
    for own in names:
        name = own.removeprefix(prefix)
        for parent, level in RENAMED:
            before, at, after = name.partition(parent)
            if at and not after.startswith(level):
                name = before + at + level + after
        if name in found:
            raise CheckpointError(f"{own} and {found[name]} are one and the same tensor under two names. Remove one of them.")
        found[name] = own
    return found


def write_torch(folder: Path, tensors: Iterator[tuple[str, np.ndarray]], spec: ModelSpec, assets: Assets, history: tuple[str, ...]) -> None:
    """Writes a checkpoint that openpi's PyTorch model loads, with pi05.json beside it.

    Raises:
        CheckpointError: the model has adapters, which openpi's PyTorch model does not know.
    """
    refuse_lora(spec, "openpi's PyTorch model")
    # openpi ties embedding and head and keeps the first of the two names; with both, its strict loader would find one too many.
    write_published(folder / FILE, tensors, spec, both_heads=False, metadata={"format": "pt", EMBEDDING: TIED_HEAD})
    write_openpi_assets(folder, assets)
    Sidecar(spec, assets, history).save(folder)


def write_published(
    path: Path, tensors: Iterator[tuple[str, np.ndarray]], spec: ModelSpec, *, both_heads: bool, metadata: Mapping[str, str], prefix: str = ""
) -> None:
    """Writes canonical tensors to one file in the published layout, with the heads that strict loaders ask for."""
    sizes = shapes(spec, "published")
    embedding = sizes[EMBEDDING]
    sizes = {(TIED_HEAD if name == EMBEDDING and not both_heads else name): size for name, size in sizes.items()}
    sizes |= {TIED_HEAD: embedding, DEAD_HEAD: (spec.vocab_size, spec.expert.width)}
    write_tensors(path, {prefix + name: size for name, size in sizes.items()}, _with_heads(tensors, spec, both_heads, prefix), metadata)


def refuse_lora(spec: ModelSpec, who: str) -> None:
    """Raises unless the model is without adapters.

    Raises:
        CheckpointError: names who has no place for them.
    """
    if has_lora(spec):
        raise CheckpointError(f"{who} has no place for adapters. Merge them: --merge-lora.")


def _with_heads(tensors: Iterator[tuple[str, np.ndarray]], spec: ModelSpec, both_heads: bool, prefix: str) -> Iterator[tuple[str, np.ndarray]]:
    for name, array in write(tensors, spec, "published"):
        if name == EMBEDDING:
            yield prefix + TIED_HEAD, array
        if name != EMBEDDING or both_heads:
            yield prefix + name, array
    yield prefix + DEAD_HEAD, np.broadcast_to(np.float32(0), (spec.vocab_size, spec.expert.width))


def _dropped(names: Mapping[str, str]) -> dict[str, str]:
    """Tensors that no Pi0.5 computes with, and why."""
    out = {}
    if DEAD_HEAD in names:
        out[DEAD_HEAD] = "the expert's language head, which nothing uses"
    if TIED_HEAD in names and EMBEDDING in names:
        out[TIED_HEAD] = "the trunk's language head, which Pi0.5 does not use; the embedding is there under its own name"
    for name in names:
        if EXPERT_NORM.fullmatch(name) and name.removesuffix("weight") + "dense.weight" in names:
            out[name] = "a plain norm's scale beside the adaptive norm that replaced it"
    return out
