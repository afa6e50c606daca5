"""The report of a parity session as one HTML page that needs no other file: pictures are embedded, nothing is loaded from anywhere."""

import base64
import html
import io
import math
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .reporting import changes, find_check, margin, worst

FLOOR = 1e-9  # margins below are drawn here: exact
TREND = 5  # earlier runs shown
COLOURS = {"jax": "#1f77b4", "torch": "#d95f02"}
VERDICTS = {"PASS": "#1b7f3b", "FAIL": "#b3261e", "INCOMPLETE": "#a15c00"}
STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#1c1c1e;max-width:1120px;margin:0 auto;padding:0 20px 60px}
h1{font-size:22px;margin:0}h2{font-size:17px;margin:32px 0 8px}table{border-collapse:collapse;width:100%;font-size:13px}
td,th{padding:3px 8px;text-align:left;border-bottom:1px solid #e5e5ea;vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.band{color:#fff;padding:16px 20px;margin:0 -20px 16px}.band p{margin:4px 0 0}.box{border-left:4px solid #b3261e;background:#fdf1f0;padding:10px 14px}
.changed td{background:#fff6dd}.bad td{background:#fdf1f0}img{max-width:100%}summary{cursor:pointer;font-weight:600;padding:4px 0}code{font-size:12px}
.bar{display:inline-block;width:120px;height:9px;background:#eceff3}.bar i{display:block;height:9px}
"""

Picture = bytes


def pictures(report: Mapping, history: Sequence[Mapping], previous: Mapping | None) -> dict[str, Picture]:
    """PNGs by caption: the worst of each level in this and earlier runs; every module, then every gradient, in the order of execution."""
    out = {"Worst error of each level, in units of its limit. Grey: earlier runs, oldest first. The line is the limit.": _trend(report, history)}
    for level, start, caption in (
        ("L1", "activations ragged", "Every activation, in the order in which a forward pass makes them"),
        ("L3", "gradients ragged", "The gradient of every parameter"),
    ):
        rows = [row for row in report["rows"] if row["level"] == level and row["subject"].startswith(start) and len(row["checks"]) > 1]
        if rows:
            out[f"{caption}: error in units of the limit, which is the red line; gaps are exact. Dashed: the previous run."] = _modules(rows, previous)
    return out


def page(report: Mapping, history: Sequence[Mapping], previous: Mapping | None, tested: Mapping[str, Sequence[str]]) -> str:
    """The page. history: earlier reports, oldest first; previous: the one to compare with; tested: ranges of [tool.pi05.tested]."""
    drawn = pictures(report, history, previous)
    parts = [
        _band(report, previous),
        _divergence(report, previous),
        *(f"<h2>{_text(caption.partition('.')[0].partition(':')[0])}</h2>{_image(png)}<p>{_text(caption)}</p>" for caption, png in drawn.items()),
        "<h2>Every comparison</h2>",
        *_levels(report, previous),
        _mutants(report),
        _problems(report),
        _environment(report, previous, tested),
    ]
    head = f'<meta charset="utf-8"><title>pi05 parity: {report["verdict"]}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}{"".join(parts)}</html>\n'


# ---- Parts of the page


def _band(report: Mapping, previous: Mapping | None) -> str:
    tests = ", ".join(f"{number} {outcome}" for outcome, number in report["tests"].items() if number) or "no test"
    rows = report["rows"]
    compared = sum(len(row["checks"]) for row in rows)
    nearest = max(rows, key=lambda row: margin(worst(row)), default=None)
    near = f"Nearest to its limit: {_percent(margin(worst(nearest)))} ({nearest['level']} {nearest['subject']}, {worst(nearest)['name']})." if nearest else ""
    moved = changes(report, previous) if previous else {}
    against = ", ".join(f"{name} {before} → {now}" for name, (before, now) in moved.items() if name not in ("commit", "machine")) or "the same versions"
    compared_with = f"Compared with the run of {previous['time']}: {against}." if previous else "No earlier run to compare with."
    return (
        f'<div class="band" style="background:{VERDICTS[report["verdict"]]}"><h1>pi05 parity: {report["verdict"]}</h1>'
        f"<p>{_text(tests)}; {compared} tensors compared in {report['seconds']:.0f} s. {_text(near)}</p><p>{_text(compared_with)}</p></div>"
    )


def _divergence(report: Mapping, previous: Mapping | None) -> str:
    where = report["first_divergence"]
    if not where:
        return ""
    before = find_check(previous, where["level"], where["subject"], where["name"])
    was = f" The previous run had {_number(before['error'])}." if before else ""
    return (
        f'<h2>First divergence</h2><div class="box"><b>{_text(where["name"])}</b>, {where["level"]} {_text(where["subject"])}: error '
        f"{_number(where['error'])}, limit {_number(where['limit'])}.{was} Everything that runs before it agrees; what fails behind it may be its effect.</div>"
    )


def _levels(report: Mapping, previous: Mapping | None) -> Iterable[str]:
    for level in sorted({row["level"] for row in report["rows"]}, key=lambda level: int(level[1:])):
        rows = sorted((row for row in report["rows"] if row["level"] == level), key=lambda row: row["subject"])
        top = max(margin(worst(row)) for row in rows)
        body = "".join(_row(row, previous) for row in rows)
        names = ("what", "*tensors", "worst tensor", "*error", "*limit", "of limit", "*", "*previous", "*ratio")
        head = "<tr>" + "".join(f'<th class="n">{name[1:]}' if name.startswith("*") else f"<th>{name}" for name in names) + "</tr>"
        yield (
            f"<details{' open' if top > 1 else ''}><summary>{level}: {len(rows)} comparisons, worst {_percent(top)} of its limit</summary>"
            f"<table>{head}{body}</table></details>"
        )


def _row(row: Mapping, previous: Mapping | None) -> str:
    check = worst(row)
    share, before = margin(check), find_check(previous, row["level"], row["subject"], check["name"])
    was = _number(before["error"]) if before else "-"
    ratio = f"{check['error'] / before['error']:.2g}" if before and before["error"] and check["error"] is not None else "-"
    colour = "#b3261e" if share > 1 else "#d99a1e" if share > 0.5 else "#3f8f5c"
    bar = f'<span class="bar"><i style="width:{100 * min(1, share):.0f}%;background:{colour}"></i></span>'
    return (
        f"<tr{' class=bad' if share > 1 else ''}><td>{_text(row['subject'])}<td class=n>{len(row['checks'])}<td>{_text(check['name'])}"
        f"<td class=n>{_number(check['error'])}<td class=n>{_number(check['limit'])}<td>{bar}<td class=n>{_percent(share)}"
        f"<td class=n>{was}<td class=n>{ratio}</tr>"
    )


def _mutants(report: Mapping) -> str:
    if not report["mutants"]:
        return ""
    rows = "".join(
        f"<tr><td>{_text(mutant['name'])}<td><code>{_text(mutant['caught_by'])}</code><td>{_text(mutant['where'])}<td class=n>{margin(mutant):.1e}</tr>"
        for mutant in report["mutants"]
    )
    table = f'<table><tr><th>fault<th>caught by<th>at<th class="n">of limit</tr>{rows}</table>'
    return f"<h2>Planted faults</h2><details><summary>{len(report['mutants'])} caught</summary>{table}</details>"


def _problems(report: Mapping) -> str:
    rows = "".join(f"<tr><td><code>{_text(name)}</code><td>{_text(reason)}</tr>" for name, reason in report["problems"].items())
    return f"<h2>Tests that did not pass</h2><table>{rows}</table>" if rows else ""


def _environment(report: Mapping, previous: Mapping | None, tested: Mapping[str, Sequence[str]]) -> str:
    moved, rows = (changes(report, previous) if previous else {}), []
    for name, version in report["environment"].items():
        known = tested.get(name.partition(" ")[0])
        before = previous["environment"].get(name, "-") if previous else "-"
        cells = f"<td>{_text(name)}<td>{_text(version)}<td>{_text(before)}<td>{' to '.join(dict.fromkeys(known)) if known else ''}"
        rows.append(f"<tr{' class=changed' if name in moved else ''}>{cells}</tr>")
    table = f"<table><tr><th>component<th>this run<th>previous<th>tested on GPUs</tr>{''.join(rows)}</table>"
    return f"<h2>Environment</h2><p><code>{_text(report['command'])}</code>, {report['time']}</p>{table}"


# ---- Pictures


def _trend(report: Mapping, history: Sequence[Mapping]) -> Picture:
    runs = [*history[-TREND:], report]
    levels = sorted({row["level"] for row in report["rows"]}, key=lambda level: int(level[1:]))
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    axis, width = figure.add_subplot(), 0.8 / len(runs)
    for index, run in enumerate(runs):
        heights = [max((margin(worst(row)) for row in run["rows"] if row["level"] == level), default=0.0) for level in levels]
        drawn = [_clip(height) for height in heights]
        colours = ["#b3261e" if height > 1 else "#3f8f5c" for height in heights] if run is report else "#c3c8d0"
        places = [place - 0.4 + (index + 0.5) * width for place in range(len(levels))]
        axis.bar(places, drawn, width * 0.9, color=colours)
        if run is report:
            for place, height in zip(places, heights, strict=True):
                label = "exact" if height == 0 else _percent(height)
                axis.text(place, _clip(height) * 1.3, label, ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(len(levels)), levels)
    axis.set_xlim(-0.6, max(len(levels), 8) - 0.4)
    axis.set_ylabel("error / limit", fontsize=8)
    _as_margins(axis, [height for run in runs for row in run["rows"] for height in [margin(worst(row))]])
    return _png(figure)


def _modules(rows: Sequence[Mapping], previous: Mapping | None) -> Picture:
    """One panel a precision, one line a backend."""
    precisions = [dtype for dtype in ("float64", "float32", "bfloat16") if any(f" {dtype} " in row["subject"] for row in rows)]
    figure = Figure(figsize=(11, 2.4 * len(precisions) + 1.4), layout="constrained")
    axes = figure.subplots(len(precisions), 1, sharex=True, squeeze=False)[:, 0]
    for axis, dtype in zip(axes, precisions, strict=True):
        shown, heights = [row for row in rows if f" {dtype} " in row["subject"]], []
        for row in shown:
            backend = row["subject"].split()[-1]
            colour = COLOURS.get(backend, "0.3")
            names = [check["name"] for check in row["checks"]]
            margins = [margin(check) for check in row["checks"]]
            heights += margins
            axis.plot(_clipped(margins), marker=".", markersize=3, linewidth=1, color=colour, label=backend)
            before = [find_check(previous, row["level"], row["subject"], name) for name in names]
            if any(before):
                axis.plot(_clipped([margin(check) if check else math.nan for check in before]), "--", linewidth=0.8, color=colour, alpha=0.5)
            first = next((index for index, value in enumerate(margins) if value > 1), None)
            if first is not None:
                axis.annotate(names[first], (first, _clip(margins[first])), xytext=(6, 4), textcoords="offset points", fontsize=8, color="#b3261e")
        _as_margins(axis, heights)
        axis.set_ylabel(f"{dtype}\nerror / limit", fontsize=8)
        axis.legend(fontsize=8, frameon=False, ncols=4, loc="lower right")
        names = [check["name"].removesuffix(" (L2)").removesuffix(" (max)") for check in shown[0]["checks"]]
        step = max(1, len(names) // 45)
        axis.set_xticks(range(0, len(names), step), names[::step], rotation=90, fontsize=6)
    return _png(figure)


def _as_margins(axis: Axes, heights: Iterable[float]) -> None:
    """A logarithmic axis of margins with the limit on it."""
    axis.set_yscale("log")
    lowest = min((height for height in heights if height > 0), default=1e-3)
    axis.set_ylim(max(FLOOR, 10 ** math.floor(math.log10(max(lowest, FLOOR)))) / 2, 10 ** math.ceil(math.log10(_clip(max([1.0, *heights])) * 5)))
    axis.axhline(1.0, color="#b3261e", linewidth=1)
    axis.grid(axis="y", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _clip(value: float) -> float:
    return min(max(value, FLOOR), 1e6)


def _clipped(values: Iterable[float]) -> list[float]:
    """Exact zeros leave gaps."""
    return [_clip(value) if value > 0 else math.nan for value in values]


def _png(figure: Figure) -> Picture:
    out = io.BytesIO()
    figure.set_dpi(110)
    FigureCanvasAgg(figure).print_png(out)
    return out.getvalue()


def _image(png: Picture) -> str:
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _number(value: float | None) -> str:
    return "not finite" if value is None else "0" if value == 0 else f"{value:.1e}"


def _percent(share: float) -> str:
    return "not finite" if math.isinf(share) else "exact" if share == 0 else f"{share:.0%}" if share >= 0.01 else f"{share:.1g}"


def _text(value: str) -> str:
    return html.escape(str(value))
