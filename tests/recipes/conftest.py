"""Recipes as the command line loads them, and their finished runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from mmattn.recipes import find_recipe, load_recipe
from tests.recipes import runs


class Files(SimpleNamespace):
    """The files of a recipe, each loaded when it is asked for."""

    def __getattr__(self, name: str) -> ModuleType:
        return load_recipe(self.folder, name)


@pytest.fixture(scope="module")
def recipe(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The files of the recipe that the module of tests names."""
    return Files(folder=find_recipe(request.module.RECIPE).folder)


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


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, finished: Callable[[str], Path]) -> Path:
    """A finished run of a few steps of the recipe that the module of tests names."""
    return finished(request.module.RECIPE)
