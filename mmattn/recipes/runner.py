"""Running a recipe: from a file of settings, checked against the recipe's own class, to the folder of the run."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from mmattn.errors import ConfigError
from mmattn.progress import recorded_interrupts
from mmattn.recipes.folders import did_you_mean, find_recipe, load_recipe
from mmattn.storage.files import lock_folder

if TYPE_CHECKING:
    from pydantic import BaseModel

Settings = dict[str, object]


def run_recipe(config: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Path:
    """Run a recipe with the settings of a file, as `mmattn train` does.

    A run that is finished is left as it is, and one that was killed goes on.

    Args:
        config: the file, beside the recipe's train.py or with a key `recipe`.
        overrides: `section.key=value` each, the value in YAML.

    Returns:
        The folder of the run, as the recipe's `main` returns it.

    Raises:
        ConfigError: no recipe, an unknown key, or a value of the wrong kind.
        BlockingIOError: another run is in the folder.
        KeyboardInterrupt: Ctrl-C, also where the recipe catches it to save what it has.
    """
    module, settings = _prepared(Path(config), overrides)
    with _settings_errors(), _only_run(settings.get("out")), recorded_interrupts() as interrupts:
        out: Path = module.main(settings)
    if interrupts:
        raise KeyboardInterrupt
    return out


def run_seeds(config: str | os.PathLike[str], overrides: Iterable[str], seeds: Sequence[int]) -> str:
    """Run a recipe with several seeds, and write one table of all runs, each figure as mean ± half the range.

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
    table, place = getattr(module, "table", None), settings.get("out")
    if table is None or not isinstance(place, (str, os.PathLike)):
        raise ConfigError(
            f"--seeds makes one table of several runs: {module.__file__} must have a function `table(contents)`, and "
            "its settings an `out`"
        )
    tables = []
    for seed in seeds:
        out = Path(place) / f"seed-{seed}"
        with _settings_errors(), _only_run(out):
            chosen = {key: _of_seed(value, seed) for key, value in settings.items()}
            module.main({**chosen, "seed": seed, "out": str(out)})
        if not (out / "table.json").is_file():
            raise SystemExit(130)
        tables.append(read_json(out / "table.json", max_bytes=64 << 20))
    text: str = table(tables)
    write_text(Path(place) / "table.md", text + "\n")
    return text


def _recipe_of(config: Path, settings: Settings) -> Path:
    """Return the folder of the recipe that a settings file belongs to: its own, or that of the recipe it names."""
    folder = config.resolve().parent
    if (folder / "train.py").is_file():
        return folder
    name = settings.get("recipe")
    if not isinstance(name, str):
        raise ConfigError(f"{config} lies beside no train.py, so it must say `recipe: NAME`; got {name!r}")
    return find_recipe(name).folder


@contextlib.contextmanager
def _only_run(out: object) -> Iterator[None]:
    """Hold the folder of a run in the first of its processes."""
    if not isinstance(out, (str, os.PathLike)) or os.environ.get("RANK", "0") != "0":
        yield
        return
    Path(out).mkdir(parents=True, exist_ok=True)
    with lock_folder(Path(out), wait=False):
        yield


def _of_seed(value: object, seed: int) -> object:
    if isinstance(value, dict):
        return {key: _of_seed(inner, seed) for key, inner in value.items()}
    return value.replace("{seed}", str(seed)) if isinstance(value, str) else value


def _prepared(config: Path, overrides: Iterable[str]) -> tuple[ModuleType, Settings]:
    """Return a recipe's train.py, and settings that its `Config` has checked."""
    settings = read_settings(config, overrides)
    module = load_recipe(_recipe_of(config, settings), "train")
    model = getattr(module, "Config", None)
    if model is not None:
        if "recipe" not in model.model_fields:
            settings = {key: value for key, value in settings.items() if key != "recipe"}
        with _settings_errors(model):
            settings = model.model_validate(settings).model_dump()
    return module, settings


# Settings -------------------------------------------------------------------------------------------------------------


def read_settings(path: Path, overrides: Iterable[str] = ()) -> Settings:
    """Read a YAML file of settings and apply overrides to it.

    Args:
        path: the file, in UTF-8, or in UTF-16 with a byte-order mark.
        overrides: `section.key=value` each, the value in YAML.

    Raises:
        ConfigError: no such file, not YAML, not a mapping, a key twice, or an override that is not `key=value`.
    """
    if not path.is_file():
        raise ConfigError(f"there is no settings file {path}; `mmattn ls` lists the recipes, each has a config.yaml")
    settings = _parse_yaml(path.read_bytes(), str(path))
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold `key: value` lines, got {type(settings).__name__}")
    for override in overrides:
        _override(settings, override)
    return settings


@contextlib.contextmanager
def _settings_errors(model: type[BaseModel] | None = None) -> Iterator[None]:
    """Turn a ValidationError of pydantic into a ConfigError with a line for each setting that is wrong."""
    from pydantic import ValidationError

    try:
        yield
    except ValidationError as error:
        lines = []
        for issue in error.errors():
            key = ".".join(map(str, issue["loc"]))
            if issue["type"] == "extra_forbidden":
                names = _known(model, issue["loc"][:-1])
                choices = f"; there are: {', '.join(sorted(names))}" if names else ""
                lines.append(f"unknown key {key!r}{did_you_mean(str(issue['loc'][-1]), names)}{choices}")
            else:
                message = issue["msg"].removeprefix("Value error, ")
                # An error about all settings together is not followed by all of them.
                lines.append(f"{key!r}: {message}, got {issue['input']!r}" if key else message)
        raise ConfigError("settings refused: " + "\n  ".join(lines)) from error


def _known(model: object, location: Iterable[str | int]) -> list[str]:
    """Return the settings of the section at a location."""
    for step in location:
        fields = getattr(model, "model_fields", {})
        model = fields[step].annotation if step in fields else None
    return list(getattr(model, "model_fields", {}))


def _override(settings: Settings, override: str) -> None:
    key, equals, value = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"an override is section.key=value, got {override!r}")
    for depth, part in enumerate(parts[:-1], start=1):
        section = settings.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(f"cannot set {key!r}: {'.'.join(parts[:depth])!r} is {section!r}, not a section")
        settings = section
    settings[parts[-1]] = _parse_yaml(value, repr(override))


def _parse_yaml(text: str | bytes, where: str) -> object:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that is given twice, and reads 1e-3 as a number, which YAML 1.1 takes for a word."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            keys: list[object] = []
            for key, _ in node.value:
                if key.value in keys:
                    raise ConfigError(f"{where}: the key {key.value!r} is given twice (line {key.start_mark.line + 1})")
                keys.append(key.value)
            return super().construct_mapping(node, deep=True)

    number = re.compile(r"^[-+]?(\d[\d_]*(\.\d*)?|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())[:300]}") from error
