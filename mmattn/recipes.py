"""Recipes: where they are installed, how one is loaded, how its settings are read and checked.

A checkout keeps `recipes/` and `assets/` beside the package; an installed wheel carries them inside it. Nothing here
imports torch, so that the command line answers at once.
"""

from __future__ import annotations

import codecs
import difflib
import importlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_PACKAGE = Path(__file__).resolve().parent


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
        _fail(f"this installation carries no {name}; name another, or use a checkout")
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
        _fail(f"there is no recipe {name!r}{_meant(name, recipes)}; there are: {', '.join(recipes)}")
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
        _fail(f"{target} exists and would be overwritten; name another place: mmattn cp {name} PLACE")
    waste = shutil.ignore_patterns("__pycache__", "*.pyc", "runs", ".*")
    existed = target.is_dir()
    try:
        shutil.copytree(source, target, ignore=waste, dirs_exist_ok=True)
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
        _fail(f"{folder} has no {name}.py, so it is not a recipe that can do this")
    package = f"_mmattn_recipe_{zlib.crc32(os.fsencode(folder)):08x}"
    if package not in sys.modules:
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    importlib.invalidate_caches()
    return importlib.import_module(f"{package}.{name}")


def read_settings(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Read a YAML file of settings and apply overrides to it.

    Args:
        path: the file, in UTF-8, or in UTF-16 with a byte-order mark.
        overrides: `section.key=value` each, the value in YAML.

    Raises:
        ConfigError: no such file, not text, not YAML, not a mapping, a key twice, a key that is no text, or an override
            that is not `key=value`.
    """
    if not path.is_file():
        _fail(f"there is no settings file {path}; `mmattn ls` lists the recipes, each has a config.yaml")
    settings = _yaml(_decoded(path.read_bytes(), path), str(path))
    if not isinstance(settings, dict):
        _fail(f"{path} must hold `key: value` lines, got {type(settings).__name__}")
    for override in overrides:
        _override(settings, override)
    return settings


def over_seeds(
    main: Callable[[dict[str, Any]], Any],
    table: Callable[[list[dict[str, Any]]], str],
    settings: dict[str, Any],
    seeds: Sequence[int],
) -> str:
    """Run a recipe for several seeds, and write one table of all, each figure as mean ± half the range, to `table.md`.

    Every seed has a folder `seed-N` in that of the settings; "{seed}" in a setting stands for the seed.

    Args:
        main: runs the recipe with settings that name `seed` and `out`, writes `table.json` into `out`, and leaves a run
            that is finished as it is.
        table: from the contents of all `table.json` to text.
        settings: of the recipe, with `out`.
        seeds: to run with.

    Returns:
        The table.

    Raises:
        AdapterFileError: a `table.json` is damaged.
        SystemExit: with 130, of a run that Ctrl-C ended before its table.
    """
    from mmattn.storage.atomic import write_text
    from mmattn.storage.json_files import read_json

    tables = []
    for seed in seeds:
        out = Path(settings["out"]) / f"seed-{seed}"
        main({**_of_seed(settings, seed), "seed": seed, "out": str(out)})
        if not (out / "table.json").is_file():
            raise SystemExit(130)
        tables.append(read_json(out / "table.json", max_bytes=64 << 20))
    text = table(tables)
    write_text(Path(settings["out"]) / "table.md", text + "\n")
    return text


def _of_seed(value: Any, seed: int) -> Any:
    if isinstance(value, dict):
        return {key: _of_seed(inner, seed) for key, inner in value.items()}
    return value.replace("{seed}", str(seed)) if isinstance(value, str) else value


def check_settings(settings: dict[str, Any], model: Any) -> dict[str, Any]:
    """Settings validated by a pydantic class, with its defaults.

    Args:
        settings: by key, sections as dicts.
        model: the class.

    Raises:
        ConfigError: an unknown key, a missing one or a wrong value; each is named with what was given.
    """
    from pydantic import ValidationError

    try:
        return model.model_validate(settings).model_dump()
    except ValidationError as error:
        raise_settings_error(error, model)


def raise_settings_error(error: Any, model: Any = None) -> NoReturn:
    """Raise a ConfigError from a ValidationError of pydantic, with one line for each setting that is wrong.

    Args:
        error: of pydantic.
        model: the class whose keys the message lists.

    Raises:
        ConfigError: always.
    """
    from mmattn.errors import ConfigError

    lines = []
    for issue in error.errors():
        key = ".".join(map(str, issue["loc"]))
        if issue["type"] == "extra_forbidden":
            known = _known(model, issue["loc"][:-1])
            there = f"; there are: {', '.join(sorted(known))}" if known else ""
            lines.append(f"unknown key {key!r}{_meant(str(issue['loc'][-1]), known)}{there}")
        elif issue["type"] == "missing":
            lines.append(f"{key!r} is missing")
        else:
            message = issue["msg"].removeprefix("Value error, ")
            message = f"{message[:1].lower()}{message[1:]}"
            # What is said of all settings together is not followed by all of them.
            lines.append(f"{key!r}: {message}, got {issue['input']!r}" if key else message)
    raise ConfigError("settings refused: " + "\n  ".join(lines)) from error


def _carried(name: str) -> Path:
    for folder in (_PACKAGE / f"_{name}", _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    _fail(f"this installation of mmattn carries no {name} (looked in {_PACKAGE}); install it again, or use a checkout")


def _summary(folder: Path) -> str:
    readme = folder / "README.md"
    if not readme.is_file():
        return ""
    # The first paragraph of words: what opens a README may be its title, a picture or a block of commands.
    blocks = re.split(r"\n\s*\n", re.sub(r"(?ms)^(```|~~~).*?^\1\s*$|^#.*?$", "\n\n", readme.read_text("utf-8")))
    text = next((" ".join(block.split()) for block in blocks if re.match(r"\s*[\w*`\"(]", block)), "")
    return re.split(r"(?<=[.?!]) ", text.replace("*", ""), maxsplit=1)[0]


def _meant(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _known(model: Any, location: Iterable[str | int]) -> list[str]:
    for step in location:
        fields = getattr(model, "model_fields", {})
        model = fields[step].annotation if step in fields else None
    return list(getattr(model, "model_fields", {}))


def _override(settings: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        _fail(f"an override is section.key=value, got {override!r}")
    for depth, part in enumerate(parts[:-1], start=1):
        settings = settings.setdefault(part, {})
        if not isinstance(settings, dict):
            _fail(f"cannot set {key!r}: {'.'.join(parts[:depth])!r} is {settings!r}, not a section")
    settings[parts[-1]] = _yaml(value, repr(override))


def _decoded(raw: bytes, path: Path) -> str:
    """The text of a file in UTF-8, or in UTF-16 with a byte-order mark, as some editors write it."""
    encoding = "utf-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        _fail(f"{path} is not a text file in UTF-8 ({error.reason} in line {line}); save it as UTF-8")
    if "\0" in text:
        _fail(f"{path} has a NUL character in line {text[: text.index(chr(0))].count(chr(10)) + 1}; take it out")
    return text


def _yaml(text: str, where: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                shown = repr(key.value) if isinstance(key.value, str) else "a list or a mapping"
                _fail(f"{where}: a key must be text, got {shown} (line {key.start_mark.line + 1}); put it in quotes")
            if key.value in seen:
                _fail(f"{where}: the key {key.value!r} stands there twice (line {key.start_mark.line + 1})")
            seen.add(key.value)
        return loader.construct_mapping(node, deep=True)

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    # YAML 1.1 reads 1e-3 as a word; whoever writes a learning rate means the number.
    number = re.compile(r"^[-+]?(\d[\d_]*(\.\d*)?|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError) as error:
        _fail(f"{where} is not YAML: {' '.join(str(error).split())[:300]}")


def _fail(message: str) -> NoReturn:
    from mmattn.errors import ConfigError

    raise ConfigError(message)
