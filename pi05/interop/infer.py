"""What a model is, from the names and shapes of its tensors alone."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from pi05.errors import CheckpointError
from pi05.params import TABLE, Group, Param
from pi05.spec import GemmaSpec, ModelSpec, VisionSpec

Shapes = Mapping[str, tuple[int, ...]]
Sizes = dict[str, int]

PI0_ONLY = ("state_proj", "action_time_mlp_in", "action_time_mlp_out")


def check_is_pi05(names: Sequence[str], where: object) -> None:
    """Raises unless the tensors are those of a Pi0.5; the name of the folder says nothing about it.

    Raises:
        CheckpointError: the tensors are of Pi0, or of another model.
    """
    words = {part for name in names for part in re.split(r"[./]", name)}
    if found := [word for word in PI0_ONLY if word in words]:
        raise CheckpointError(f"{where} is a Pi0 checkpoint: it has {found[0]}, which Pi0.5 does not have. pi05 reads Pi0.5 only.")
    if missing := [word for word in ("action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out") if word not in words]:
        raise CheckpointError(f"{where} is no Pi0.5 checkpoint: it has no {missing[0]}, but {len(names)} tensors such as {', '.join(sorted(names)[:3])}.")


def infer_spec(shapes: Shapes, layout: Literal["openpi", "published"], where: object, like: ModelSpec | None = None) -> ModelSpec:
    """The model whose tensors these are, without adapters.

    like: what the shapes cannot tell is taken from here: action horizon, prompt length, cameras, and in the "published" layout the number
        of heads. None, or other widths: from the preset whose widths these are.

    Raises:
        CheckpointError: the shapes contradict each other, or do not tell enough.
    """
    sizes = {group: _group_sizes(shapes, layout, group, where) for group in ("vision", "trunk", "expert", "heads")}
    widths = tuple(_known(sizes[group], "d", group, where) for group in ("vision", "trunk", "expert"))
    template = _template(widths, like)
    head_dim = None if template is None else template.trunk.head_dim
    vision, trunk = sizes["vision"], sizes["trunk"]
    patch, patches = _known(vision, "i", "vision", where), _known(vision, "p", "vision", where)
    vision_heads = vision.get("n", None if template is None else template.vision.num_heads)
    if vision_heads is None or ("h" not in trunk and head_dim is None):
        raise CheckpointError(
            f"{where}: the widths {widths} of vision, trunk and expert are those of no preset, and the tensors do not tell how many heads they are cut into. "
            "Give a config with the model's sizes (--config)."
        )
    rest = template or ModelSpec.pi05()
    return ModelSpec(
        vision=VisionSpec(
            width=widths[0],
            depth=_known(vision, "l", "vision", where),
            mlp_dim=_known(vision, "f", "vision", where),
            num_heads=vision_heads,
            patch_size=patch,
            image_size=patch * math.isqrt(patches),
        ),
        trunk=_gemma(trunk, "trunk", head_dim, where),
        expert=_gemma(sizes["expert"], "expert", head_dim, where),
        vocab_size=_known(trunk, "v", "trunk", where),
        action_dim=_known(sizes["heads"], "a", "heads", where),
        action_horizon=rest.action_horizon,
        max_token_len=rest.max_token_len,
        cameras=rest.cameras,
    )


def describe(spec: ModelSpec) -> str:
    """The variant in one line, for a person."""
    vision, trunk, expert = spec.vision, spec.trunk, spec.expert
    towers = {"vision": vision.lora, "trunk": trunk.lora, "expert": expert.lora}
    lora = ", ".join(f"{name} rank {adapters.rank} alpha {adapters.alpha:g}" for name, adapters in towers.items() if adapters is not None)
    return (
        f"Pi0.5: vision {vision.depth} x {vision.width}, trunk {trunk.depth} x {trunk.width}, expert {expert.depth} x {expert.width}, "
        f"{trunk.num_heads} heads of {trunk.head_dim}, vocabulary {spec.vocab_size}, action_dim {spec.action_dim}, action_horizon {spec.action_horizon}; "
        f"adapters: {lora or 'none'}"
    )


def _gemma(sizes: Sizes, group: str, head_dim: int | None, where: object) -> GemmaSpec:
    def heads(letter: str) -> int:
        if letter in sizes:
            return sizes[letter]
        total = _known(sizes, f"({letter} h)", group, where)
        if total % head_dim:
            raise CheckpointError(f"{where}: {group} has {total} rows for its heads, which heads of {head_dim} do not divide. Give a config (--config).")
        return total // head_dim

    return GemmaSpec(
        width=_known(sizes, "d", group, where),
        depth=_known(sizes, "l", group, where),
        mlp_dim=_known(sizes, "f", group, where),
        num_heads=heads("n"),
        num_kv_heads=heads("k"),
        head_dim=sizes.get("h", head_dim),
    )


def _template(widths: tuple[int, ...], like: ModelSpec | None) -> ModelSpec | None:
    for spec in (like, ModelSpec.pi05(), ModelSpec.tiny()):
        if spec is not None and (spec.vision.width, spec.trunk.width, spec.expert.width) == widths:
            return spec
    return None


def _group_sizes(shapes: Shapes, layout: Literal["openpi", "published"], group: Group, where: object) -> Sizes:
    """Size of every token of the patterns ("d", "(n h)") of a group's rows, as far as its tensors are there."""
    sizes: Sizes = {}
    for row in TABLE:
        if row.group == group:
            for token, size, name in _tokens(row, shapes, layout):
                if token == "l":
                    sizes["l"] = max(size, sizes.get("l", 0))  # a tensor that its last layer lacks is the ledger's to name
                elif sizes.setdefault(token, size) != size:
                    raise CheckpointError(
                        f"{where}: {name} has shape {shapes.get(name)}, where {token} is {size}; other tensors of {group} say {sizes[token]}."
                    )
    return sizes


def _tokens(row: Param, shapes: Shapes, layout: Literal["openpi", "published"]) -> list[tuple[str, int, str]]:
    name, pattern = row.place(layout)
    found = []
    if "{l}" in name:
        before, after = name.split("{l}")
        middles = [other[len(before) : -len(after)] for other in shapes if other.startswith(before) and other.endswith(after)]
        layers = 1 + max((int(middle) for middle in middles if middle.isdigit()), default=-1)
        name = name.format(l=0)
        found = [("l", layers, name)] if layers else []
    tokens = re.findall(r"\([^)]*\)|\S+", pattern)
    if name not in shapes or len(tokens) != len(shapes[name]):
        return found  # the audit names it
    return found + [(token, size, name) for token, size in zip(tokens, shapes[name], strict=True) if not token.isdigit()]


def _known(sizes: Sizes, token: str, group: str, where: object) -> int:
    if token not in sizes:
        telling = [row.name for row in TABLE if row.group == group and token in row.axes.split()]
        raise CheckpointError(f"{where} is not a whole Pi0.5 model: it has none of {', '.join(telling[:3]) or group}.")
    return sizes[token]
