"""Plots with matplotlib, as PNG, SVG or PDF: attention weights over pictures, masks, metrics."""

from __future__ import annotations

import io
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mmattn.core.masks import Mask
from mmattn.errors import ConfigError, import_extra
from mmattn.inspect.trace import Trace

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

File = str | PathLike[str]


def plot_heat_maps(trace: Trace, path: File, columns: int = 6) -> Path:
    """Plot for each word of a trace the weights of the patches over their picture, the mean over layers and heads.

    Args:
        trace: with a grid.
        path: the file to write.
        columns: pictures in a row, at most.

    Raises:
        ConfigError: the sources are not the patches of a picture.
        MissingExtraError: there is no matplotlib.
    """
    if trace.grid is None:
        raise ConfigError("heat maps need a trace with a grid, which says where sources are: use write_page")
    weights = trace.mean()
    columns = min(columns, len(weights))
    lines = -(-len(weights) // columns)
    figure = _figure(1.6 * columns, 1.8 * lines)
    picture = _read(trace.picture) if isinstance(trace.picture, bytes) else None
    # One scale for all words: else uniform weights would seem as sharp as any.
    most = float(weights.max())
    for number, (word, row) in enumerate(zip(trace.words, weights, strict=True)):
        axes = figure.add_subplot(lines, columns, number + 1)
        axes.set_title(_literal(word), fontsize=8)
        axes.set_axis_off()
        height, width = trace.grid if picture is None else picture.shape[:2]
        if picture is not None:
            axes.imshow(picture)
        axes.imshow(
            row.view(trace.grid).numpy(), cmap="inferno", vmin=0, vmax=most, alpha=1 if picture is None else 0.6,
            extent=(0, width, height, 0), interpolation="bilinear",
        )  # fmt: skip
    return _saved(figure, path)


def plot_mask(mask: Mask | Tensor, path: File) -> Path:
    """Plot a mask for each row and head, four at most: dark where a query may attend to a slot.

    Args:
        mask: (l, m), (b, l, m) or (b, h, l, m) bool.
        path: the file to write.

    Raises:
        MaskError: a mask that is not bool.
        ShapeError: a mask of another shape.
        MissingExtraError: there is no matplotlib.
    """
    rule = mask if isinstance(mask, Mask) else Mask(mask)
    grids = rule.tensor.reshape(-1, *rule.shape[-2:])
    figure, ticks = _figure(3.2 * min(len(grids), 4), 3.2), import_extra("matplotlib.ticker", "viz")
    heads = rule.shape[1] if len(rule.shape) == 4 else 1
    for number, grid in enumerate(grids[:4]):
        axes = figure.add_subplot(1, min(len(grids), 4), number + 1)
        axes.imshow(grid.cpu().numpy(), cmap="Greys", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set(xlabel="slot", ylabel="query")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(ticks.MaxNLocator(integer=True))
        if len(grids) > 1:
            axes.set_title(f"row {number // heads}, head {number % heads}", fontsize=8)
    return _saved(figure, path)


def plot_curves(curves: Mapping[str, Mapping[str, Mapping[int, float]]], path: File, *, log: bool = False) -> Path:
    """Plot metrics over steps: a panel for each metric, a line for each name.

    Args:
        curves: by metric and name the values by step.
        path: the file to write.
        log: plot values on a logarithmic axis, as suits a training loss.

    Raises:
        ConfigError: there are none.
        MissingExtraError: there is no matplotlib.
    """
    if not curves:
        raise ConfigError("there is no metric to plot")
    figure, ticks = _figure(7, 3.4 * len(curves)), import_extra("matplotlib.ticker", "viz")
    names = list(dict.fromkeys(name for named in curves.values() for name in named))
    for number, (metric, named) in enumerate(curves.items(), start=1):
        axes = figure.add_subplot(len(curves), 1, number)
        for name, values in named.items():
            points, colour = sorted(values.items()), f"C{names.index(name) % 10}"
            axes.plot(*zip(*points, strict=True), color=colour, label=_literal(name), linewidth=1.2, marker=".")
        axes.set(xlabel="step", ylabel=metric)
        axes.xaxis.set_major_locator(ticks.MaxNLocator(integer=True))
        if log:  # several plain numbers as ticks even within one power of ten
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.yaxis.set_major_locator(ticks.LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if high < 30 * low else (1, 3)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(ticks.NullFormatter())
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    return _saved(figure, path)


def _literal(text: str) -> str:
    """Shorten a text to 24 characters in which matplotlib sees no mathematics."""
    short = text if len(text) <= 24 else f"{text[:23]}…"
    return short.replace("$", r"\$")


def _read(picture: bytes) -> np.ndarray:
    return import_extra("matplotlib.image", "viz").imread(io.BytesIO(picture), format="jpeg")


def _figure(width: float, height: float) -> Figure:
    """Return a figure that is not in pyplot's list of open ones."""
    figure = import_extra("matplotlib.figure", "viz").Figure(figsize=(width, height), layout="tight")
    import_extra("matplotlib.backends.backend_agg", "viz").FigureCanvasAgg(figure)
    return figure


def _saved(figure: Figure, path: File) -> Path:
    figure.savefig(path, dpi=110, bbox_inches="tight")
    return Path(path)
