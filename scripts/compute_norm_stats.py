"""Computes the statistics that state and actions are normalised with, shows them, and saves them.

    python scripts/compute_norm_stats.py --dataset data/metaworld_mini --robot metaworld --action-horizon 50 --out norm_stats.json

Reads numbers only: no video, no accelerator. A private robot is named by its module, which must be on the Python path (my_lab.arms.my_arm).
"""

import argparse
import sys
import time
from pathlib import Path
from typing import get_args

import numpy as np
import rich.box
import rich.console
import rich.table

from pi05.data.measure import PaddedSteps, compute_norm_stats
from pi05.data.norm_stats import FieldStats
from pi05.data.transforms import LIMIT
from pi05.errors import Pi05Error
from pi05.robots.base import Dim, load_robot

MIN_WIDTH = 120  # a file or a pipe counts as 80 columns, too few for the table
PLAIN = {"highlight": False, "markup": False, "soft_wrap": True}
NUMBERS = ("mean", "std", "q01", "q99", "min", "max")


def flags(stats: FieldStats, dims: tuple[Dim, ...]) -> list[str]:
    """What to look at, one text a dim."""
    out = []
    for still, far, low, high in zip(stats.near_constant(dims), stats.farthest(dims), stats.min, stats.max, strict=True):
        notes = ["constant" if low == high else "hardly moves"] * bool(still)
        notes += [f"outliers: {far:.3g} normalised, limit {LIMIT:g}"] * bool(far > LIMIT)
        out.append("\n".join(notes))
    return out


def show(console: rich.console.Console, key: str, stats: FieldStats, dims: tuple[Dim, ...], deltas: np.ndarray) -> None:
    """Prints one field's table."""
    table = rich.table.Table(title=f"{key}, {stats.count:,} rows", title_justify="left", box=rich.box.SIMPLE_HEAD)
    table.add_column("dim", no_wrap=True)
    for name in NUMBERS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("flags", style="bold red")
    for i, (dim, note) in enumerate(zip(dims, flags(stats, dims), strict=True)):
        label = f"{dim.name} ({dim.unit}{', delta' * bool(deltas[i])})"
        table.add_row(label, *(f"{getattr(stats, name)[i]:.3g}" for name in NUMBERS), note)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, nargs="+", required=True, help="dataset folders; several count as one dataset")
    parser.add_argument("--robot", required=True)
    parser.add_argument("--action-horizon", type=int, required=True)
    parser.add_argument("--padded-steps", choices=get_args(PaddedSteps), default="ignore", help="steps behind an episode's end; count: as openpi does")
    parser.add_argument("--exclude", type=int, nargs="+", default=[], help="episodes to leave out")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    console = rich.console.Console()
    console.width = max(console.width, MIN_WIDTH)
    started = time.perf_counter()
    try:
        robot = load_robot(args.robot)
        stats = compute_norm_stats(args.dataset, robot, action_horizon=args.action_horizon, padded_steps=args.padded_steps, exclude=args.exclude)
        stats.save(args.out)
    except Pi05Error as error:
        console.print(f"error: {error}", style="bold red", **PLAIN)
        return 1
    seconds = time.perf_counter() - started
    show(console, "state", stats.fields["state"], robot.state, np.zeros(len(robot.state), bool))
    show(console, "actions", stats.fields["actions"], robot.actions, robot.delta_mask)
    for key, value in stats.fingerprint.items():
        console.print(f"{key}: {value}", **PLAIN)
    frames = stats.fields["state"].count
    console.print(f"{frames:,} frames in {seconds:.2f} s ({frames / seconds:,.0f} frames/s), saved as {args.out}", **PLAIN)
    return 0


if __name__ == "__main__":
    sys.exit(main())
