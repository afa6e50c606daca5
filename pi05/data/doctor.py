"""Examines a dataset before anything is trained on it, says what to repair, and saves what it measured.

    python -m pi05.data.doctor CONFIG [--any.field value]
    python -m pi05.data.doctor --dataset PATH [PATH ...] --robot NAME [--tokenizer PATH]

No GPU, and only a few images of each camera are decoded. The exit code is 0 without errors, 1 with one (with --strict also for a warning), 2 if
nothing could be examined. Beside the dataset, in assets/, or in --out, it leaves a contact sheet to look at and, if there is no error, the
statistics (norm_stats.json) and the lengths of the prompts (token_lengths.json), each with the fingerprint of what it was measured of.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import rich.box
import rich.console
import rich.table
import rich.text

from pi05.batch import PaddedSteps
from pi05.data.dataset import find_dataset
from pi05.data.examination import Part, Report, Subject, examine
from pi05.data.norm_stats import asset_folder
from pi05.data.tokenizer import load_tokenizer
from pi05.errors import Pi05Error
from pi05.robots.base import load_robot
from pi05.spec import ModelSpec

UNLIMITED = 1 << 20  # tokens: lengths are measured before they are judged
MIN_WIDTH = 140  # a file or a pipe counts as 80 columns, too few for the tables
MAX_PROMPTS = 20  # shown; the JSON has all
PLAIN = {"highlight": False, "markup": False, "soft_wrap": True}
STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def subject_of_config(name: str, overrides: dict[str, str]) -> Subject:
    """What a run of this config would read.

    Raises:
        Pi05Error: there is no such config, or it names data that does not exist.
    """
    from pi05.config import get_config
    from pi05.data.run_data import split_episodes

    config = get_config(name, overrides)
    data, spec = config.data, config.spec()
    parts = []
    for dataset in data.datasets:
        split = split_episodes(dataset, data.holdout_episodes)
        exclude = tuple(number for number in split.unused if number not in split.holdout)
        parts.append(Part(find_dataset(dataset.source, revision=dataset.revision), exclude, split.holdout))
    return Subject(
        parts=tuple(parts),
        robot=data.load_robot(),
        action_horizon=spec.action_horizon,
        tokenizer=load_tokenizer(data.tokenizer, max_token_len=UNLIMITED, discrete_state=data.discrete_state, overflow=data.overflow),
        max_token_len=spec.max_token_len,
        padded_steps=config.padded_steps,
        normalization=data.normalization,
        norm_stats=data.norm_stats,
        accept_fps=data.accept_fps,
    )


def subject_of_options(args: argparse.Namespace) -> Subject:
    """What the options of the command line name.

    Raises:
        Pi05Error: there is no such dataset, robot or tokenizer.
    """
    tokenizer = load_tokenizer(args.tokenizer, max_token_len=UNLIMITED) if args.tokenizer else None
    return Subject(
        parts=tuple(Part(find_dataset(source), tuple(args.exclude)) for source in args.dataset),
        robot=load_robot(args.robot),
        action_horizon=args.action_horizon,
        tokenizer=tokenizer,
        max_token_len=args.max_token_len,
        padded_steps=args.padded_steps,
        norm_stats=args.norm_stats,
    )


def show(console: rich.console.Console, report: Report) -> None:
    """Prints a report for a person."""
    facts = report.facts
    for one in facts["datasets"]:
        shortest, median, longest = one["lengths"] or (0, 0, 0)
        line = (
            f"{one['dataset']}: {one['episodes']} episodes of {shortest} to {longest} frames (median {median:g}), {one['frames']} frames at {one['fps']:g}/s; "
            f"{one['padded_share']:.1%} of the steps of chunks of {facts['action_horizon']} are padding; {one['idle_share']:.1%} of the frames stand still"
        )
        console.print(line, **PLAIN)
    numbers = ("min", "q01", "q99", "max")
    for key in ("state", "actions"):
        if key in facts:
            extra = "clipped" if key == "state" else "recorded as"
            rows = [[_dim_label(dim), *(_number(dim[name]) for name in numbers), _extra(dim)] for dim in facts[key]]
            _table(console, f"{key}, as the model sees it before normalisation", ("dim", *numbers, extra), rows)
    prompts = facts["prompts"]
    more = f", the first {MAX_PROMPTS} of them" * (len(prompts) > MAX_PROMPTS)
    rows = [[one["prompt"], f"{one['frames']}", _number(one["tokens"])] for one in prompts[:MAX_PROMPTS]]
    _table(console, f"prompts: {len(prompts)}{more}", ("prompt", "frames", "tokens at most"), rows)
    if "tokens" in facts:
        tokens = facts["tokens"]
        line = f"tokens: p50 {tokens['p50']}, p99 {tokens['p99']}, longest {tokens['max']}; smallest safe max_token_len {tokens['safe']}, "
        console.print(f"{line}the model's is {tokens['limit']}", **PLAIN)
    rows = [
        [one["slot"], one["column"], ", ".join(f"{height} x {width}" for height, width in one["sizes"]), f"{one['brightness']:g}", f"{one['images']}"]
        for one in facts["cameras"]
    ]
    _table(console, "cameras", ("slot", "column", "height x width", "brightness of 255", "images looked at"), rows)
    for finding in report.findings:
        console.print(finding.level, style=STYLES[finding.level], end=" ", **PLAIN)
        console.print(f"[{finding.check}] {finding.where}: {finding.text}", **PLAIN)
    for line in facts["not_checked"]:
        console.print(f"not done: {line}", **PLAIN)
    for name, path in facts["files"].items():
        console.print(f"{name.replace('_', ' ')}: {path}", **PLAIN)
    console.print(", ".join(f"{report.count(level)} {level}{'s' * (report.count(level) != 1)}" for level in STYLES), **PLAIN)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    if (args.config is None) == (args.dataset is None) or (args.dataset is None) != (args.robot is None):
        parser.error("give either a CONFIG, or --dataset and --robot")
    if args.dataset is not None and rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    console, errors = rich.console.Console(), rich.console.Console(stderr=True)
    console.width = max(console.width, MIN_WIDTH)
    try:
        subject = _config_subject(args.config, rest) if args.config is not None else subject_of_options(args)
        out = args.out or asset_folder([part.folder.root for part in subject.parts], subject.robot.name)
        report = examine(subject, out)
    except Pi05Error as error:
        errors.print(f"cannot examine: {error}", style="bold red", **PLAIN)
        return 2
    if args.json:
        console.print(json.dumps(report.to_json(), indent=2, allow_nan=False), **PLAIN)
    else:
        show(console, report)
    return report.exit_code(args.strict)


def _config_subject(name: str, rest: Sequence[str]) -> Subject:
    from pi05.config_cli import split_arguments

    return subject_of_config(name, split_arguments(rest)[1])


def _parser() -> argparse.ArgumentParser:
    published = ModelSpec.pi05()
    parser = argparse.ArgumentParser(
        prog="python -m pi05.data.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a training config; it knows all of the following options but the last three")
    parser.add_argument("--dataset", nargs="+", help="folders or Hub ids; several count as one dataset")
    parser.add_argument("--robot", help="a robot of pi05, or a module of yours (my_lab.arms.my_arm)")
    parser.add_argument("--tokenizer", help="sentencepiece model: a path, Hub id or URL; without it tokens are not counted")
    parser.add_argument("--action-horizon", type=int, default=published.action_horizon)
    parser.add_argument("--max-token-len", type=int, default=published.max_token_len, help="limit that prompts are held to")
    parser.add_argument("--padded-steps", choices=get_args(PaddedSteps), default="ignore", help="steps behind an episode's end, in statistics")
    parser.add_argument("--norm-stats", type=Path, help="statistics that are to be used; default: those of the data")
    parser.add_argument("--exclude", type=int, nargs="+", default=[], help="episodes to leave out")
    parser.add_argument("--out", type=Path, help="folder for what is saved; default: assets/<dataset>-<robot> beside the dataset")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--strict", action="store_true", help="a warning counts as an error")
    return parser


def _table(console: rich.console.Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    table = rich.table.Table(title=title, title_justify="left", box=rich.box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(rich.text.Text(cell) for cell in row))
    console.print(table)


def _dim_label(dim: dict[str, Any]) -> str:
    return f"{dim['name']} ({dim['unit']}{', delta' * dim.get('delta', False)})"


def _extra(dim: dict[str, Any]) -> str:
    if "recorded" in dim:
        return dim["recorded"]
    return f"{dim['clipped']:.1%}" if "clipped" in dim else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
