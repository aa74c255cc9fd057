"""Grids of pictures and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from torch import Tensor

CELL, GAP, LINE, LETTER, DPI = (
    64,
    6,
    18,
    6.5,
    100,
)  # in pixels, of the grid; a picture is at least CELL wide or as it is


def grid(pictures: Tensor, columns: int, path: Path, labels: Sequence[str] = (), headings: Sequence[str] = ()) -> None:
    """Pictures (n, c, size, size) from -1 to 1 row by row, each of their pixels a square of whole pixels.

    Args:
        pictures: the pictures.
        columns: pictures in a row.
        path: the file.
        labels: one for each row, or none.
        headings: one for each column, or none.
    """
    rows, size = -(-len(pictures) // columns), pictures.shape[-1]
    cell = size * -(-CELL // size)
    left = GAP + (round(LETTER * max(map(len, labels))) + GAP if labels else 0)
    top = GAP + (LINE if headings else 0)
    width, height = left + columns * (cell + GAP), top + rows * (cell + GAP)
    figure = plt.figure(figsize=(width / DPI, height / DPI), facecolor="#e9e9e6")
    for index, picture in enumerate(pictures):
        x, y = left + index % columns * (cell + GAP), top + (index // columns + 1) * (cell + GAP) - GAP
        axis = figure.add_axes((x / width, 1 - y / height, cell / width, cell / height))
        axis.axis("off")
        _show(axis, picture)
    for row, label in enumerate(labels):
        y = top + row * (cell + GAP) + cell / 2
        figure.text((left - GAP) / width, 1 - y / height, label, ha="right", va="center", fontsize=8)
    for column, heading in enumerate(headings):
        x = left + column * (cell + GAP) + cell / 2
        figure.text(x / width, 1 - LINE / 2 / height, heading, ha="center", va="center", fontsize=8)
    figure.savefig(path, dpi=DPI, facecolor=figure.get_facecolor())
    plt.close(figure)


def word_maps(words: Sequence[str], times: Sequence[int], maps: Tensor, drawn: Tensor, path: Path) -> None:
    """A row for each word, a column for each of some steps: the attention to the word; the picture above them.

    Args:
        words: of the sentence.
        times: the time steps.
        maps: (steps, words, h, w), each word's from none to the most that any place gave it at that step.
        drawn: the picture.
        path: the file.
    """
    chosen = sorted({round(i * (len(times) - 1) / 5) for i in range(6)})
    figure, axes = plt.subplots(len(words) + 1, len(chosen), figsize=(1.1 * len(chosen) + 1, 1.0 * len(words) + 1.2))
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    for column, step in enumerate(chosen):
        axes[0][column].axis("off")
        for row, word in enumerate(words):
            axes[row + 1][column].imshow(maps[step, row].numpy(), cmap="magma", vmin=0)
            axes[row + 1][0].set_ylabel(word, rotation=0, ha="right", va="center", fontsize=9)
        axes[1][column].set_title(f"t = {times[step]}", fontsize=8)
    _show(axes[0][0], drawn)
    figure.subplots_adjust(left=0.16, right=0.99, top=0.99, bottom=0.01, wspace=0.05, hspace=0.22)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _show(axis: Any, picture: Tensor) -> None:
    """One channel is ink on paper, three are colours."""
    if len(picture) == 1:
        axis.imshow(-picture[0].numpy(), cmap="gray", vmin=-1, vmax=1, interpolation="nearest")
    else:
        axis.imshow(((picture + 1) / 2).permute(1, 2, 0).numpy(), interpolation="nearest")
