"""Plots with matplotlib, as PNG, SVG or PDF: attention weights over pictures and as maps, masks, metrics."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from mmattn.core.masks import Mask
from mmattn.errors import ConfigError, ShapeError, import_extra
from mmattn.inspect.trace import Trace

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
        raise ConfigError("heat maps need a trace with a grid, which says where sources are: use plot_map")
    weights = trace.mean()
    columns = min(columns, len(weights))
    lines = -(-len(weights) // columns)
    figure = _figure(1.6 * columns, 1.8 * lines)
    picture = None if trace.picture is None else _read(trace.picture)
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


def plot_map(weights: Tensor, path: File, words: Sequence[str] = (), sources: Sequence[str] = ()) -> Path:
    """Plot attention weights as a map with a row for each word.

    Args:
        weights: (l, s).
        path: the file to write.
        words: l names, or none.
        sources: s names, or none.

    Raises:
        ShapeError: weights that are not (l, s), or names that do not fit.
        MissingExtraError: there is no matplotlib.
    """
    l, s = _check_map(weights, words, sources)
    figure = _figure(2 + 0.22 * min(s, 60), 1.5 + 0.22 * min(l, 60))
    axes = figure.add_subplot()
    drawn = axes.imshow(weights.detach().float().cpu().numpy(), cmap="viridis", vmin=0, aspect="auto")
    figure.colorbar(drawn)
    axes.set(xlabel="source", ylabel="word")
    if words:
        axes.set_yticks(range(l), [_literal(word) for word in words], fontsize=7)
    if sources:
        axes.set_xticks(range(s), [_literal(source) for source in sources], fontsize=7, rotation=90)
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
    figure = _figure(3.2 * min(len(grids), 4), 3.2)
    heads = rule.shape[1] if len(rule.shape) == 4 else 1
    for number, grid in enumerate(grids[:4]):
        axes = figure.add_subplot(1, min(len(grids), 4), number + 1)
        axes.imshow(grid.cpu().numpy(), cmap="Greys", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set(xlabel="slot", ylabel="query")
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
        if len(grids) > 1:
            axes.set_title(f"row {number // heads}, head {number % heads}", fontsize=8)
    return _saved(figure, path)


def plot_curves(
    curves: Mapping[str, Mapping[str, Sequence[Mapping[int, float]]]], path: File, *, log: bool = False
) -> Path:
    """Plot metrics over steps: a panel for each, a colour for each run, a line for each of its seeds.

    Args:
        curves: by metric and name of the run the values by step, of each seed.
        path: the file to write.
        log: plot values on a logarithmic axis, as suits a training loss.

    Raises:
        ConfigError: there are none.
        MissingExtraError: there is no matplotlib.
    """
    if not curves:
        raise ConfigError("there is no metric to plot")
    figure = _figure(7, 3.4 * len(curves))
    names = list(dict.fromkeys(name for named in curves.values() for name in named))
    for number, (metric, named) in enumerate(curves.items(), start=1):
        axes = figure.add_subplot(len(curves), 1, number)
        for name, seeds in named.items():
            for values in seeds:
                points = sorted(values.items())
                label = _literal(name) if values is seeds[0] else None
                options = {"color": f"C{names.index(name) % 10}", "label": label, "linewidth": 1.2, "marker": "."}
                axes.plot(*zip(*points, strict=True), **options)
        axes.set(xlabel="step", ylabel=metric)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if log:
            _log_axis(axes)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    return _saved(figure, path)


def _log_axis(axes: Any) -> None:
    """Scale the y axis logarithmically, with several plain numbers as ticks even within one power of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _check_map(values: Tensor, words: Sequence[str], sources: Sequence[str]) -> tuple[int, int]:
    if values.dim() != 2 or not values.numel():
        raise ShapeError(f"a map has two sizes and is not empty, got {tuple(values.shape)}: take the mean over others")
    l, s = values.shape
    if (words and len(words) != l) or (sources and len(sources) != s):
        raise ShapeError(f"a map ({l}, {s}) needs as many names or none, got {len(words)} and {len(sources)}")
    return l, s


def _literal(text: str) -> str:
    """A text of at most 24 characters in which matplotlib sees no mathematics."""
    short = text if len(text) <= 24 else f"{text[:23]}…"
    return short.replace("$", r"\$")


def _read(picture: bytes) -> Any:
    return import_extra("matplotlib.image", "viz").imread(io.BytesIO(picture), format="jpeg")


def _figure(width: float, height: float) -> Any:
    """A figure that is not in pyplot's list of open ones."""
    figure = import_extra("matplotlib.figure", "viz").Figure(figsize=(width, height), layout="tight")
    import_extra("matplotlib.backends.backend_agg", "viz").FigureCanvasAgg(figure)
    return figure


def _saved(figure: Any, path: File) -> Path:
    figure.savefig(path, dpi=110, bbox_inches="tight")
    return Path(path)
