"""Commands around recipes: `demo`, `train`, `ls` and `cp`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mmattn.cli.inspect import write_runs
from mmattn.errors import ConfigError


def demo() -> None:
    """Teach a language model that has never seen a picture to answer questions about pictures, and print the table.

    The table holds the controls beside the good row: no picture, shuffled pictures, a text-only LoRA of equal size.
    It ends with a page that shows what the answers attended to (see `mmattn explore`).
    """
    from mmattn.cli.environment import check_extras
    from mmattn.inspect.trace import FILE
    from mmattn.models.loading import without_progress_bars
    from mmattn.recipes import find_recipe, load_recipe

    check_extras("mmattn demo", "vision", "viz", "data", "models", "train")
    typer.echo("The demo takes about five minutes on two CPU cores.", err=True)
    with without_progress_bars():
        run = load_recipe(find_recipe("vqa").folder, "demo").main()
    if (run / FILE).is_file():
        write_runs({run: "answers"}, run / "explore.html")


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, such as the config.yaml of a recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE…", help="Settings to change.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="0,1,2", help="Run once per seed, and print one table.")] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Measure ten steps, and estimate time and memory of the whole run."),
    ] = False,
) -> None:
    """Run a recipe with the settings of CONFIG.

    Unknown keys are errors, and overrides are KEY=VALUE with dots between sections: optim.lr=1e-3.
    CONFIG's own folder is the recipe if it holds a train.py (a copy made by `mmattn cp`); otherwise its key `recipe`
    names one of `mmattn ls`.
    With --seeds every seed has a folder seed-N in that of the settings, where {seed} in a setting stands for the seed;
    the table there has the mean of each figure ± half its range. Run again, the
    command leaves the seeds that are finished as they are.
    """
    from mmattn.recipes import run_recipe, run_seeds

    if dry_run:
        _measure(config, overrides or (), seeds)
    elif seeds is None:
        run_recipe(config, overrides or ())
    else:
        typer.echo(run_seeds(config, overrides or (), _numbers(seeds)))


def list_all() -> None:
    """List the recipes."""
    from mmattn.recipes import list_recipes

    recipes = list_recipes()
    width = max((len(recipe.name) for recipe in recipes), default=0)
    for recipe in recipes:
        typer.echo(f"{recipe.name:<{width}}  {recipe.summary}".rstrip())
    typer.echo("copy one: mmattn cp RECIPE; or run it: mmattn train CONFIG")


def copy(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A name from `mmattn ls`, or assets.")],
    destination: Annotated[
        Path | None,
        typer.Argument(metavar="[DEST]", help="Folder to copy to; by default the name of the recipe, here."),
    ] = None,
) -> None:
    """Copy a recipe, or the models and pictures of the examples, to edit them. Nothing is overwritten."""
    from mmattn.recipes import copy_recipe

    target = copy_recipe(recipe, destination)
    typer.echo(f"{recipe} copied to {target}")
    if (target / "config.yaml").is_file():
        typer.echo(f"next: mmattn train {shlex.quote(str(target / 'config.yaml'))}")


def _measure(config: Path, overrides: Sequence[str], seeds: str | None) -> None:
    """Print the time and memory that the first training of a run would need."""
    import os
    import tempfile

    from mmattn.recipes import run_recipe
    from mmattn.training import DryRunEnded, dry_run

    if seeds is not None:
        raise ConfigError(f"--dry-run measures one run, and --seeds {seeds} asks for several: leave one of them out")
    with tempfile.TemporaryDirectory(prefix="mmattn-dry-run-") as folder:
        try:
            with dry_run():
                run_recipe(config, [*overrides, f"out={folder}"])
        except DryRunEnded as ended:
            if os.environ.get("RANK", "0") == "0":
                typer.echo(str(ended))
            return
    raise ConfigError(f"{config} trained nothing that could be measured")


def _numbers(text: str) -> list[int]:
    """Return the seeds of "0,1,2"."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds takes different whole numbers with commas between them (0,1,2), got {text!r}")
    return seeds
