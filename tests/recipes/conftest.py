"""Recipes as the command line loads them, and their finished runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmattn.recipes import find_recipe, load_recipe
from tests.recipes import runs


@pytest.fixture(scope="session")
def load_files() -> Callable[..., SimpleNamespace]:
    """A function from a recipe's name and those of its files to these files."""

    def load(recipe: str, *names: str) -> SimpleNamespace:
        folder = find_recipe(recipe).folder
        return SimpleNamespace(**{name: load_recipe(folder, name) for name in names})

    return load


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs, with what they read."""
    folder = tmp_path_factory.mktemp("runs")
    runs.make_drawings(folder / "drawings")
    runs.make_lm(folder / "lm")
    return folder


@pytest.fixture(scope="session")
def finished(run_folder: Path) -> Callable[[str], Path]:
    """A function from a name in `RUNS` to the folder of the run, which is trained when it is first asked for."""
    folders: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name.startswith("ways") and name != "ways reader":
            folder_of("ways reader")
        if name not in folders:
            train = load_recipe(find_recipe(runs.RUNS[name].recipe).folder, "train")
            with runs.standing_in():
                folders[name] = train.main(runs.settings_of(name, run_folder))
        return folders[name]

    return folder_of
