"""Draws a contact sheet: real frames as they are, and as each preset of augmentation shows them to the model.

    python scripts/show_augmentation.py --out docs/pictures/augmentation.png

Each row is a camera of data/metaworld_mini at one moment, each column but the first one sample of training; below each other are the same draws.
"""

import argparse
from pathlib import Path
from typing import get_args

import matplotlib.figure
import numpy as np
import torch

from pi05.data.augment import Augmentation, draw_augmentation
from pi05.data.dataset import open_dataset
from pi05.data.images import resize_with_pad
from pi05.robots import load_robot
from pi05.torch_backend.augment import augment
from pi05.torch_backend.model import from_numpy

DATA = Path(__file__).resolve().parents[1] / "data" / "metaworld_mini"
ROWS = (1290,)  # moments, as rows of the dataset: opening a drawer
EDGE, COUNT, SEED = 224, 3, 102  # a seed whose three samples of openpi show a black corner, and colours that stay


def sheet() -> np.ndarray:
    """uint8[row, column, EDGE, EDGE, 3]: the frame, then COUNT samples of each preset."""
    robot = load_robot("metaworld")
    dataset, cameras = open_dataset(DATA, robot=robot, action_horizon=1), tuple(robot.cameras)
    moments = [[resize_with_pad(dataset[row][column], EDGE) for column in robot.cameras.values()] for row in ROWS]
    out = [np.concatenate(moments)[:, None]]
    for preset in get_args(Augmentation)[1:]:
        draws = draw_augmentation(preset, cameras, EDGE, seed=SEED, epoch=0, positions=np.arange(COUNT))
        shown = [augment(from_numpy(np.stack([moment] * COUNT)), from_numpy(draws), torch.float32).numpy() for moment in moments]
        out.append(np.concatenate(shown, 1).swapaxes(0, 1))
    return np.concatenate([out[0], *((127.5 * (images + 1)).round().astype(np.uint8) for images in out[1:])], 1)


def draw(images: np.ndarray) -> matplotlib.figure.Figure:
    """The sheet, labelled."""
    rows, columns = images.shape[:2]
    figure = matplotlib.figure.Figure(figsize=(columns * 1.4, rows * 1.4 + 0.3), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.015, h_pad=0.015, wspace=0, hspace=0)
    titles = ["as it is", *(f"{preset} {number + 1}" for preset in get_args(Augmentation)[1:] for number in range(COUNT))]
    for place, axes in zip(np.ndindex(rows, columns), figure.subplots(rows, columns).flat, strict=True):
        axes.imshow(images[place])
        axes.set(xticks=[], yticks=[])
        if place[0] == 0:
            axes.set_title(titles[place[1]], fontsize=8)
        if place[1] == 0:
            axes.set_ylabel("wrist camera" if place[0] % 2 else "base camera", fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(sheet()).savefig(out, dpi=100, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    main()
