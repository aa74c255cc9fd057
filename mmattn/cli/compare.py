"""The command that puts runs side by side: `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs, such as runs/vision.")],
    metrics: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A metric over steps; give it several times. [loss, eval_loss]"),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture to write.")] = Path("compare.png"),
) -> None:
    """Compare runs, of one recipe or of several: settings that differ, their tables, their metrics over steps.

    A folder that `mmattn train --seeds` wrote is one run: means of its seeds, ± half the range in the tables. Without
    matplotlib there is no picture.
    """
    from mmattn.errors import MissingExtraError
    from mmattn.inspect.plots import plot_curves
    from mmattn.training.compare import METRICS, compare_runs, curves_of, read_seeds

    names = [run.resolve().name for run in runs]
    given = {
        name if names.count(name) == 1 else str(run): read_seeds(run) for run, name in zip(runs, names, strict=True)
    }
    shown = tuple(metrics or METRICS)
    typer.echo(compare_runs(given, shown))
    curves = curves_of(given, shown)
    if not curves:
        typer.echo(f"\nno run has {' or '.join(shown)} in its metrics")
        return
    try:
        typer.echo(f"\n{plot_curves(curves, out)}")
    except MissingExtraError as error:
        typer.echo(f"\nno picture: {error}")
