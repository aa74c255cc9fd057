"""Find, copy and load the recipes that are installed with the package."""

from __future__ import annotations

import difflib
import importlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from mmattn.errors import ConfigError
from mmattn.models.catalogue import shipped_folder


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelt name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


@dataclass(frozen=True)
class Recipe:
    """A recipe of this installation.

    Args:
        name: of the recipe and of its folder.
        folder: where it is.
        summary: the first sentence of its README.
    """

    name: str
    folder: Path
    summary: str


def list_recipes() -> list[Recipe]:
    """Return the recipes of this installation, sorted by name.

    Raises:
        ConfigError: this installation carries none.
    """
    folders = sorted(p for p in shipped_folder("recipes").iterdir() if p.is_dir() and not p.name.startswith((".", "_")))
    return [Recipe(f.name, f, _summary(f)) for f in folders if any(f.glob("*.py"))]


def find_recipe(name: str) -> Recipe:
    """Return the recipe of a name.

    Args:
        name: as `mmattn ls` prints it.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    recipes = {recipe.name: recipe for recipe in list_recipes()}
    if name not in recipes:
        raise ConfigError(f"there is no recipe {name!r}{did_you_mean(name, recipes)}; there are: {', '.join(recipes)}")
    return recipes[name]


def copy_recipe(name: str, destination: Path | None = None) -> Path:
    """Copy the folder of a recipe, or the shipped assets, and return where the copy is.

    Args:
        name: of the recipe, or "assets".
        destination: the new folder, or a folder to put it into; by default the name of the recipe, in the working
            folder.

    Raises:
        ConfigError: there is no such recipe, or something is there already; nothing is overwritten.
    """
    source = shipped_folder("assets") if name == "assets" else find_recipe(name).folder
    target = Path(name) if destination is None else destination
    if target.is_dir() and destination is not None and any(target.iterdir()):
        target = target / name
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} exists and would be overwritten: name another place, mmattn cp {name} PLACE")
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "runs", ".*")
    existed = target.is_dir()
    try:
        shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
    except BaseException:  # Ctrl-C too: half a copy would stand in the way of the next one
        shutil.rmtree(target, ignore_errors=True)
        if existed:
            target.mkdir(exist_ok=True)
        raise
    return target


def load_recipe(folder: Path, name: str) -> ModuleType:
    """Import `name`.py of a recipe's folder, which may be a copy that `mmattn cp` made.

    The folder is a package under a private name, so that its files import each other with relative imports and never
    meet modules of the same names: those of another recipe, or of the user.

    Args:
        folder: of the recipe.
        name: of the file, without .py.

    Raises:
        ConfigError: the folder has no such file.
    """
    folder = folder.resolve()
    if not (folder / f"{name}.py").is_file():
        raise ConfigError(f"{folder} has no {name}.py, so it is not a recipe that can do this")
    package = f"_mmattn_recipe_{zlib.crc32(os.fsencode(folder)):08x}"
    if package not in sys.modules:
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    importlib.invalidate_caches()
    return importlib.import_module(f"{package}.{name}")


def _summary(folder: Path) -> str:
    """Return the first sentence of a README after its title."""
    readme = folder / "README.md"
    text = re.sub(r"(?ms)^```.*?^```", "", readme.read_text("utf-8")) if readme.is_file() else ""
    paragraph = re.search(r"^[\w*`\"(].*?(?=\n\s*\n|\Z)", text, re.M | re.S)
    words = " ".join(paragraph[0].replace("*", "").split()) if paragraph else ""
    return re.split(r"(?<=[.?!]) ", words, maxsplit=1)[0]
