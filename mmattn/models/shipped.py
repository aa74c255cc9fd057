"""The recipes, small models, data and pictures that are installed with the package.

A checkout keeps `recipes/` and `assets/` beside the package; an installed wheel carries them inside it.
"""

from __future__ import annotations

from pathlib import Path

from mmattn.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_folder(name: str) -> Path:
    """Return the folder "recipes" or "assets" of this installation; ConfigError if it carries none."""
    for folder in (_PACKAGE / f"_{name}", _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise ConfigError(f"this installation of mmattn carries no {name}: install it again, or use a checkout")


def find_asset(name: str) -> str:
    """Return the place of "assets/…", in the working folder or else in the installation; any other name unchanged."""
    if not name.startswith("assets/") or Path(name).exists():
        return name
    place = shipped_folder("assets") / name.removeprefix("assets/")
    if not place.exists():
        raise ConfigError(f"this installation carries no {name}: name a file that is there, or use a checkout")
    return str(place)
