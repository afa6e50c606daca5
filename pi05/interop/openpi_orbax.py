"""openpi's JAX checkpoints: an orbax tree of parameters under params/, statistics under assets/<asset id>/.

Reading goes through tensorstore, which orbax keeps its arrays with: it starts no JAX, so that a PyTorch run can read them and keep its GPU.

openpi's low-rank adapters are cut by heads. With x the input, s = alpha / rank, per head n:
    q, k, v:      delta W[n] = s A[n] B[n]
    output:       delta W[n] = s A[n] (sum over m of B[m]), since openpi sums over heads before B and again behind it
    feed-forward: delta W = A B, without s
So they are adapters A B of ours with A = the A[n] side by side and B block-diagonal, of rank heads * rank, and scale 1.
Letters as in params.py; t is openpi's rank.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange

from pi05.errors import CheckpointError
from pi05.interop.assets import Assets, Sidecar, read_openpi_assets, write_openpi_assets
from pi05.interop.infer import check_is_pi05, infer_spec
from pi05.interop.source import Shape, Source, has_lora, packed_counts, table_build, table_places
from pi05.params import ROWS, Param, shape, shapes, write
from pi05.spec import LoRA, ModelSpec

METADATA = "_METADATA"
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def find_params(folder: Path) -> Path | None:
    """The folder of the tree: `folder` or its params/; None if it is neither."""
    return next((path for path in (folder, folder / "params") if (path / METADATA).is_file() or (path / "manifest.ocdbt").is_file()), None)


def open_orbax(folder: Path, *, like: ModelSpec | None = None, lora_alpha: Mapping[str, float] | None = None, asset_id: str | None = None) -> Source:
    """Opens a checkpoint of openpi's JAX trainer, by its step's folder or that folder's params/.

    like: see infer_spec. lora_alpha: {group: alpha} of its adapters, which the tree does not hold; default their rank, as in both of openpi's variants.
    asset_id: which of several statistics.

    Raises:
        CheckpointError: it is no Pi0.5 of openpi's, or there are several statistics to choose from.
    """
    where = find_params(folder)
    if where is None:
        raise CheckpointError(f"{folder} holds no orbax tree: there is no {METADATA} in it nor in its params/.")
    root = where.parent if where.name == "params" else where
    arrays = _open_arrays(where)
    sizes = {name: tuple(array.shape) for name, array in arrays.items()}
    check_is_pi05(list(sizes), where)
    sidecar = Sidecar.load(root)
    spec = infer_spec(sizes, "openpi", where, sidecar.spec if sidecar else like)
    ranks, alphas = _ranks(sizes), dict(lora_alpha or {})
    spec, notes = _with_adapters(spec, ranks, alphas)
    if sidecar is None and like is None:
        notes.append(f"action_horizon {spec.action_horizon} and max_token_len {spec.max_token_len} are openpi's defaults: no tensor depends on them")
    base_places, base_build = table_places(spec, "openpi"), table_build(spec, "openpi")
    adapter = _AdapterReader(spec, {group: alphas.get(group, rank) / rank for group, rank in ranks.items()})
    packed = packed_counts("openpi")
    return Source(
        kind="openpi-jax",
        where=where,
        spec=spec,
        sizes=sizes,
        read=lambda name: np.asarray(arrays[name].read().result()),
        places=lambda row: adapter.places(row, sizes) if row.adapter else base_places(row),
        build=lambda row, tensors: adapter.build(row, tensors) if row.adapter else base_build(row, tensors),
        packed=packed | {_adapter_leaf(leaf, factor): count for leaf, count in packed.items() for factor in ("lora_a", "lora_b")},
        assets=sidecar.assets if sidecar else read_openpi_assets(root, asset_id),
        history=sidecar.history if sidecar else (),
        notes=tuple(notes),
    )


def write_orbax(folder: Path, tensors: Iterator[tuple[str, np.ndarray]], spec: ModelSpec, assets: Assets, history: tuple[str, ...]) -> None:
    """Writes a checkpoint that openpi restores, with pi05.json beside it.

    Raises:
        CheckpointError: the model has adapters, which openpi cuts in another way.
    """
    if has_lora(spec):
        raise CheckpointError("openpi cuts adapters in another way than ours, so these have no place in its tree. Merge them: --merge-lora.")
    _write_tree((folder / "params").resolve(), shapes(spec, "openpi"), write(tensors, spec, "openpi"))
    write_openpi_assets(folder, assets)
    Sidecar(spec, assets, history).save(folder)


def _write_tree(where: Path, sizes: Mapping[str, Shape], tensors: Iterator[tuple[str, np.ndarray]]) -> None:
    """Writes the arrays one at a time: orbax makes the checkpoint with numbers in their places, then each array takes its own.

    Orbax alone would hold the tree twice, 27 GB of the published model.
    """
    import orbax.checkpoint as ocp
    import tensorstore

    tree: dict[str, Any] = {}
    for name in sizes:
        *parents, leaf = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = np.zeros((), np.float32)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(where, {"params": tree})
    for name, array in tensors:
        place = {"driver": "ocdbt", "base": f"file://{where}/", "path": f"params.{name.replace('/', '.')}/"}
        chunks = [1, *array.shape[1:]] if array.ndim > 2 else list(array.shape)  # one a layer, so that none is larger than 270 MB
        schema = {"dtype": "<f4", "shape": list(array.shape), "chunks": chunks, "compressor": {"id": "zstd", "level": 1}}
        target = tensorstore.open({"driver": "zarr", "kvstore": place, "metadata": schema}, create=True, delete_existing=True).result()
        target.write(array, can_reference_source_data_indefinitely=True).result()


def _open_arrays(where: Path) -> dict[str, Any]:
    """A handle of every array by openpi's name, without the outer "params" and the inner "value" that some of its trees have."""
    import tensorstore

    base = f"file://{where.resolve()}/"
    kvstore = {"driver": "ocdbt", "base": base} if (where / "manifest.ocdbt").is_file() else base
    keys = [key.decode() for key in tensorstore.KvStore.open(kvstore).result().list().result()]
    drivers = {"/.zarray": "zarr", "/zarr.json": "zarr3"}
    found = {key.removesuffix(end): driver for key in keys for end, driver in drivers.items() if key.endswith(end)}
    if not found:
        raise CheckpointError(f"{where} holds no arrays. Copy or download it again.")
    context = tensorstore.Context()
    handles = {}
    for key, driver in found.items():
        place = kvstore | {"path": f"{key}/"} if isinstance(kvstore, dict) else f"{base}{key}/"
        handles[key] = tensorstore.open({"driver": driver, "kvstore": place}, read=True, context=context)
    names = list(found)
    for strip in (lambda name: name.removeprefix("params."), lambda name: name.removesuffix(".value")):
        stripped = [strip(name) for name in names]
        names = stripped if all(map(str.__ne__, names, stripped)) else names
    return {name.replace(".", "/"): handles[key].result() for name, key in zip(names, found, strict=True)}


def _adapter_leaf(leaf: str, factor: str) -> str:
    """openpi's name of an adapter: attn/q_einsum/w -> attn/q_einsum/lora_a, mlp/linear -> mlp/linear_lora_a."""
    return f"{leaf.removesuffix('/w')}/{factor}" if leaf.endswith("/w") else f"{leaf}_{factor}"


def _adapter_place(row: Param) -> tuple[str, str, Param]:
    """Name and pattern in openpi's tree of an adapter, and the row of its weight."""
    stem, factor = row.name.rsplit(".", 1)
    base = ROWS[f"{stem}.weight"]
    leaf, pattern = base.openpi
    letters = pattern.split()
    letters[-1 if factor == "lora_a" else -2] = "t"
    return _adapter_leaf(leaf, factor), " ".join(letters), base


def _ranks(sizes: Mapping[str, Shape]) -> dict[str, int]:
    """openpi's rank in each group that has adapters."""
    ranks: dict[str, set[int]] = {}
    for row in ROWS.values():
        if row.name.endswith(".lora_a") and row.group in ("trunk", "expert") and (leaf := _adapter_place(row)[0]) in sizes:
            ranks.setdefault(row.group, set()).add(sizes[leaf][-1])
    if mixed := [group for group, found in ranks.items() if len(found) > 1]:
        raise CheckpointError(f"The adapters of {mixed[0]} have several ranks, {sorted(ranks[mixed[0]])}; pi05 reads one rank a group.")
    return {group: found.pop() for group, found in ranks.items()}


def _with_adapters(spec: ModelSpec, ranks: Mapping[str, int], alphas: Mapping[str, float]) -> tuple[ModelSpec, list[str]]:
    if unknown := sorted(alphas.keys() - ranks.keys()):
        raise CheckpointError(f"An alpha is given for adapters of {unknown[0]}, which the checkpoint does not have; it has {', '.join(ranks) or 'none'}.")
    notes = []
    for group, rank in ranks.items():
        ours = rank * getattr(spec, group).num_heads  # the block-diagonal form; scale 1, openpi's own scale goes into B
        spec = spec.replace(**{f"{group}__lora": LoRA(ours, float(ours))})
        told = f"alpha {alphas[group]:g}" if group in alphas else f"alpha {rank}, its rank: the tree does not say, --lora-alpha does"
        notes.append(f"{group} has openpi's adapters of rank {rank}, {told}; cut by heads, they are adapters of rank {ours} here")
    return spec, notes


class _AdapterReader:
    """openpi's adapters as ours. scale: alpha / rank in each group that has some."""

    def __init__(self, spec: ModelSpec, scale: Mapping[str, float]) -> None:
        self.spec, self.scale = spec, scale

    def places(self, row: Param, sizes: Mapping[str, Shape]) -> dict[str, Shape]:
        leaf, pattern, base = _adapter_place(row)
        whole = shape(base, self.spec, "openpi")
        axis = pattern.split().index("t")
        rank = sizes[leaf][axis] if leaf in sizes and len(sizes[leaf]) == len(whole) else 0
        return {leaf: (*whole[:axis], rank, *whole[axis + 1 :])}

    def build(self, row: Param, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
        leaf, pattern, base = _adapter_place(row)
        slot = next((int(letter) for letter in pattern.split() if letter.isdigit()), None)
        source = np.asarray(tensors[leaf] if slot is None else tensors[leaf][:, slot], np.float32)
        letters = [letter for letter in pattern.split() if not letter.isdigit()]
        build = self._a if row.name.endswith("lora_a") else self._b
        return build(row, base, source, " ".join(letters))

    def _a(self, row: Param, base: Param, source: np.ndarray, pattern: str) -> np.ndarray:
        by_head = _by_head(base)
        found = rearrange(source, f"{pattern} -> l d ({by_head} t)") if by_head else source
        return _padded(found, -1, shape(row, self.spec))

    def _b(self, row: Param, base: Param, source: np.ndarray, pattern: str) -> np.ndarray:
        by_head = _by_head(base)
        scale = np.float32(1.0 if base.name.split(".")[-2] in FEED_FORWARD else self.scale[row.group])
        if by_head:
            layers, heads, rank, dim = source.shape
            out = np.zeros((layers, heads, rank, heads, dim), np.float32)
            for head in range(heads):
                out[:, head, :, head] = scale * source[:, head]
            found = rearrange(out, "l n t m h -> l (n t) m h")
        else:
            found = scale * (source.sum(1) if base.name.endswith("o_proj.weight") else source)
        return _padded(found, 1, shape(row, self.spec))


def _by_head(base: Param) -> str:
    """The letter of the heads if a weight's adapters are cut by them."""
    return {"q_proj": "n", "k_proj": "k", "v_proj": "k"}.get(base.name.split(".")[-2], "")


def _padded(array: np.ndarray, axis: int, wanted: Shape) -> np.ndarray:
    """`array` with zeros behind it along `axis`: all adapters of a group have one rank, that of its query."""
    if array.shape == tuple(wanted):
        return array
    pads = [(0, 0)] * array.ndim
    pads[axis] = (0, wanted[axis] - array.shape[axis])
    return np.pad(array, pads)
