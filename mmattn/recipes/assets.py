"""Find, copy and load the installed recipes and assets.

A checkout keeps `recipes/` and `assets/` beside the package; an installed wheel carries them inside it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.machinery
import importlib.util
import os
import posixpath
import re
import shutil
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn

_PACKAGE = Path(__file__).resolve().parents[1]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelt name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def refuse(message: str) -> NoReturn:
    """Raise a ConfigError; `mmattn.errors` imports torch, and the command line is to answer at once."""
    from mmattn.errors import ConfigError

    raise ConfigError(message)


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


def recipes_folder() -> Path:
    """The folder that holds the recipes, in a checkout as in an installed wheel.

    Raises:
        ConfigError: this installation carries none.
    """
    return _carried("recipes")


def assets_folder() -> Path:
    """The folder of the small models, data and pictures that make every recipe run offline.

    Raises:
        ConfigError: this installation carries none.
    """
    return _carried("assets")


def asset_path(name: str) -> Path:
    """The place of "assets/…": in the working folder where it exists there, else in the installation.

    Args:
        name: "assets/" and a path below it.

    Raises:
        ConfigError: there is none.
    """
    if Path(name).exists():
        return Path(name)
    shipped = assets_folder() / name.removeprefix("assets/")
    if not shipped.exists():
        refuse(f"this installation carries no {name}; name another, or use a checkout")
    return shipped


def resolve_asset(name: str) -> str:
    """The place of "assets/…", as `asset_path` finds it; any other name as it is.

    Args:
        name: of a file, a folder, or a model on the hub.

    Raises:
        ConfigError: there is no such asset.
    """
    return str(asset_path(name)) if name.startswith("assets/") else name


def list_recipes() -> list[Recipe]:
    """Every recipe of this installation, by name."""
    folders = sorted(p for p in recipes_folder().iterdir() if p.is_dir() and not p.name.startswith((".", "_")))
    return [Recipe(f.name, f, _summary(f)) for f in folders if any(f.glob("*.py"))]


def find_recipe(name: str) -> Recipe:
    """The recipe of a name.

    Args:
        name: one of `mmattn ls`.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    recipes = {recipe.name: recipe for recipe in list_recipes()}
    if name not in recipes:
        refuse(f"there is no recipe {name!r}{did_you_mean(name, recipes)}; there are: {', '.join(recipes)}")
    return recipes[name]


def copy_recipe(name: str, destination: Path | None = None) -> Path:
    """Copy the folder of a recipe, or the shipped assets, and return where the copy is.

    Args:
        name: of the recipe, or "assets".
        destination: the new folder, or one to put it into; by default the name of the recipe, in the working folder.

    Raises:
        ConfigError: there is no such recipe, or something is there already; nothing is overwritten.
    """
    source = assets_folder() if name == "assets" else find_recipe(name).folder
    target = Path(name) if destination is None else destination
    if target.is_dir() and destination is not None and any(target.iterdir()):
        target = target / name
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        refuse(f"{target} exists and would be overwritten; name another place: mmattn cp {name} PLACE")
    waste = shutil.ignore_patterns("__pycache__", "*.pyc", "runs", ".*")
    existed = target.is_dir()
    try:
        shutil.copytree(source, target, ignore=waste, dirs_exist_ok=True)
        for page in target.rglob("*.md"):
            place = "assets" if name == "assets" else f"recipes/{name}"
            page.write_text(_with_addresses(page.read_text("utf-8"), page.relative_to(target).parent, place), "utf-8")
    except BaseException:  # Ctrl-C too: half a copy would stand in the way of the next one
        shutil.rmtree(target, ignore_errors=True)
        if existed:
            target.mkdir(exist_ok=True)
        raise
    return target


def load_recipe(folder: Path, name: str) -> ModuleType:
    """Import `name`.py of a recipe's folder, which may be one that `mmattn cp` made.

    The folder is a package of its own under a private name, so that its files import each other with relative imports
    and never meet modules of the same names: not another recipe's, and not the user's own.

    Args:
        folder: of the recipe.
        name: of the file, without .py.

    Raises:
        ConfigError: the folder has no such file.
    """
    folder = folder.resolve()
    if not (folder / f"{name}.py").is_file():
        refuse(f"{folder} has no {name}.py, so it is not a recipe that can do this")
    package = f"_mmattn_recipe_{zlib.crc32(os.fsencode(folder)):08x}"
    if package not in sys.modules:
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    importlib.invalidate_caches()
    return importlib.import_module(f"{package}.{name}")


def _with_addresses(text: str, folder: Path, place: str) -> str:
    """A page whose links out of its recipe lead to the repository, wherever the page lies."""

    def addressed(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(place, folder.as_posix(), link["path"]))
        if path == place or path.startswith(f"{place}/"):
            return link[0]
        kind = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['words']}]({_REPOSITORY}/{kind}/main/{path}{link['part'] or ''})"

    return _LINK.sub(addressed, text)


_REPOSITORY = "https://github.com/mmattn/mmattn"
_LINK = re.compile(r"(?P<picture>!?)\[(?P<words>[^\]]*)\]\((?P<path>\.\./[^)\s#]*)(?P<part>#[^)\s]*)?\)")


def _carried(name: str) -> Path:
    for folder in (_PACKAGE / f"_{name}", _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    refuse(f"this installation of mmattn carries no {name} (looked in {_PACKAGE}); install it again, or use a checkout")


def _summary(folder: Path) -> str:
    readme = folder / "README.md"
    if not readme.is_file():
        return ""
    # The first paragraph of words: what opens a README may be its title, a picture or a block of commands.
    blocks = re.split(r"\n\s*\n", re.sub(r"(?ms)^(```|~~~).*?^\1\s*$|^#.*?$", "\n\n", readme.read_text("utf-8")))
    text = next((" ".join(block.split()) for block in blocks if re.match(r"\s*[\w*`\"(]", block)), "")
    return re.split(r"(?<=[.?!]) ", text.replace("*", ""), maxsplit=1)[0]
