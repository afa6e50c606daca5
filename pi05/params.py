"""The parameter table: one row a tensor, and everything that follows from the rows.

A row says what the tensor is called, which axes it has, how it starts, to which group it belongs, and how it lies in memory in
each layout. From the rows come the parameter count, every shape, initial weights, and the reading and writing of each layout.
No tensor name appears anywhere else in the package.

Layouts:
    canonical  what the rows' `axes` say; layers stacked on the leading axis `l`; the form everything else is derived from
    jax        stacked, kernels 2-D [fan_in, fan_out]
    torch      one tensor a layer, weights 2-D [fan_out, fan_in]
    openpi     the published JAX tree (orbax), stacked, some tensors packed two by two
    published  the names and shapes of the published PyTorch files (openpi's and LeRobot's safetensors)

Grammar of a pattern: letters are axes (table below), `(n h)` is one axis holding n major, h minor; a digit selects a slot of a
packed tensor; `1` is an axis of size one; a name with `{l}` means one tensor a layer.

Letters: l layer | d width of the tower | e width of the trunk | c width of the conditioning | n heads | k key/value heads | h head dim
    f mlp dim | v vocabulary | p patches | i, j row and column inside a patch | r colour channel | m modulation (scale, shift, gate)
    a action dim | t rank of a low-rank adapter
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Literal

import numpy as np
from einops import rearrange

from pi05.errors import ParamsError
from pi05.spec import IMAGE_CHANNELS, ModelSpec

Layout = Literal["canonical", "jax", "torch", "openpi", "published"]
Group = Literal["vision", "trunk", "expert", "heads"]

GROUPS: tuple[Group, ...] = ("vision", "trunk", "expert", "heads")
PACKED_SLOTS = 2  # k and v, gate and up
MODULATION_SLOTS = ("scale", "shift", "gate")  # the order of axis m

_VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model."
_PROJECTOR = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear."
_TRUNK = "paligemma_with_expert.paligemma.model.language_model."
_EXPERT = "paligemma_with_expert.gemma_expert.model."


@dataclasses.dataclass(frozen=True)
class Init:
    """An initial distribution: kind, and for "normal" its standard deviation as a function of the axis sizes."""

    kind: Literal["zeros", "ones", "normal", "lecun_normal", "xavier_uniform"]
    fan_in: str = ""
    fan_out: str = ""
    std: float | str = 0.0  # a number, or the letter d for 1 / sqrt(d)

    def describe(self) -> str:
        """The distribution in words, for the golden list of all parameters."""
        detail = {"normal": f"std={self.std}", "lecun_normal": f"fan_in={self.fan_in}", "xavier_uniform": f"{self.fan_in} -> {self.fan_out}"}
        return f"{self.kind}({detail[self.kind]})" if self.kind in detail else self.kind


@dataclasses.dataclass(frozen=True)
class Param:
    """One row of the table.

    name: canonical name; in the torch layout `.layers.` becomes `.layers.{l}.`.
    axes: letters of the canonical array. jax, torch: patterns of the two backends.
    openpi: path and pattern in openpi's tree. published: name and pattern in the published PyTorch files.
    init: initial distribution. group: what is trained or frozen together. lora: whether low-rank adapters may be attached.
    adapter: whether it is one; such rows exist only where the spec gives their group adapters.
    """

    name: str
    axes: str
    init: Init
    group: Group
    jax: str
    torch: str
    openpi: tuple[str, str]
    published: tuple[str, str]
    lora: bool = False
    adapter: bool = False

    @property
    def stacked(self) -> bool:
        """Whether the tensor has one slice for each layer."""
        return self.axes.startswith("l ")

    @property
    def torch_name(self) -> str:
        return self.name.replace(".layers.", ".layers.{l}.") if self.stacked else self.name

    def place(self, layout: Layout) -> tuple[str, str]:
        """Name and pattern of this tensor in `layout`.

        Raises:
            ParamsError: an adapter has no place in openpi's tree, whose adapters are cut in another way.
        """
        if self.adapter and layout == "openpi":
            raise ParamsError(f"{self.name} has no place in openpi's layout: merge the adapters first.")
        places = {
            "canonical": (self.name, self.axes),
            "jax": (self.name, self.jax),
            "torch": (self.torch_name, self.torch),
            "openpi": self.openpi,
            "published": self.published,
        }
        return places[layout]


def _norm(name: str, group: Group, openpi: str, published: str, *, stacked: bool, bias: bool, one: bool) -> Iterator[Param]:
    axes = "l d" if stacked else "d"
    start = Init("ones") if one else Init("zeros")
    yield Param(f"{name}.scale", axes, start, group, axes, "d", (f"{openpi}/scale", axes), (f"{published}.weight", "d"))
    if bias:
        yield Param(f"{name}.bias", axes, Init("zeros"), group, axes, "d", (f"{openpi}/bias", axes), (f"{published}.bias", "d"))


def _vision_rows() -> Iterator[Param]:
    tree, block = "PaliGemma/img", "PaliGemma/img/Transformer/encoderblock"
    layer = _VISION + "encoder.layers.{l}."
    yield Param(
        "vision.patch_embed.weight", "i j r d", Init("lecun_normal", fan_in="i j r"), "vision", "(i j r) d", "d (i j r)",
        (f"{tree}/embedding/kernel", "i j r d"), (f"{_VISION}embeddings.patch_embedding.weight", "d r i j"),
    )  # fmt: skip
    yield Param(
        "vision.patch_embed.bias", "d", Init("zeros"), "vision", "d", "d",
        (f"{tree}/embedding/bias", "d"), (f"{_VISION}embeddings.patch_embedding.bias", "d"),
    )  # fmt: skip
    yield Param(
        "vision.pos_embed", "p d", Init("normal", std="d"), "vision", "p d", "p d",
        (f"{tree}/pos_embedding", "1 p d"), (f"{_VISION}embeddings.position_embedding.weight", "p d"),
    )  # fmt: skip
    yield from _norm("vision.layers.attn_norm", "vision", f"{block}/LayerNorm_0", f"{layer}layer_norm1", stacked=True, bias=True, one=True)
    attention = f"{block}/MultiHeadDotProductAttention_0"
    square = Init("xavier_uniform", fan_in="d", fan_out="n h")
    for letter, word in zip("qkv", ("query", "key", "value"), strict=True):
        yield Param(
            f"vision.layers.{letter}_proj.weight", "l d n h", square, "vision", "l d (n h)", "(n h) d",
            (f"{attention}/{word}/kernel", "l d n h"), (f"{layer}self_attn.{letter}_proj.weight", "(n h) d"), lora=True,
        )  # fmt: skip
        yield Param(
            f"vision.layers.{letter}_proj.bias", "l n h", Init("zeros"), "vision", "l (n h)", "(n h)",
            (f"{attention}/{word}/bias", "l n h"), (f"{layer}self_attn.{letter}_proj.bias", "(n h)"),
        )  # fmt: skip
    yield Param(
        "vision.layers.o_proj.weight", "l n h d", Init("xavier_uniform", fan_in="n h", fan_out="d"), "vision", "l (n h) d", "d (n h)",
        (f"{attention}/out/kernel", "l n h d"), (f"{layer}self_attn.out_proj.weight", "d (n h)"), lora=True,
    )  # fmt: skip
    yield Param(
        "vision.layers.o_proj.bias", "l d", Init("zeros"), "vision", "l d", "d",
        (f"{attention}/out/bias", "l d"), (f"{layer}self_attn.out_proj.bias", "d"),
    )  # fmt: skip
    yield from _norm("vision.layers.mlp_norm", "vision", f"{block}/LayerNorm_1", f"{layer}layer_norm2", stacked=True, bias=True, one=True)
    for i, (name, fan_in, fan_out) in enumerate((("up_proj", "d", "f"), ("down_proj", "f", "d"))):
        yield Param(
            f"vision.layers.{name}.weight", f"l {fan_in} {fan_out}", Init("xavier_uniform", fan_in=fan_in, fan_out=fan_out), "vision",
            f"l {fan_in} {fan_out}", f"{fan_out} {fan_in}",
            (f"{block}/MlpBlock_0/Dense_{i}/kernel", f"l {fan_in} {fan_out}"), (f"{layer}mlp.fc{i + 1}.weight", f"{fan_out} {fan_in}"), lora=True,
        )  # fmt: skip
        yield Param(
            f"vision.layers.{name}.bias", f"l {fan_out}", Init("normal", std=1e-6), "vision", f"l {fan_out}", fan_out,
            (f"{block}/MlpBlock_0/Dense_{i}/bias", f"l {fan_out}"), (f"{layer}mlp.fc{i + 1}.bias", fan_out),
        )  # fmt: skip
    yield from _norm("vision.final_norm", "vision", f"{tree}/Transformer/encoder_norm", f"{_VISION}post_layernorm", stacked=False, bias=True, one=True)
    yield Param("vision.head.weight", "d e", Init("zeros"), "vision", "d e", "e d", (f"{tree}/head/kernel", "d e"), (f"{_PROJECTOR}weight", "e d"))
    yield Param("vision.head.bias", "e", Init("zeros"), "vision", "e", "e", (f"{tree}/head/bias", "e"), (f"{_PROJECTOR}bias", "e"))


def _gemma_rows(group: Literal["trunk", "expert"], published: str, suffix: str, *, adaptive: bool) -> Iterator[Param]:
    """Rows of one Gemma; `suffix` is openpi's mark of the expert ("_1"); `adaptive` gives adaRMS norms."""
    tree, layer = "PaliGemma/llm", published + "layers.{l}."

    def norm(name: str, openpi: str, target: str, *, stacked: bool) -> Iterator[Param]:
        lead = "l " if stacked else ""
        if not adaptive:
            yield from _norm(f"{group}.{name}", group, f"{tree}/{openpi}{suffix}", target, stacked=stacked, bias=False, one=False)
            return
        yield Param(
            f"{group}.{name}.modulation.weight", f"{lead}c m d", Init("zeros"), group, f"{lead}c (m d)", "(m d) c",
            (f"{tree}/{openpi}{suffix}/Dense_0/kernel", f"{lead}c (m d)"), (f"{target}.dense.weight", "(m d) c"),
        )  # fmt: skip
        yield Param(
            f"{group}.{name}.modulation.bias", f"{lead}m d", Init("zeros"), group, f"{lead}(m d)", "(m d)",
            (f"{tree}/{openpi}{suffix}/Dense_0/bias", f"{lead}(m d)"), (f"{target}.dense.bias", "(m d)"),
        )  # fmt: skip

    def weight(name: str, fan_in: str, fan_out: str, openpi: tuple[str, str], target: str) -> Param:
        def joined(letters: str) -> str:
            return f"({letters})" if " " in letters else letters

        axes, start = f"l {fan_in} {fan_out}", Init("lecun_normal", fan_in=fan_in)
        jax, torch = f"l {joined(fan_in)} {joined(fan_out)}", f"{joined(fan_out)} {joined(fan_in)}"
        return Param(f"{group}.layers.{name}.weight", axes, start, group, jax, torch, openpi, (f"{layer}{target}.weight", torch), lora=True)

    if group == "trunk":
        yield Param(
            "trunk.embed.weight", "v d", Init("normal", std=0.01), group, "v d", "v d",
            (f"{tree}/embedder/input_embedding", "v d"), (f"{published}embed_tokens.weight", "v d"),
        )  # fmt: skip
    attention, mlp = f"{tree}/layers/attn", f"{tree}/layers/mlp{suffix}"
    yield from norm("layers.attn_norm", "layers/pre_attention_norm", f"{layer}input_layernorm", stacked=True)
    yield weight("q_proj", "d", "n h", (f"{attention}/q_einsum{suffix}/w", "l n d h"), "self_attn.q_proj")
    yield weight("k_proj", "d", "k h", (f"{attention}/kv_einsum{suffix}/w", "l 0 k d h"), "self_attn.k_proj")
    yield weight("v_proj", "d", "k h", (f"{attention}/kv_einsum{suffix}/w", "l 1 k d h"), "self_attn.v_proj")
    yield weight("o_proj", "n h", "d", (f"{attention}/attn_vec_einsum{suffix}/w", "l n h d"), "self_attn.o_proj")
    yield from norm("layers.mlp_norm", "layers/pre_ffw_norm", f"{layer}post_attention_layernorm", stacked=True)
    yield weight("gate_proj", "d", "f", (f"{mlp}/gating_einsum", "l 0 d f"), "mlp.gate_proj")
    yield weight("up_proj", "d", "f", (f"{mlp}/gating_einsum", "l 1 d f"), "mlp.up_proj")
    yield weight("down_proj", "f", "d", (f"{mlp}/linear", "l f d"), "mlp.down_proj")
    yield from norm("final_norm", "final_norm", f"{published}norm", stacked=False)


def _head_rows() -> Iterator[Param]:
    for name, fan_in, fan_out in (("action_in_proj", "a", "d"), ("action_out_proj", "d", "a"), ("time_mlp_in", "c", "d"), ("time_mlp_out", "c", "d")):
        yield Param(
            f"{name}.weight", f"{fan_in} {fan_out}", Init("lecun_normal", fan_in=fan_in), "heads", f"{fan_in} {fan_out}", f"{fan_out} {fan_in}",
            (f"{name}/kernel", f"{fan_in} {fan_out}"), (f"{name}.weight", f"{fan_out} {fan_in}"),
        )  # fmt: skip
        yield Param(f"{name}.bias", fan_out, Init("zeros"), "heads", fan_out, fan_out, (f"{name}/bias", fan_out), (f"{name}.bias", fan_out))


def _tokens(pattern: str) -> list[str]:
    return re.findall(r"\([^)]*\)|\S+", pattern)


def _adapter_rows(row: Param) -> Iterator[Param]:
    """The two low-rank factors of one weight; B starts at zero, so that adapters begin by changing nothing."""
    fan_in, fan_out = (token.strip("()") for token in _tokens(row.jax)[1:])
    grouped_in, grouped_out = _tokens(row.jax)[1:]
    stem, published = row.name.removesuffix(".weight"), row.published[0].removesuffix(".weight")
    for factor, axes, init, jax, torch in (
        ("lora_a", f"l {fan_in} t", Init("lecun_normal", fan_in=fan_in), f"l {grouped_in} t", f"t {grouped_in}"),
        ("lora_b", f"l t {fan_out}", Init("zeros"), f"l t {grouped_out}", f"{grouped_out} t"),
    ):
        target = f"{published}.{factor[:-1]}{factor[-1].upper()}.weight"
        yield Param(f"{stem}.{factor}", axes, init, row.group, jax, torch, ("", ""), (target, torch), adapter=True)


TABLE: tuple[Param, ...] = (
    *_vision_rows(),
    *_gemma_rows("trunk", _TRUNK, "", adaptive=False),
    *_gemma_rows("expert", _EXPERT, "_1", adaptive=True),
    *_head_rows(),
)
_ADAPTERS: dict[str, tuple[Param, ...]] = {row.name: tuple(_adapter_rows(row)) for row in TABLE if row.lora}
ROWS: dict[str, Param] = {row.name: row for base in TABLE for row in (base, *_ADAPTERS.get(base.name, ()))}


def rows(spec: ModelSpec, names: Container[str] | None = None) -> tuple[Param, ...]:
    """The rows that `spec` has: the table's, and behind each weight its adapters where its group has some; of these the ones in `names`."""
    present = (row for row in ROWS.values() if not row.adapter or spec.lora(row.group) is not None)
    return tuple(row for row in present if names is None or row.name in names)


def axis_sizes(spec: ModelSpec, group: Group) -> dict[str, int]:
    """Size of every axis letter as it is used in the rows of `group`."""
    vision, patch = spec.vision, spec.vision.patch_size
    own = {"vision": vision, "trunk": spec.trunk, "expert": spec.expert, "heads": spec.expert}[group]
    sizes = {"l": own.depth, "d": own.width, "n": own.num_heads, "h": own.head_dim, "f": own.mlp_dim, "e": spec.trunk.width, "c": spec.expert.width}
    lora = spec.lora(group)
    sizes |= {} if lora is None else {"t": lora.rank}
    if group == "vision":
        return sizes | {"p": vision.num_patches, "i": patch, "j": patch, "r": IMAGE_CHANNELS}
    return sizes | {"k": spec.trunk.num_kv_heads, "v": spec.vocab_size, "m": len(MODULATION_SLOTS), "a": spec.action_dim}


def shape(row: Param, spec: ModelSpec, layout: Layout = "canonical") -> tuple[int, ...]:
    """Shape of a row's tensor in `layout`; of one layer's tensor where the layout keeps layers apart, of the packed tensor where it packs."""
    sizes = axis_sizes(spec, row.group)
    out = []
    for token in _tokens(row.place(layout)[1]):
        if token.isdigit():
            out.append(PACKED_SLOTS if row.stacked else 1)  # a slot of a packed tensor, or an axis of size one
        else:
            out.append(math.prod(sizes[letter] for letter in token.strip("()").split()))
    return tuple(out)


def shapes(spec: ModelSpec, layout: Layout = "canonical", names: Container[str] | None = None) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model in `layout`; with `names`, of these canonical tensors only."""
    out = {}
    for row in rows(spec, names):
        for name in _names(row, spec, layout):
            out[name] = shape(row, spec, layout)
    return out


def count(spec: ModelSpec, names: Container[str] | None = None) -> int:
    """Number of parameters; with `names`, of these tensors only."""
    return sum(math.prod(shape(row, spec)) for row in rows(spec, names))


def groups(spec: ModelSpec) -> dict[Group, int]:
    """Number of parameters in each group."""
    return {group: sum(math.prod(shape(row, spec)) for row in rows(spec) if row.group == group) for group in GROUPS}


def dead_params(spec: ModelSpec) -> dict[str, str]:
    """Torch-layout names of the tensors whose gradient of the flow loss is zero by mathematics, with the reason.

    Both backends return exact zeros for "no path to the loss"; "softmax is shift-invariant" leaves rounding noise.
    """
    last = spec.trunk.depth - 1
    cut = {ROWS[f"trunk.layers.{part}"].torch_name.format(l=last): "no path to the loss" for part in _DEAD_IN_LAST_LAYER}
    cut["trunk.final_norm.scale"] = "no path to the loss"
    shift = {ROWS["vision.layers.k_proj.bias"].torch_name.format(l=layer): "softmax is shift-invariant" for layer in range(spec.vision.depth)}
    return cut | shift


# Suffix tokens read only keys and values of the last trunk layer; what its prefix rows compute after that, nobody reads.
_DEAD_IN_LAST_LAYER = ("q_proj.weight", "o_proj.weight", "mlp_norm.scale", "gate_proj.weight", "up_proj.weight", "down_proj.weight")


def to_layout(row: Param, array: np.ndarray, spec: ModelSpec, layout: Layout) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of one canonical `array` in a layout that packs nothing (jax, torch, published)."""
    _, pattern = row.place(layout)
    for layer, name in enumerate(_names(row, spec, layout)):
        source, axes = (array[layer], row.axes[2:]) if _splits_layers(row, layout) else (array, row.axes)
        yield name, rearrange(source, f"{axes} -> {pattern}")


def write(tensors: Iterable[tuple[str, np.ndarray]], spec: ModelSpec, layout: Layout, names: Container[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) of every tensor in `layout` from (name, array) of canonical tensors, one at a time.

    names: the canonical tensors that are given; None means all of a model.

    A packed tensor is held until its last slot has arrived, so memory stays at one tensor above the input.

    Raises:
        ParamsError: a canonical tensor is missing, unexpected, twice there or of a wrong shape.
    """
    waiting: dict[str, tuple[np.ndarray, int]] = {}
    seen: set[str] = set()
    for name, array in tensors:
        row = _row(name, array, spec, seen)
        target, pattern = row.place(layout)
        if layout != "openpi":
            yield from to_layout(row, array, spec, layout)
        elif (slot := _slot(row, pattern)) is None:
            yield target, rearrange(array, f"{row.axes} -> {pattern}")
        else:
            whole, filled = waiting.pop(target, (None, 0))
            whole = np.empty(shape(row, spec, layout), array.dtype) if whole is None else whole
            whole[:, slot] = rearrange(array, f"{row.axes} -> {_without_slot(pattern)}")
            if filled + 1 == whole.shape[1]:
                yield target, whole
            else:
                waiting[target] = whole, filled + 1
    wanted = rows(spec, names)
    if missing := [row.name for row in wanted if row.name not in seen]:
        raise ParamsError(f"{len(missing)} of {len(wanted)} tensors were not given: {_listed(missing)}.")


def read(tensors: Mapping[str, np.ndarray], spec: ModelSpec, layout: Layout, names: Container[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (canonical name, canonical array) of every row from the tensors of a model in `layout`.

    names: the canonical tensors that are there; None means all of a model.

    Raises:
        ParamsError: names that are missing or that no row reads, or a tensor of a wrong shape; checked before the first tensor.
    """
    expected = shapes(spec, layout, names)
    missing, unread = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unread:
        raise ParamsError(
            f"The tensors are not a whole {layout} model: {len(missing)} missing ({_listed(missing)}), "
            f"{len(unread)} that no parameter reads ({_listed(unread)})."
        )
    for name, wanted in expected.items():
        if tuple(tensors[name].shape) != wanted:
            raise ParamsError(f"{layout} tensor {name} has shape {tuple(tensors[name].shape)}; the spec says {wanted}.")
    for row in rows(spec, names):
        sizes, (name, pattern) = axis_sizes(spec, row.group), row.place(layout)
        if _splits_layers(row, layout):
            parts = [rearrange(tensors[part], f"{pattern} -> {row.axes[2:]}", **_used(sizes, row.axes[2:])) for part in _names(row, spec, layout)]
            yield row.name, np.stack(parts)
        else:
            slot = _slot(row, pattern)
            source = tensors[name] if slot is None else tensors[name][:, slot]
            yield row.name, rearrange(source, f"{_without_slot(pattern) if slot is not None else pattern} -> {row.axes}", **_used(sizes, row.axes))


def philox(seed: int, stream: str, *counters: int) -> np.random.Generator:
    """A generator keyed by (seed, stream, counters); independent of any other key and of any global state."""
    digest = hashlib.sha256(repr((int(seed), stream, tuple(int(c) for c in counters))).encode()).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], np.uint64)))


def _splits_layers(row: Param, layout: Layout) -> bool:
    return row.stacked and layout in ("torch", "published")


def _names(row: Param, spec: ModelSpec, layout: Layout) -> list[str]:
    name, _ = row.place(layout)
    return [name.format(l=layer) for layer in range(axis_sizes(spec, row.group)["l"])] if _splits_layers(row, layout) else [name]


def _slot(row: Param, pattern: str) -> int | None:
    """The slot of a packed tensor that this row fills, or None."""
    digits = [token for token in _tokens(pattern) if token.isdigit()]
    return int(digits[0]) if digits and row.stacked else None


def _without_slot(pattern: str) -> str:
    return " ".join(token for token in _tokens(pattern) if not token.isdigit())


def _used(sizes: dict[str, int], axes: str) -> dict[str, int]:
    return {letter: sizes[letter] for letter in axes.split()}


def _row(name: str, array: np.ndarray, spec: ModelSpec, seen: set[str]) -> Param:
    if name not in ROWS or (ROWS[name].adapter and spec.lora(ROWS[name].group) is None):
        raise ParamsError(f"There is no parameter {name!r}.")
    if name in seen:
        raise ParamsError(f"Parameter {name} was given twice.")
    if tuple(array.shape) != shape(ROWS[name], spec):
        raise ParamsError(f"Parameter {name} has shape {tuple(array.shape)}; the spec says {shape(ROWS[name], spec)}.")
    seen.add(name)
    return ROWS[name]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"
