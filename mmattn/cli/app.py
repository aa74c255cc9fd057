"""The command line: commands around the recipes and the library, each in a file with its kin.

Everything heavy is imported inside the command that needs it, so that `mmattn --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from mmattn.cli import index, inspect, pipelines, recipes

app = typer.Typer(
    name="mmattn",
    help="Let any frozen model look at something it was never built to see.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(recipes.demo)
app.command()(pipelines.live)
app.command()(recipes.train)
app.command()(recipes.schema)
app.command()(pipelines.caption)
app.command()(pipelines.draw)
app.command()(pipelines.ask)
app.command()(inspect.doctor)
app.command()(inspect.explore)
app.command()(inspect.env)
app.command("ls")(recipes.list_all)
app.command("cp")(recipes.copy)

index_app = typer.Typer(help="Build, search and describe an index of texts.", no_args_is_help=True)
index_app.command("build")(index.build_index)
index_app.command("search")(index.search_index)
index_app.command("info")(index.describe_index)
app.add_typer(index_app, name="index")


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Let any frozen model look at something it was never built to see."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error of the package's own is one clean line and exit code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    try:
        app(["--debug", *(word for word in words if word != "--debug")] if debug else words)
    except Exception as error:
        errors = sys.modules.get("mmattn.errors")
        if debug or errors is None or not isinstance(error, (errors.MmattnError, OSError)):
            raise
        typer.echo(f"mmattn: {error}", err=True)
        sys.exit(2)
