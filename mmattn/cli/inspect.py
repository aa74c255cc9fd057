"""Commands that examine: `doctor`, `explore` and `env`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmattn.cli.arguments import check_adapter_folder


def doctor(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="An adapter's folder.")],
    host: Annotated[str | None, typer.Option(help="The model it was trained on, to be examined with it.")] = None,
) -> None:
    """Examine an adapter folder, and with --host the adapter at work on a random batch.

    One verdict per line, and exit code 1 if one of them is bad.
    """
    check_adapter_folder(folder)
    from mmattn.inspect.diagnosis import diagnose

    report = diagnose(folder, host)
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(1)


def explore(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs, such as runs/vision.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("explore.html"),
    heads: Annotated[bool, typer.Option("--heads", help="Keep every head, not only their mean.")] = False,
) -> None:
    """Write a page that shows what the texts of runs attended to, word by word; it opens offline."""
    from mmattn.inspect.explorer import write_page
    from mmattn.inspect.trace import load_traces

    for note in write_page([trace for run in runs for trace in load_traces(run)], out, heads=heads):
        typer.echo(note)
    typer.echo(f"{out}: {out.stat().st_size:,} bytes")


def env() -> None:
    """Show versions, threads, processor, extras.

    Plain text, to be pasted into a bug report.
    """
    from mmattn.inspect.environment import describe

    typer.echo(describe())
