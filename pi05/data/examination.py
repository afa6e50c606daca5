"""A dataset examined as one robot and one model will read it: all checks in turn, and the numbers behind them.

Axes: S: dims of the robot's state; n: frames.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pi05.batch import PaddedSteps
from pi05.data import camera_checks, checks
from pi05.data.checks import Finding
from pi05.data.dataset import check_rates
from pi05.data.folder import Folder
from pi05.data.images import contact_sheet
from pi05.data.measure import compute_norm_stats, make_fingerprint
from pi05.data.norm_stats import NormStats, read_json
from pi05.data.recording import Recording, read_recording
from pi05.data.token_lengths import TokenLengths, measure_token_lengths, token_fingerprint
from pi05.data.tokenizer import Tokenizer, clipped_share
from pi05.data.transforms import FLOOR, Normalization, normalise, range_floors
from pi05.errors import DataError
from pi05.robots.base import Dim, Robot

COUNTED_FRAMES = 2000  # whose tokens are counted, spread over the data
STATS_FILE, TOKENS_FILE, SHEET_FILE = "norm_stats.json", "token_lengths.json", "contact_sheet.png"


@dataclasses.dataclass(frozen=True)
class Part:
    """One dataset. exclude: episodes that are not used at all; held_out: examined, but not in the statistics."""

    folder: Folder
    exclude: tuple[int, ...] = ()
    held_out: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is examined, and for what.

    tokenizer: with a max_token_len beyond any prompt, or None: tokens are not counted. max_token_len: the model's limit.
    norm_stats: a file with the statistics that are to be used; None: those of the data.
    """

    parts: tuple[Part, ...]
    robot: Robot
    action_horizon: int
    tokenizer: Tokenizer | None
    max_token_len: int
    padded_steps: PaddedSteps = "ignore"
    normalization: Normalization = "quantile"
    norm_stats: Path | None = None
    accept_fps: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Report:
    """What was seen (plain values, for JSON) and what is wrong."""

    facts: dict[str, Any]
    findings: tuple[Finding, ...]

    def count(self, level: checks.Level) -> int:
        return sum(finding.level == level for finding in self.findings)

    def exit_code(self, strict: bool = False) -> int:
        """0, or 1 if there is an error, or with `strict` a warning."""
        return int(self.count("error") > 0 or (strict and self.count("warning") > 0))

    def to_json(self) -> dict[str, Any]:
        return self.facts | {"findings": [dataclasses.asdict(finding) for finding in self.findings]}


def examine(subject: Subject, out: Path) -> Report:
    """Examines the datasets and writes into the folder `out`: a contact sheet; and, if there is no error, statistics and token lengths.

    Raises:
        DataError: `out` cannot be written to, or a file of statistics cannot be read.
    """
    robot = subject.robot
    facts: dict[str, Any] = {"robot": robot.name, "action_horizon": subject.action_horizon, "datasets": [], "cameras": [], "files": {}, "not_checked": []}
    findings: list[Finding] = []
    recordings: list[Recording] = []
    sheet: list[tuple[str, dict[str, np.ndarray | None]]] = []
    for part in subject.parts:
        views, found = camera_checks.look(part.folder, robot, part.exclude)
        findings += found + _check_rate(part, subject)
        facts["cameras"] += [_view_facts(part.folder, view) for view in views]
        try:
            recordings.append(read_recording(part.folder, robot, part.exclude))
        except DataError as error:
            findings.append(Finding("error", "columns", part.folder.name, str(error)))
            sheet += camera_checks.sheet_rows(part.folder, views, {})
            continue
        sheet += camera_checks.sheet_rows(part.folder, views, recordings[-1].first_prompts())
        findings += _check_recording(recordings[-1], subject)
        facts["datasets"].append(_recording_facts(recordings[-1], subject))
    findings += checks.check_prompts(recordings)
    facts["prompts"] = _prompt_facts(recordings, subject.tokenizer, len(robot.state))
    stats = lengths = None
    if len(recordings) == len(subject.parts):
        stats, found = _find_stats(subject, recordings)
        findings += found
    else:
        facts["not_checked"].append("statistics and tokens: the numbers cannot be read")
    if stats is not None:
        lengths, found = _check_with_stats(subject, recordings, stats, facts)
        findings += found
    if lengths is not None:
        findings += _check_saved(out / TOKENS_FILE, lengths)
    report = Report(facts, tuple(sorted(findings, key=lambda finding: ("error", "warning", "note").index(finding.level))))
    try:
        _write(report, out, sheet, stats if subject.norm_stats is None else None, lengths)
    except OSError as error:
        raise DataError(f"{out} cannot be written to ({error}). Name another folder with --out.") from error
    return report


def _check_rate(part: Part, subject: Subject) -> list[Finding]:
    first = subject.parts[0].folder
    control = first.fps if subject.robot.fps is None else subject.robot.fps
    try:
        check_rates([(part.folder.name, part.folder.fps)], control, subject.accept_fps)
    except DataError as error:
        return [Finding("error", "rate", part.folder.name, str(error))]
    return []


def _check_recording(recording: Recording, subject: Subject) -> list[Finding]:
    robot = subject.robot
    return [
        *checks.check_lengths(recording, subject.action_horizon),
        *checks.check_time(recording),
        *checks.check_numbers_finite(recording, robot),
        *checks.check_idle(recording, robot),
        *checks.check_units(recording, robot),
        *_check_own_stats(recording.folder, robot),
    ]


def _check_own_stats(folder: Folder, robot: Robot) -> list[Finding]:
    """LeRobot's statistics without quantiles, as its converter writes them."""
    path = folder.root / "meta/stats.json"
    if not path.is_file() or "q01" in read_json(path, "Copy the meta folder again.").get(robot.state_column, {}):
        return []
    text = (
        "meta/stats.json has no quantiles, which Pi0.5's normalisation needs. pi05 does not read it: python -m pi05.data.doctor and "
        "scripts/compute_norm_stats.py compute exact ones into a file of their own and leave the dataset as it is."
    )
    return [Finding("note", "statistics", folder.name, text)]


def _find_stats(subject: Subject, recordings: Sequence[Recording]) -> tuple[NormStats | None, list[Finding]]:
    """The statistics, of finite episodes if they are computed; a file's must be of this data."""
    left_out = []
    for part, recording in zip(subject.parts, recordings, strict=True):
        bad = recording.episode[~recording.finite].tolist()
        left_out.append(sorted({*part.exclude, *part.held_out, *bad}))
    roots = [part.folder.root for part in subject.parts]
    options: dict[str, Any] = {"action_horizon": subject.action_horizon, "padded_steps": subject.padded_steps, "exclude": left_out}
    if subject.norm_stats is None:
        try:
            return compute_norm_stats(roots, subject.robot, **options), []
        except DataError as error:
            return None, [Finding("error", "statistics", "all datasets", str(error))]
    stats = NormStats.load(subject.norm_stats)
    try:
        stats.check_fingerprint(make_fingerprint(roots, subject.robot, **options))
    except DataError as error:
        sizes = {"state": len(subject.robot.state), "actions": len(subject.robot.actions)}
        fits = all(key in stats.fields and len(stats.fields[key].mean) >= size for key, size in sizes.items())
        return stats if fits else None, [Finding("error", "statistics", str(subject.norm_stats), str(error))]
    return stats, []


def _check_with_stats(subject: Subject, recordings: Sequence[Recording], stats: NormStats, facts: dict[str, Any]) -> tuple[TokenLengths | None, list[Finding]]:
    """What the statistics show, and what they make of states; adds to `facts`."""
    robot, method = subject.robot, subject.normalization
    out: list[Finding] = []
    for key, dims in (("state", robot.state), ("actions", robot.actions)):
        out += checks.check_motion(key, stats.fields[key], dims)
        facts[key] = _field_facts(stats, key, dims)
    guesses = [checks.guess_recorded(recording, robot) for recording in recordings]
    for guess, recording in zip(guesses, recordings, strict=True):
        out += checks.check_actions(recording, robot, guess)
    for i, (fact, delta) in enumerate(zip(facts["actions"], robot.delta_mask, strict=True)):
        fact |= {"recorded": " or ".join(dict.fromkeys(guess[i] for guess in guesses)), "delta": bool(delta)}
    floors = range_floors(robot.state, method, FLOOR)
    states = [normalise(robot.state_to_model(recording.state[recording.finite]), stats.fields["state"], method, floors) for recording in recordings]
    every = np.concatenate(states)
    if not len(every):
        return None, out
    for fact, share in zip(facts["state"], clipped_share(every), strict=True):
        fact["clipped"] = float(share)
    if subject.tokenizer is None:
        facts["not_checked"].append("token lengths: no tokenizer was given (--tokenizer)")
        return None, out
    if subject.tokenizer.discrete_state:
        out += checks.check_clipped(every, robot)
    lengths = _count_tokens(subject, recordings, states, stats)
    facts["tokens"] = {key: getattr(lengths, key) for key in ("p50", "p99", "max", "safe")} | {"limit": subject.max_token_len}
    return lengths, out + _check_tokens(lengths, subject)


def _count_tokens(subject: Subject, recordings: Sequence[Recording], states: Sequence[np.ndarray], stats: NormStats) -> TokenLengths:
    share = COUNTED_FRAMES / sum(map(len, states))
    chosen_states, chosen_prompts = [], []
    for recording, state in zip(recordings, states, strict=True):
        prompt = recording.prompt[recording.finite]
        rows = np.unique(np.linspace(0, len(state) - 1, min(len(state), max(1, round(share * len(state))))).round().astype(int))
        chosen_states.append(state[rows])
        chosen_prompts += [recording.prompts[prompt[row]] if prompt[row] >= 0 else "" for row in rows]
    prompts = sorted({prompt for recording in recordings for prompt in recording.prompts}) or [""]
    assert subject.tokenizer is not None
    fingerprint = token_fingerprint(stats.fingerprint, prompts, subject.tokenizer)
    return measure_token_lengths(subject.tokenizer, np.concatenate(chosen_states), chosen_prompts, prompts, fingerprint)


def _check_tokens(lengths: TokenLengths, subject: Subject) -> list[Finding]:
    limit, cure = subject.max_token_len, f"Set max_token_len to {lengths.safe} or more, shorten prompts, or say overflow: shorten_task."
    if lengths.max > limit:
        return [Finding("error", "tokens", "prompts", f"a prompt has {lengths.max} tokens, max_token_len is {limit}. {cure}")]
    if lengths.safe > limit:
        text = f"the longest prompt seen has {lengths.max} tokens, but another state could make it {lengths.safe}; max_token_len is {limit}. {cure}"
        return [Finding("warning", "tokens", "prompts", text)]
    return []


def _check_saved(path: Path, lengths: TokenLengths) -> list[Finding]:
    """Token lengths that were saved before, of other data."""
    if not path.is_file():
        return []
    try:
        TokenLengths.load(path).check_fingerprint(lengths.fingerprint)
    except DataError as error:
        return [Finding("note", "tokens", str(path), f"is out of date, and so is a max_token_len that was taken from it. {error}")]
    return []


def _write(report: Report, out: Path, sheet: list[tuple[str, dict[str, np.ndarray | None]]], stats: NormStats | None, lengths: TokenLengths | None) -> None:
    files = report.facts["files"]
    if sheet:
        files["contact_sheet"] = str(contact_sheet(sheet, out / SHEET_FILE))
    if report.count("error"):
        report.facts["not_checked"].append("nothing else is saved as long as there are errors")
        return
    for name, made in ((STATS_FILE, stats), (TOKENS_FILE, lengths)):
        if made is not None:
            made.save(out / name)
            files[name.removesuffix(".json")] = str(out / name)


def _view_facts(folder: Folder, view: camera_checks.View) -> dict[str, Any]:
    sizes = [list(size) for size in view.sizes]
    return {
        "dataset": folder.name,
        "slot": view.slot,
        "column": view.column,
        "images": len(view.images),
        "sizes": sizes,
        "brightness": round(view.brightness, 1),
    }


def _recording_facts(recording: Recording, subject: Subject) -> dict[str, Any]:
    lengths = np.array([rows.stop - rows.start for _, rows in recording.episodes()])
    return {
        "dataset": recording.folder.name,
        "fps": recording.folder.fps,
        "episodes": len(lengths),
        "frames": len(recording),
        "lengths": [int(lengths.min()), float(np.median(lengths)), int(lengths.max())] if len(lengths) else [],
        "padded_share": round(checks.padded_share(lengths, subject.action_horizon), 4) if len(lengths) else 0.0,
        "idle_share": round(checks.idle_share(recording, subject.robot), 4),
    }


def _prompt_facts(recordings: Sequence[Recording], tokenizer: Tokenizer | None, state_dim: int) -> list[dict[str, Any]]:
    frames: dict[str, int] = {}
    for recording in recordings:
        for i, prompt in enumerate(recording.prompts):
            frames[prompt] = frames.get(prompt, 0) + int((recording.prompt == i).sum())
    return [{"prompt": prompt, "frames": count, "tokens": tokenizer.length(prompt, state_dim) if tokenizer else None} for prompt, count in frames.items()]


def _field_facts(stats: NormStats, key: str, dims: Sequence[Dim]) -> list[dict[str, Any]]:
    field = stats.fields[key]
    numbers = ("min", "q01", "q99", "max")
    values = {name: [float(value) if np.isfinite(value) else None for value in getattr(field, name)] for name in numbers}
    return [{"name": dim.name, "unit": dim.unit} | {name: values[name][i] for name in numbers} for i, dim in enumerate(dims)]
