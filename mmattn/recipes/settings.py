"""The settings of a recipe: a YAML file with overrides, checked against the recipe's own class."""

from __future__ import annotations

import codecs
import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn


def meant(name: str, known: Iterable[str]) -> str:
    """Return the hint at what a misspelt name may mean, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def refuse(message: str) -> NoReturn:
    """Raise a ConfigError; `mmattn.errors` imports torch, and the command line is to answer at once."""
    from mmattn.errors import ConfigError

    raise ConfigError(message)


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
        refuse(f"there is no settings file {path}; `mmattn ls` lists the recipes, each has a config.yaml")
    settings = _yaml(_decoded(path.read_bytes(), path), str(path))
    if not isinstance(settings, dict):
        refuse(f"{path} must hold `key: value` lines, got {type(settings).__name__}")
    for override in overrides:
        _override(settings, override)
    return settings


def check_settings(settings: dict[str, Any], model: Any) -> dict[str, Any]:
    """Settings validated by a pydantic class, with its defaults; ConfigError names each that is wrong."""
    from pydantic import ValidationError

    try:
        return model.model_validate(settings).model_dump()
    except ValidationError as error:
        raise_settings_error(error, model)


def raise_settings_error(error: Any, model: Any = None) -> NoReturn:
    """Raise a ConfigError from a ValidationError of pydantic, with one line for each setting that is wrong."""
    from mmattn.errors import ConfigError

    lines = []
    for issue in error.errors():
        key = ".".join(map(str, issue["loc"]))
        if issue["type"] == "extra_forbidden":
            known = _known(model, issue["loc"][:-1])
            there = f"; there are: {', '.join(sorted(known))}" if known else ""
            lines.append(f"unknown key {key!r}{meant(str(issue['loc'][-1]), known)}{there}")
        elif issue["type"] == "missing":
            lines.append(f"{key!r} is missing")
        else:
            message = issue["msg"].removeprefix("Value error, ")
            message = f"{message[:1].lower()}{message[1:]}"
            # What is said of all settings together is not followed by all of them.
            lines.append(f"{key!r}: {message}, got {issue['input']!r}" if key else message)
    raise ConfigError("settings refused: " + "\n  ".join(lines)) from error


def _known(model: Any, location: Iterable[str | int]) -> list[str]:
    for step in location:
        fields = getattr(model, "model_fields", {})
        model = fields[step].annotation if step in fields else None
    return list(getattr(model, "model_fields", {}))


def _override(settings: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        refuse(f"an override is section.key=value, got {override!r}")
    for depth, part in enumerate(parts[:-1], start=1):
        settings = settings.setdefault(part, {})
        if not isinstance(settings, dict):
            refuse(f"cannot set {key!r}: {'.'.join(parts[:depth])!r} is {settings!r}, not a section")
    settings[parts[-1]] = _yaml(value, repr(override))


def _decoded(raw: bytes, path: Path) -> str:
    """The text of a file in UTF-8, or in UTF-16 with a byte-order mark, as some editors write it."""
    encoding = "utf-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        refuse(f"{path} is not a text file in UTF-8 ({error.reason} in line {line}); save it as UTF-8")
    if "\0" in text:
        refuse(f"{path} has a NUL character in line {text[: text.index(chr(0))].count(chr(10)) + 1}; take it out")
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
                refuse(f"{where}: a key must be text, got {shown} (line {key.start_mark.line + 1}); put it in quotes")
            if key.value in seen:
                refuse(f"{where}: the key {key.value!r} stands there twice (line {key.start_mark.line + 1})")
            seen.add(key.value)
        return loader.construct_mapping(node, deep=True)

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    # YAML 1.1 reads 1e-3 as a word; whoever writes a learning rate means the number.
    number = re.compile(r"^[-+]?(\d[\d_]*(\.\d*)?|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError) as error:
        refuse(f"{where} is not YAML: {' '.join(str(error).split())[:300]}")
