"""Configs on the command line: arguments to a config, `python -m pi05.config`, and the text of docs/configs.md."""

import dataclasses
import inspect
import itertools
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic
import rich.box
import rich.console
import rich.table
from pydantic_core import PydanticUndefined

from pi05.config import TrainConfig, load_config
from pi05.config_files import ALIASES, DEFAULT, USER_FOLDER, config_files, find_origin, item_kind, section_fields
from pi05.errors import ConfigError, Pi05Error
from pi05.params import GROUPS
from pi05.spec import LoRA

DEFAULT_CONFIG = "tiny"
MIN_WIDTH = 120  # a file or a pipe counts as 80 columns, too few for a path
FLAGS = ("resume", "overwrite")
PAGE = Path("docs") / "configs.md"
USAGE = """python -m pi05.config list                              every config there is
python -m pi05.config explain [NAME] [--any.field value]   every field's final value, and who set it
python -m pi05.config docs [FILE]                       writes docs/configs.md"""


@dataclasses.dataclass(frozen=True)
class RunFlags:
    """What to do where the run's folder exists already. Neither: refuse."""

    resume: bool = False
    overwrite: bool = False


@dataclasses.dataclass(frozen=True)
class Explained:
    """One line of an explanation: the final value of a field as text, and its origin."""

    field: str
    value: str
    origin: str


def parse_cli(arguments: Sequence[str], default: str = DEFAULT_CONFIG) -> tuple[TrainConfig, RunFlags]:
    """The config and the flags of `[CONFIG] [--any.field value] [--resume | --overwrite]`; '-' and '_' in a field are one.

    Raises:
        ConfigError: an argument is none of these, or as get_config.
    """
    name, overrides, given = split_arguments(arguments, FLAGS)
    if len(given) > 1:
        raise ConfigError("--resume continues the run, --overwrite deletes it first: give one of them.")
    config, _ = load_config(default if name is None else name, overrides)
    return config, RunFlags(**dict.fromkeys(given, True))


def split_arguments(arguments: Sequence[str], flags: Sequence[str] = ()) -> tuple[str | None, dict[str, str], list[str]]:
    """The config's name or None, the text of each field, and the flags that were given.

    Raises:
        ConfigError: a second name, or a field without a value.
    """
    names: list[str] = []
    overrides: dict[str, str] = {}
    given: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--"):
            names.append(argument)
            continue
        key, equals, value = argument[2:].partition("=")
        key = key.replace("-", "_")
        if key in flags and not equals:
            given.append(key)
            continue
        value = value if equals else next(rest, None)
        if not key or value is None or (not equals and value.startswith("--")):
            raise ConfigError(f"{argument} needs a value: {argument} VALUE, or --{key or 'field'}=VALUE.")
        overrides[key] = value
    if len(names) > 1:
        raise ConfigError(f"{names[0]!r} and {names[1]!r}: there is one config to a run. A field is set by --field value.")
    return (names[0] if names else None), overrides, list(dict.fromkeys(given))


def explain(name: str, overrides: Mapping[str, str] | None = None) -> list[Explained]:
    """Every field of a config. Sizes that are null are those of the preset.

    Raises:
        ConfigError: as get_config.
    """
    config, origins = load_config(name, overrides)
    spec, preset = config.spec(), f"preset {config.model.preset}"
    out = [Explained("name", config.name, "file name")]
    for field, value in _leaves(config.model_dump(mode="json", exclude={"name"}), ""):
        size = field.removeprefix("model.")
        if value is None and field.startswith("model.") and hasattr(spec, size):
            out.append(Explained(field, str(getattr(spec, size)), preset))
        else:
            out.append(Explained(field, _show(value), find_origin(origins, field)))
    return out


def reference() -> str:
    """The text of docs/configs.md."""
    return "\n".join([*_introduction(), *_sections(TrainConfig, ""), ""])


def summary(path: Path) -> str:
    """The first line of a config file's comment."""
    first = path.read_text().partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def main(arguments: Sequence[str]) -> int:
    """`python -m pi05.config`; returns the exit code."""
    console = rich.console.Console(soft_wrap=True, highlight=False, markup=False)
    console.width = max(console.width, MIN_WIDTH)
    try:
        return _run(console, arguments)
    except Pi05Error as error:
        console.print(f"error: {error}", style="bold red")
        return 2


def _run(console: rich.console.Console, arguments: Sequence[str]) -> int:
    command, *rest = arguments or ("help",)
    if command == "list" and not rest:
        for name, paths in config_files().items():
            for path in paths:
                console.print(f"{name:<44} {summary(path)}  ({path})")
    elif command == "explain":
        name, overrides, _ = split_arguments(rest)
        _print_table(console, explain(DEFAULT_CONFIG if name is None else name, overrides))
    elif command == "docs" and len(rest) < 2:
        page = Path(rest[0]) if rest else Path(__file__).resolve().parents[1] / PAGE
        if not page.parent.is_dir():
            raise ConfigError(f"There is no folder {page.parent} to write the field reference to. Name a file: python -m pi05.config docs FILE.")
        page.write_text(reference())
        console.print(f"wrote {page}")
    else:
        console.print(USAGE)
        return 0 if command in ("help", "-h", "--help") else 2
    return 0


def _print_table(console: rich.console.Console, rows: Sequence[Explained]) -> None:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for column in ("field", "value", "set by"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row.field, row.value, row.origin, style="dim" if row.origin == DEFAULT else "")
    console.print(table, soft_wrap=False)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Dotted names and values; lists of plain values are one value."""
    if isinstance(value, Mapping) and value:
        inner = value.items()
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        inner = enumerate(value)
    else:
        yield name, value
        return
    for key, part in inner:
        yield from _leaves(part, f"{name}.{key}" if name else str(key))


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_show, value))}]"
    return "{}" if isinstance(value, Mapping) and not value else f"{value:g}" if isinstance(value, float) else str(value)


def _introduction() -> list[str]:
    aliases = [
        f"`{alias}: {'true' if meanings else 'float16'}` is `compute.{field}: {meanings[True] if meanings else 'float16'}`"
        for alias, (field, meanings) in ALIASES.items()
    ]
    return [
        "# Configs",
        "",
        "<!-- Written by `python -m pi05.config docs`; tests/test_config.py tells when to run it again. -->",
        "",
        "A config is a YAML file; its stem is its name. `python -m pi05.config list` shows all there are, `python -m pi05.config explain NAME` every",
        "field's final value and who set it: the default, a base, the file or the command line.",
        "",
        f"* Names are looked up in your folder (`${USER_FOLDER}`, else `configs` in the current one) and in the one that comes with pi05. A path that ends in",
        "  `.yaml` works in place of a name.",
        "* `base: NAME` inherits another config; fields that the file sets win, lists are replaced whole.",
        "* `--any.field value` on the command line wins over files; the value is YAML (`null`, `1e-4`, `[5, 11]`), items of lists are counted:",
        "  `--data.datasets.0.weight 2`.",
        "* A relative path belongs to whoever wrote it: in a file it starts at the file's folder, on the command line at the current one. Where a field",
        "  takes paths and other things, a path starts with `./`, `../`, `/` or `~`.",
        f"* As in xense-openpi: {'; '.join(aliases)}. They may stand at the top, in `model` or in `compute`.",
        "* An unknown field is an error, and so is a value that a backend could not honour or that contradicts another.",
        "",
        f"Groups of parameters are {', '.join(GROUPS)}.",
        "",
        "## Configs that come with pi05",
        "",
        "| name | for |",
        "|---|---|",
        *(f"| `{path.stem}` | {summary(path)} |" for path in sorted((Path(__file__).resolve().parents[1] / "configs").glob("*.yaml"))),
        "",
    ]


def _sections(kind: Any, name: str) -> Iterator[str]:
    """A heading, the docstring and a table of a section's fields; then its inner sections."""
    fields = section_fields(kind)
    section = _section_class(kind)
    described = getattr(section, "model_fields", {})
    text, entries = _split_docstring(section, fields)
    yield from [f"## {name or 'Top level'}", "", *text, *([""] if text else [])]
    yield from ["| field | type | default | |", "|---|---|---|---|"]
    inner = {}
    for field, annotation in fields.items():
        if section is TrainConfig and field == "name":
            continue  # no field of a file
        below = annotation if section_fields(annotation) else item_kind(annotation)
        if section_fields(below) and _section_class(below) is not LoRA:
            inner[f"{name}.{field}".lstrip(".") + (".N" if below is not annotation else "")] = below
        description = described[field].description if field in described else ""
        yield f"| `{field}` | {_type_name(annotation)} | {_default(section, field)} | {(description or '').replace('|', chr(92) + '|')} |"
    yield ""
    yield from [*(f"* {entry}" for entry in entries), *([""] if entries else [])]
    for inner_name, inner_kind in inner.items():
        yield from _sections(inner_kind, inner_name)


def _section_class(kind: Any) -> type:
    parts = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    return next(part for part in parts if section_fields(part))


def _split_docstring(section: type, fields: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The paragraphs of a docstring, and its entries "name, name: text"."""
    text, entries = [], []
    for paragraph in inspect.cleandoc(section.__doc__ or "").split("\n\n"):
        for indented, group in itertools.groupby(paragraph.split("\n"), lambda line: line.startswith(" ")):
            for line in group:
                names = re.match(r"([\w, ]+):", line)
                if indented and entries:
                    entries[-1] += f" {line.strip()}"
                elif names and set(names[1].split(", ")) <= set(fields):
                    entries.append(line)
                else:
                    text.append(line)
    return text, entries


def _type_name(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(part) for part in args)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin is tuple:
        return f"list of {_type_name(args[0])}"
    if origin is typing.Annotated:
        return _type_name(args[0])
    if section_fields(kind):
        return "{" + ", ".join(section_fields(kind)) + "}" if kind is LoRA else "section"
    names = {type(None): "null", str: "text", bool: "true, false", Path: "path", int: "whole number", float: "number"}
    return names.get(kind, "{slot: column or null}")


def _default(section: type, field: str) -> str:
    if issubclass(section, pydantic.BaseModel):
        info = section.model_fields[field]
        value = info.get_default(call_default_factory=True)
    else:
        value = next(entry.default for entry in dataclasses.fields(section) if entry.name == field)
    if value is PydanticUndefined or value is dataclasses.MISSING:
        return "required"
    if section_fields(type(value)):
        return ""
    return f"`{_show(value.relative_to(Path.cwd()) if isinstance(value, Path) else value)}`"
