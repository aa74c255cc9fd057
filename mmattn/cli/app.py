"""The command line: commands around the recipes and the library, each in a file with its kin.

Everything heavy is imported inside the command that needs it, so that `mmattn --help` answers at once.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from mmattn.cli import encode, inspect, pipelines, recipes
from mmattn.errors import MissingExtraError, MmattnError, import_extra
from mmattn.progress import recorded_interrupts

# Optional imports of transformers, peft and diffusers warn of things that a user of a command cannot change.
IMPORT_WARNINGS = (
    "torch.utils._pytree",
    "bitsandbytes.backends.cpu.ops",
    "diffusers.quantizers.torchao.torchao_quantizer",
)

app = typer.Typer(
    name="mmattn",
    help="Let any frozen model look at something it was never built to see.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(recipes.demo)
app.command()(encode.encode)
app.command()(recipes.train)
app.command()(inspect.compare)
app.command()(pipelines.caption)
app.command()(pipelines.draw)
app.command()(pipelines.ask)
app.command()(pipelines.serve)
app.command("attach-check")(inspect.attach_check)
app.command()(inspect.doctor)
app.command()(inspect.explore)
app.command()(inspect.models)
app.command()(inspect.env)
app.command("ls")(recipes.list_all)
app.command("cp")(recipes.copy)

index_app = typer.Typer(help="Build, copy, search and describe an index of texts.", no_args_is_help=True)
index_app.command("build")(encode.build_index)
index_app.command("copy")(encode.copy_index)
index_app.command("search")(encode.search_index)
index_app.command("info")(encode.describe_index)
app.add_typer(index_app, name="index")


def _print_version(asked: bool) -> None:
    if asked:
        import mmattn

        typer.echo(f"mmattn {mmattn.__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Let any frozen model look at something it was never built to see."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (by default `sys.argv`) and exit.

    The exit code is 0, 1 for a bad verdict, 2 for an error of the package, as one line on stderr, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if not sys.stderr.isatty():  # read by huggingface_hub and transformers when they are imported
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in IMPORT_WARNINGS:
        logging.getLogger(name).setLevel(logging.ERROR)
    with recorded_interrupts() as interrupts:
        try:
            app(["--debug", *words] if debug else words, prog_name="mmattn")
        except BaseException as error:
            if interrupts:  # also where a command catches Ctrl-C to save its work, or a lazy import hides it
                raise SystemExit(130) from error
            if isinstance(error, ModuleNotFoundError) and not debug:
                # Recipes import what they need as any program does; the package names the extra itself.
                from mmattn.cli.environment import MODULES

                module = (error.name or "").partition(".")[0]
                if module in MODULES:
                    try:
                        import_extra(module, MODULES[module])
                    except MissingExtraError as missing:
                        error = missing
            if debug or not isinstance(error, (MmattnError, OSError)):
                raise
            typer.echo(f"mmattn: {error}", err=True)
            sys.exit(2)
