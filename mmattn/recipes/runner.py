"""Running a recipe: from a file of settings to the folder of the run, once or for several seeds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from mmattn.progress import recorded_interrupts
from mmattn.recipes.assets import find_recipe, load_recipe
from mmattn.recipes.settings import check_settings, raise_settings_error, read_settings, refuse


def run_recipe(config: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Any:
    """Run a recipe with the settings of a file, as `mmattn train` does; what a sweep calls for each trial.

    A run that is finished is left as it is, and one that was killed goes on.

    Args:
        config: the file, beside the recipe's train.py or with a key `recipe`.
        overrides: `section.key=value` each, the value in YAML.

    Returns:
        What the recipe's `main` returns: the folder of the run.

    Raises:
        ConfigError: no recipe, an unknown key, or a value of the wrong kind.
        KeyboardInterrupt: Ctrl-C, also where the recipe catches it to save what it has.
    """
    module, settings = _prepared(Path(config), overrides)
    with _settings_errors(), _interrupts_raised():
        return module.main(settings)


def run_seeds(config: str | os.PathLike[str], overrides: Iterable[str], seeds: Sequence[int]) -> str:
    """Run a recipe with each of some seeds, and write one table of all, each figure as mean ± half the range.

    Every seed has a folder `seed-N` in that of the settings, beside `table.md`; "{seed}" in a setting stands for the
    seed.

    Args:
        config: as in `run_recipe`; its recipe has a `table(contents)` that makes a text of the contents of all
            `table.json`, and leaves a run that is finished as it is.
        overrides: as in `run_recipe`.
        seeds: to run with, one after the other.

    Returns:
        The table.

    Raises:
        ConfigError: as in `run_recipe`, or a recipe without a table.
        AdapterFileError: a `table.json` is damaged.
        SystemExit: with 130, of a run that Ctrl-C ended before its table.
    """
    from mmattn.storage.files import write_text
    from mmattn.storage.json_files import read_json

    module, settings = _prepared(Path(config), overrides)
    table: Any = getattr(module, "table", None)
    if table is None or "out" not in settings:
        refuse(
            f"--seeds makes one table of several runs: {module.__file__} must have a function `table(contents)`, and "
            "its settings an `out`"
        )
    tables = []
    for seed in seeds:
        out = Path(settings["out"]) / f"seed-{seed}"
        with _settings_errors():
            module.main({**_of_seed(settings, seed), "seed": seed, "out": str(out)})
        if not (out / "table.json").is_file():
            raise SystemExit(130)
        tables.append(read_json(out / "table.json", max_bytes=64 << 20))
    text: str = table(tables)
    write_text(Path(settings["out"]) / "table.md", text + "\n")
    return text


def recipe_of(config: Path, settings: dict[str, Any]) -> Path:
    """The folder of the recipe that a settings file belongs to: its own, or that of the recipe it names."""
    folder = config.resolve().parent
    if (folder / "train.py").is_file():
        return folder
    name = settings.get("recipe")
    if not isinstance(name, str):
        refuse(f"{config} lies beside no train.py, so it must say `recipe: NAME`; got {name!r}")
    return find_recipe(name).folder


def _of_seed(value: Any, seed: int) -> Any:
    if isinstance(value, dict):
        return {key: _of_seed(inner, seed) for key, inner in value.items()}
    return value.replace("{seed}", str(seed)) if isinstance(value, str) else value


def _prepared(config: Path, overrides: Iterable[str]) -> tuple[ModuleType, dict[str, Any]]:
    """A recipe's train.py, and settings that its `Config` has checked."""
    settings = read_settings(config, overrides)
    module = load_recipe(recipe_of(config, settings), "train")
    model = getattr(module, "Config", None)
    if model is not None:
        if "recipe" not in model.model_fields:
            settings = {key: value for key, value in settings.items() if key != "recipe"}
        settings = check_settings(settings, model)
    return module, settings


@contextlib.contextmanager
def _settings_errors() -> Iterator[None]:
    """Turn errors of a running recipe about its settings into the errors of reading them."""
    from pydantic import ValidationError

    try:
        yield
    except ValidationError as error:
        raise_settings_error(error)


@contextlib.contextmanager
def _interrupts_raised() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the block, too, where what is called in it caught Ctrl-C."""
    with recorded_interrupts() as interrupts:
        yield
    if interrupts:
        raise KeyboardInterrupt
