"""Grids of pictures and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from torch import Tensor


def grid(pictures: Tensor, columns: int, path: Path, labels: Sequence[str] = ()) -> None:
    """Pictures (n, 1, size, size) from -1 to 1 row by row; each row with a label where there are any."""
    rows = -(-len(pictures) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(0.7 * columns + (2 if labels else 0), 0.7 * rows), squeeze=False
    )
    for axis in axes.flat:
        axis.axis("off")
    for index, picture in enumerate(pictures):
        axes[index // columns][index % columns].imshow(-picture[0].numpy(), cmap="gray", vmin=-1, vmax=1)
    for row, label in enumerate(labels):
        axes[row][0].text(-0.3, 0.5, label, transform=axes[row][0].transAxes, ha="right", va="center", fontsize=8)
    figure.subplots_adjust(left=0.28 if labels else 0.01, right=0.99, top=0.99, bottom=0.01, wspace=0.08, hspace=0.08)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_losses(losses: Sequence[float], path: Path, span: int = 50) -> None:
    """The loss over steps, as the mean of `span` steps."""
    means = [sum(losses[i : i + span]) / len(losses[i : i + span]) for i in range(0, len(losses), span)]
    figure, axis = plt.subplots(figsize=(5, 3))
    axis.plot([span * i for i in range(len(means))], means)
    axis.set_xlabel("step")
    axis.set_ylabel("loss")
    axis.set_yscale("log")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
