"""Grids of pictures and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from torch import Tensor


def grid(pictures: Tensor, columns: int, path: Path, labels: Sequence[str] = ()) -> None:
    """Pictures (n, c, size, size) from -1 to 1 row by row; each row with a label where there are any."""
    rows = -(-len(pictures) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(0.7 * columns + (2 if labels else 0), 0.7 * rows), squeeze=False
    )
    for axis in axes.flat:
        axis.axis("off")
    for index, picture in enumerate(pictures):
        _show(axes[index // columns][index % columns], picture)
    for row, label in enumerate(labels):
        axes[row][0].text(-0.3, 0.5, label, transform=axes[row][0].transAxes, ha="right", va="center", fontsize=8)
    figure.subplots_adjust(left=0.28 if labels else 0.01, right=0.99, top=0.99, bottom=0.01, wspace=0.08, hspace=0.08)
    figure.savefig(path, dpi=110)
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


def plot_losses(losses: Sequence[tuple[int, float]], path: Path) -> None:
    """Losses by step."""
    figure, axis = plt.subplots(figsize=(5, 3))
    axis.plot(*zip(*losses, strict=True))
    axis.set_xlabel("step")
    axis.set_ylabel("loss")
    axis.set_yscale("log")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _show(axis: Any, picture: Tensor) -> None:
    """One channel is ink on paper, three are colours."""
    if len(picture) == 1:
        axis.imshow(-picture[0].numpy(), cmap="gray", vmin=-1, vmax=1)
    else:
        axis.imshow(((picture + 1) / 2).permute(1, 2, 0).numpy())
