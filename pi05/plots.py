"""Pictures of a run: the first batch as the model gets it, and loss curves.

Axes: B, C, A, M (spec.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pi05.batch import Batch, Draws
from pi05.data.images import contact_sheet

Curve = tuple[Sequence[int] | np.ndarray, Sequence[float] | np.ndarray]

DPI = 120
SMOOTHED = 60  # points from which on a running mean is drawn over the curve
COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e")
STYLES = ("-", (0, (4, 3)), ":", "-.")  # curves that lie on each other are all seen


def loss_curve_png(
    path: Path, runs: Mapping[str, Curve], *, title: str = "Training loss", ylabel: str = "loss", baseline: tuple[str, float] | None = None
) -> Path:
    """Draws the loss of every step of each run, label -> (steps, losses), and for two runs their relative difference below. Returns `path`.

    Steps that are not finite are crosses on the upper edge: they are neither left out nor drawn over. From SMOOTHED points on a running
    mean lies over the curve. baseline: a (name, loss) drawn as a line, such as what a constant action gets.

    Raises:
        ValueError: there is no run, or steps and losses differ in length.
    """
    curves = {label: (np.asarray(steps, np.int64), np.asarray(losses, np.float64)) for label, (steps, losses) in runs.items()}
    if not curves or any(steps.shape != losses.shape for steps, losses in curves.values()):
        raise ValueError("loss_curve_png needs at least one run, and as many losses as steps in each.")
    two = len(curves) == 2
    figure = Figure(figsize=(8, 6.4 if two else 4.5), dpi=DPI, layout="constrained")
    axes = figure.subplots(2 if two else 1, 1, sharex=True, squeeze=False, height_ratios=(3, 1.3) if two else (1,))[:, 0]
    for i, (label, (steps, losses)) in enumerate(curves.items()):
        _draw_curve(axes[0], label, steps, losses, i)
    if baseline:
        axes[0].axhline(baseline[1], color="0.35", linewidth=1, linestyle=(0, (1, 2)), label=f"{baseline[0]} ({baseline[1]:.4g})")
    finite = np.concatenate([losses[np.isfinite(losses)] for _, losses in curves.values()])
    if finite.size and finite.min() > 0 and finite.max() > 20 * finite.min():
        axes[0].set_yscale("log")
    axes[0].set(title=title, ylabel=ylabel)
    axes[0].grid(alpha=0.25)
    axes[0].legend(loc="upper right", frameon=False, fontsize=9)
    if two:
        _draw_difference(axes[1], curves)
    axes[-1].set_xlabel("step")
    return _save(figure, path)


def first_batch_sheet(
    path: Path,
    batch: Batch,
    draws: Draws,
    decode: Callable[[np.ndarray], str],
    cameras: Sequence[str],
    *,
    dim_names: Sequence[str] | None = None,
    samples: int = 8,
    tile: int = 224,
) -> Path:
    """Writes a PNG of the first `samples` of a batch: images, the text that the model reads, the actions that it is to predict. Returns `path`.

    decode: int32[n] token ids to text (Tokenizer.decode). cameras: names of the batch's cameras, in order. dim_names: of the robot's action dims.
    Images are those before augmentation, which the backend computes from the draws; where there are such draws the captions say so.
    """
    rows = []
    for b in range(min(samples, len(batch.actions))):
        tokens = batch.observation.tokens[b][batch.observation.token_mask[b]]
        images: dict[str, np.ndarray | None] = {
            camera: _as_uint8(batch.observation.images[b, c]) if batch.observation.image_mask[b, c] else None for c, camera in enumerate(cameras)
        }
        real = ~batch.action_is_pad[b]
        images["actions (normalised) by step"] = _draw_actions(batch.actions[b], real, ~batch.action_dim_is_pad[b], dim_names, tile)
        real_actions = batch.actions[b][real][:, ~batch.action_dim_is_pad[b]]
        augmented = "" if draws.augment is None else ", images shown before augmentation"
        caption = (
            f"sample {batch.sample_ids[b]}: {decode(tokens)!r} ({len(tokens)} tokens; actions in [{real_actions.min():.2f}, {real_actions.max():.2f}], "
            f"{real.sum()} of {len(real)} steps and {real_actions.shape[1]} of {batch.actions.shape[2]} dims real; flow time {draws.time[b]:.3f}{augmented})"
        )
        rows.append((caption, images))
    return contact_sheet(rows, path, tile=tile)


def _draw_curve(axis: Axes, label: str, steps: np.ndarray, losses: np.ndarray, index: int) -> None:
    colour, style, smooth = COLOURS[index % len(COLOURS)], STYLES[index % len(STYLES)], len(steps) >= SMOOTHED
    marker = "o" if len(steps) == 1 else ""
    axis.plot(steps, losses, color=colour, linewidth=0.8 if smooth else 1.5, alpha=0.35 if smooth else 1, linestyle="-" if smooth else style, marker=marker)
    finite = np.isfinite(losses)
    last = f"{losses[-1]:.4g}" if len(losses) else "no step"
    if smooth:
        width = max(5, len(steps) // 40)
        mean = np.convolve(losses, np.ones(width) / width, mode="valid")  # plain: NaN leaves a gap
        axis.plot(steps[width - 1 :], mean, color=colour, linewidth=1.8, linestyle=style, label=f"{label}: mean of {width} steps (last step {last})")
    else:
        axis.plot([], [], color=colour, linewidth=1.5, linestyle=style, marker=marker, label=f"{label} (last step {last})")
    if not finite.all():
        axis.plot(
            steps[~finite],
            np.ones((~finite).sum()),
            "x",
            color=colour,
            transform=axis.get_xaxis_transform(),
            clip_on=False,
            label=f"{label}: {(~finite).sum()} steps not finite",
        )


def _draw_difference(axis: Axes, curves: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """|a - b| / |b| where both runs have the step; what is not finite in one of them is a cross."""
    (name_a, (steps_a, a)), (name_b, (steps_b, b)) = curves.items()
    common, where_a, where_b = np.intersect1d(steps_a, steps_b, return_indices=True)
    with np.errstate(all="ignore"):
        difference = np.abs(a[where_a] - b[where_b]) / np.abs(b[where_b])
    finite = np.isfinite(difference)
    shown = np.maximum(difference, 1e-9)
    axis.semilogy(common, np.where(finite, shown, np.nan), color="0.2", linewidth=1)
    if not finite.all():
        axis.plot(common[~finite], np.ones((~finite).sum()), "x", color="0.2", transform=axis.get_xaxis_transform(), clip_on=False)
    worst = f"largest {difference.max():.2e}" if len(common) else "no step in common"  # NaN if one is
    axis.set(ylabel="relative difference", title="")
    axis.text(0.99, 0.95, f"|{name_a} − {name_b}| / |{name_b}|: {worst}", transform=axis.transAxes, ha="right", va="top", fontsize=9)
    axis.margins(y=0.25)
    axis.grid(alpha=0.25)


def _draw_actions(actions_AM: np.ndarray, real_A: np.ndarray, real_M: np.ndarray, names: Sequence[str] | None, size: int) -> np.ndarray:  # noqa: N803
    """uint8[size, size, 3]: a line for every real dim; steps behind the episode's end are shaded."""
    figure = Figure(figsize=(size / DPI, size / DPI), dpi=DPI)
    canvas = FigureCanvasAgg(figure)
    axis = figure.add_axes((0.16, 0.12, 0.81, 0.84))
    steps, dims = np.arange(len(real_A)), np.flatnonzero(real_M)
    colours = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, len(dims)))
    for colour, dim in zip(colours, dims, strict=True):
        label = names[dim] if names and dim < len(names) else f"dim {dim}"
        axis.plot(steps, actions_AM[:, dim], color=colour, linewidth=1, label=label, marker="." if len(steps) == 1 else "")
    if not real_A.all():
        axis.axvspan(steps[real_A][-1] + 0.5, max(len(steps) - 1, 1), color="0.85", zorder=0)
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, -1.1), max(high, 1.1))  # where normalised actions lie, so that samples compare
    axis.tick_params(labelsize=5, length=2, pad=1)
    axis.grid(alpha=0.2)
    if len(dims) <= 8:
        axis.legend(fontsize=4, frameon=False, ncols=math.ceil(len(dims) / 4), loc="best", handlelength=1)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:size, :size, :3].copy()


def _as_uint8(image: np.ndarray) -> np.ndarray:
    """A model's image, uint8 or float in [-1, 1], as uint8."""
    return image if image.dtype == np.uint8 else ((image + 1) * 127.5).round().astype(np.uint8)


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)
    return path
