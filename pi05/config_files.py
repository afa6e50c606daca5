"""Config files as trees of plain values: where they are, what they inherit, who set which value. What the fields mean is config.py's matter.

A relative path belongs to whoever wrote it: in a file it starts at the file's folder, on the command line at the current one. Everything
here takes `root`, the pydantic class of the whole config, and reads its annotations.
"""

import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml

from pi05.errors import ConfigError

Tree = dict[str, Any]

SUFFIX = ".yaml"
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")  # no slash, no leading dot: it cannot lead out of a folder
PLACE = "place"  # Annotated[str, PLACE]: a path if it starts with ./, ../, / or ~, else something of another kind (a Hub id, a URL)
FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")
USER_FOLDER = "PI05_CONFIGS"  # environment variable
COMMAND_LINE, DEFAULT = "command line", "default"
ALIASES = {  # of xense-openpi's configs
    "use_cudnn_attention": ("attention", {True: "fused", False: "explicit"}),
    "cudnn_attention_dtype": ("attention_dtype", None),
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """The values that one source sets. origin: which, for a person."""

    origin: str
    values: Tree


def config_folders() -> tuple[Path, ...]:
    """Where configs are looked up: the user's folder ($PI05_CONFIGS, else ./configs), then the one that comes with pi05."""
    package = Path(__file__).resolve().parent
    shipped = next((folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir()), None)
    if (own := os.environ.get(USER_FOLDER)) and not Path(own).is_dir():
        raise ConfigError(f"${USER_FOLDER} is {own!r}, which is no folder. Correct or unset it.")
    found = [Path(own or "configs"), *([shipped] if shipped else [])]
    return tuple(dict.fromkeys(folder.resolve() for folder in found if folder.is_dir()))


def config_files() -> dict[str, list[Path]]:
    """Every config by name, sorted; more than one file where two folders have it."""
    files: dict[str, list[Path]] = {}
    for path in sorted((path for folder in config_folders() for path in folder.glob(f"*{SUFFIX}")), key=lambda path: path.stem):
        files.setdefault(path.stem, []).append(path)
    return files


def find_config(name: str) -> Path:
    """The file of a config, by its name or by its path (which ends in .yaml).

    Raises:
        ConfigError: there is no such file, `name` is neither, or two folders have it.
    """
    if name.endswith((SUFFIX, ".yml")):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"There is no config file {name} (from {Path.cwd()}).")
        return path.resolve()
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of a config: letters, digits, '_', '-' and '.' only. The path of a file ends in {SUFFIX}.")
    files = config_files()
    found = files.get(name, [])
    if len(found) > 1:
        raise ConfigError(f"There are two configs called {name!r}: {' and '.join(map(str, found))}. Rename yours, or give its path.")
    if not found:
        near = difflib.get_close_matches(name, files, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"There is no config {name!r}.{hint} There are {', '.join(files) or 'none'} (in {', '.join(map(str, config_folders())) or 'no folder'})."
        )
    return found[0]


def read_layers(path: Path, root: type) -> list[Layer]:
    """A config file and all it inherits (`base: NAME`), the farthest base first.

    Raises:
        ConfigError: a file is not YAML, names an unknown field, or inherits itself.
    """
    layers: list[Layer] = []
    seen: list[Path] = []
    origin = f"file {path.name}"
    while True:
        if path in seen:
            raise ConfigError(f"{' -> '.join(file.stem for file in [*seen, path])}: a config cannot inherit itself. Remove one `base:`.")
        seen.append(path)
        tree = _read_file(path)
        base = tree.pop("base", None)
        layers.append(Layer(origin, clean(tree, root, where=str(path), folder=path.parent)))
        if base is None:
            return layers[::-1]
        if not isinstance(base, str) or not NAME.fullmatch(base) or base.endswith(SUFFIX):
            raise ConfigError(f"{path}: base is {base!r}; it must be the name of a config, such as {path.stem}.")
        path, origin = find_config(base), f"base {base}"


def read_overrides(overrides: Mapping[str, str], root: type) -> Layer:
    """Values from the command line, {"schedule.peak_lr": "1e-4"}; a number in a name is a place in a list, data.datasets.0.weight.

    Raises:
        ConfigError: an unknown field, or a value that is no YAML.
    """
    tree: Tree = {}
    for name, text in overrides.items():
        *parents, leaf = name.split(".")
        section = tree
        for part in parents:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(f"The command line sets {name} and something that holds it. Set one of them.")
        section[leaf] = text if leaf not in ALIASES and _takes_text(_annotation(root, name, COMMAND_LINE), text) else parse_tree(text, f"--{name}")
    return Layer(COMMAND_LINE, clean(tree, root, where=COMMAND_LINE, folder=Path.cwd()))


def merge(layers: Sequence[Layer]) -> tuple[Tree, dict[str, str]]:
    """The values of all layers, later ones over earlier ones, and the origin of each dotted name that was set. Lists are replaced whole."""
    tree: Tree = {}
    origins: dict[str, str] = {}
    for layer in layers:
        tree = _merge(tree, layer.values, layer.origin, origins, "")
    return tree, origins


def find_origin(origins: Mapping[str, str], name: str) -> str:
    """Who set the field `name`, a section that holds it, or a part of it."""
    parts = name.split(".")
    holders = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((origins[key] for key in [*holders, *(key for key in origins if key.startswith(f"{name}."))] if key in origins), DEFAULT)


def clean(tree: Tree, root: type, *, where: str, folder: Path) -> Tree:
    """`tree` with aliases translated, names checked and relative paths made absolute from `folder`.

    Raises:
        ConfigError: a field is unknown; gives the nearest one. `where` is the source.
    """
    return _clean(_translate_aliases(tree, where), root, "", root, where, folder)


def section_fields(kind: Any) -> dict[str, Any]:
    """Annotations of the fields of a section (a pydantic model or a dataclass, maybe with `| None`); empty for anything else."""
    for part in _alternatives(kind):
        if isinstance(part, type) and issubclass(part, pydantic.BaseModel):
            names = list(part.model_fields)
        elif dataclasses.is_dataclass(part):
            names = [field.name for field in dataclasses.fields(part)]
        else:
            continue
        hints = typing.get_type_hints(part, include_extras=True)
        return {name: hints[name] for name in names}
    return {}


def item_kind(kind: Any) -> Any:
    """The annotation of the items of a list; None where `kind` is no list."""
    return next((typing.get_args(part)[0] for part in _alternatives(kind) if typing.get_origin(part) is tuple), None)


def field_names(kind: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields below a section; of lists, the first item."""
    for name, inner in section_fields(kind).items():
        if section_fields(inner):
            yield from field_names(inner, f"{prefix}{name}.")
        elif section_fields(item := item_kind(inner)):
            yield from field_names(item, f"{prefix}{name}.0.")
        else:
            yield prefix + name


def parse_tree(text: str, where: str) -> Any:
    """Plain values; 1e-4 is a number, and no key stands twice.

    Raises:
        ConfigError: `text` is no YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is no YAML: {error}") from error


def parse_fields(text: str, where: str) -> Tree:
    """parse_tree of a whole config.

    Raises:
        ConfigError: `text` is no YAML, or no fields with values.
    """
    tree = parse_tree(text, where)
    if not isinstance(tree, dict):
        raise ConfigError(f"{where} holds no config: it must be fields with values, `batch_size: 32`.")
    return tree


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        if doubled := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"the key {doubled[0]!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


def _read_file(path: Path) -> Tree:
    try:
        return parse_fields(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _translate_aliases(tree: Tree, where: str) -> Tree:
    """Moves the aliases, at the top or in `model` or `compute`, to the fields in `compute` that they stand for."""
    out = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    places = {name: out[name] for name in ("model", "compute") if isinstance(out.get(name), dict)} | {"": out}
    for place, section in places.items():
        for alias in [key for key in section if key in ALIASES]:
            field, meanings = ALIASES[alias]
            value = section.pop(alias)
            if meanings is not None and not isinstance(value, bool):
                raise ConfigError(f"{where}: {alias} is {value!r}; it must be true or false.")
            new = value if meanings is None else meanings[value]
            compute = out.setdefault("compute", {})
            if not isinstance(compute, dict) or compute.setdefault(field, new) != new:
                raise ConfigError(
                    f"{where}: {f'{place}.{alias}'.lstrip('.')} says compute.{field} is {new!r}, which the same source sets otherwise. Remove one."
                )
    return out


def _clean(value: Any, kind: Any, name: str, root: type, where: str, folder: Path) -> Any:
    fields, item = section_fields(kind), item_kind(kind)

    def deeper(key: Any, part: Any, kind: Any) -> Any:
        return _clean(part, kind, _join(name, key), root, where, folder)

    if fields and isinstance(value, Mapping):
        if unknown := [key for key in value if key not in fields]:
            raise _unknown_field(root, _join(name, unknown[0]), where)
        return {key: deeper(key, part, fields[key]) for key, part in value.items()}
    if item is not None and isinstance(value, list):
        return [deeper(i, part, item) for i, part in enumerate(value)]
    if item is not None and isinstance(value, Mapping) and all(str(key).isdigit() for key in value):
        return {str(key): deeper(key, part, item) for key, part in value.items()}
    if isinstance(value, str) and (Path in _alternatives(kind) or _is_place(kind) and value.startswith((".", "~"))):
        return os.path.abspath(folder / Path(value).expanduser())
    return value


def _merge(old: Any, new: Any, origin: str, origins: dict[str, str], name: str) -> Any:
    def deeper(key: str, before: Any) -> Any:
        return _merge(before, new[key], origin, origins, _join(name, key))

    if isinstance(old, list) and isinstance(new, Mapping):
        if beyond := [key for key in new if int(key) >= len(old)]:
            raise ConfigError(f"{origin}: there is no {name}.{beyond[0]}; the list has {len(old)} items, counted from 0.")
        return [deeper(str(i), item) if str(i) in new else item for i, item in enumerate(old)]
    if isinstance(new, Mapping):
        old = old if isinstance(old, Mapping) else {}
        return {**old, **{key: deeper(key, old.get(key)) for key in new}}
    for below in [key for key in origins if key.startswith(f"{name}.")]:
        del origins[below]
    if isinstance(new, list) and new and all(isinstance(item, Mapping) for item in new):
        return [_merge(None, item, origin, origins, f"{name}.{i}") for i, item in enumerate(new)]
    origins[name] = origin
    return new


def _join(section: str, key: Any) -> str:
    return f"{section}.{key}" if section else str(key)


def _alternatives(kind: Any) -> list[Any]:
    """The parts of a union, or the annotation itself."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [part for alternative in typing.get_args(kind) for part in _alternatives(alternative)]
    return [kind]


def _is_place(kind: Any) -> bool:
    return any(PLACE in getattr(part, "__metadata__", ()) for part in _alternatives(kind))


def _takes_text(kind: Any, text: str) -> bool:
    """Whether the characters of a command line are the value, with no YAML to read: fields of text, unless they say null."""
    parts = [part for part in _alternatives(kind) if part is not type(None)]
    texts = [part for part in parts if part in (str, Path) or _is_place(part) or typing.get_origin(part) is typing.Literal]
    return len(texts) == len(parts) and not (text == "null" and type(None) in _alternatives(kind))


def _annotation(root: type, name: str, where: str) -> Any:
    """The annotation of the field with a dotted name."""
    kind: Any = root
    for part in name.split("."):
        item = item_kind(kind)
        if item is not None and part.isdigit():
            kind = item
        elif part in (fields := section_fields(kind)):
            kind = fields[part]
        elif keyed := _value_kind(kind):
            kind = keyed
        elif part in ALIASES:
            return Any
        else:
            raise _unknown_field(root, name, where)
    return kind


def _value_kind(kind: Any) -> Any:
    """The annotation of the values of a mapping; None where `kind` is none."""
    plain = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
    return typing.get_args(plain)[1] if typing.get_origin(plain) is Mapping else None


def _unknown_field(root: type, name: str, where: str) -> ConfigError:
    """The error for a name that no field has, with the nearest that there is."""
    every = list(field_names(root))
    section, dot, leaf = name.rpartition(".")
    siblings = [field for field in every if field.startswith(section + dot)]
    leaves = {field.rpartition(".")[2]: field for field in reversed(every)}
    near = difflib.get_close_matches(name, siblings, n=1) or [leaves[key] for key in difflib.get_close_matches(leaf, leaves, n=1)]
    hint = f" Did you mean {near[0]!r}?" if near else ""
    known = sorted({field[len(section + dot) :].partition(".")[0] for field in siblings})
    return ConfigError(f"{where}: there is no field {name!r}.{hint}" + (f" Fields{f' of {section}' if section else ''}: {', '.join(known)}." if known else ""))
