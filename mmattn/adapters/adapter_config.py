"""The format of `adapter_config.json`: its fields, the values that they may have, and bounds on sizes.

A file names things; it never decides what is imported or opened. The kind of an adapter is one of those that are
registered, sizes are bounded before a tensor is created, and no text may be a path, an address or the name of a module.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.errors import AdapterFileError, AttachError
from mmattn.storage.json_files import validated

FORMAT = "mmattn-adapter"
FORMAT_VERSION = 1

MAX_LAYERS = 1024
MAX_NUMBER = 1 << 20

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_VERSION = re.compile(r"[0-9][A-Za-z0-9.+-]{0,49}")
_HASH = re.compile(r"[0-9a-f]{40,64}")
# At most one "/", as in "org/name"; no drive, scheme, home folder, parent folder, variable or option.
_LABEL = re.compile(r"[A-Za-z0-9_][\w .,:=()@+-]*(/[A-Za-z0-9_][\w .,:=()@+-]*)?", re.ASCII)
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+(\(.*\))?", re.ASCII)


def is_label(text: object) -> bool:
    """Return True for text that names something and cannot be followed anywhere: no path, address or module."""
    return (
        isinstance(text, str)
        and len(text) <= 200
        and _LABEL.fullmatch(text) is not None
        and _DOTTED.fullmatch(text) is None
        and ".." not in text
        and not re.match(r"[A-Za-z]{1,20}:/|[A-Za-z]:|(https?|ftp|file|data|s3|gs|hf|www)[:.]", text)
    )


def check_name(name: object) -> str:
    """Return `name` if an adapter can be attached and saved under it; AttachError otherwise."""
    plain = isinstance(name, str) and _NAME.fullmatch(name) is not None and "." not in name
    # An `nn.ModuleDict` has attributes that its entries cannot be named after.
    if not plain or hasattr(nn.ModuleDict(), str(name)):
        raise AttachError(
            "an adapter's name must be 1 to 100 letters, digits, '_' and '-', not beginning with '-', and no attribute "
            f"of torch's ModuleDict such as 'keys'; got {name!r:.120}"
        )
    return str(name)


def _text(pattern: re.Pattern[str]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def _size(low: int, high: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _or_none(rule: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or rule(value)


def _are_layers(value: object) -> bool:
    fits = _size(0, MAX_LAYERS - 1)
    return (
        isinstance(value, list)
        and 0 < len(value) <= MAX_LAYERS
        and all(map(fits, value))
        and value == sorted(set(value))
    )


# Field: (is it needed, what it must satisfy, the same in words).
_Rules = dict[str, tuple[bool, Callable[[object], bool], str]]
_FIELDS: _Rules = {
    "format": (True, lambda value: value == FORMAT, repr(FORMAT)),
    "format_version": (True, _size(1, FORMAT_VERSION), f"{FORMAT_VERSION}"),
    "mmattn_version": (True, _text(_VERSION), "a version such as '0.1.0'"),
    "kind": (True, _text(_IDENTIFIER), "the name of a kind of adapter"),
    "package": (False, _or_none(_text(_IDENTIFIER)), "the name of the package that registers the kind, or null"),
    "adapter": (True, lambda value: isinstance(value, dict), "an object with the adapter's settings"),
    "layers": (True, _are_layers, f"a rising list of layer numbers from 0 to {MAX_LAYERS - 1}"),
    "host": (True, lambda value: isinstance(value, dict), "an object with the host's class, sizes and fingerprint"),
    "encoder": (False, _or_none(is_label), "a plain name or null, and no path, address or module"),
    "name": (False, _text(_NAME), "a plain name of at most 100 letters, digits, '_', '-' and '.'"),
}
_HOST_FIELDS: _Rules = {
    "kind": (False, _or_none(_text(_IDENTIFIER)), "the name of a kind of host"),
    "class": (True, _text(_IDENTIFIER), "the name of a class, without its module"),
    "model_type": (True, _or_none(_text(_NAME)), "a plain name or null"),
    "hidden_size": (True, _size(1, 65536), "an int from 1 to 65,536"),
    "num_layers": (True, _size(1, MAX_LAYERS), f"an int from 1 to {MAX_LAYERS:,}"),
    "fingerprint": (True, _or_none(_text(_HASH)), "a sha256 or null"),
    "revision": (False, _or_none(_text(_NAME)), "a plain name or null"),
}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _check_fields(what: str, fields: Mapping[str, Any], rules: _Rules) -> None:
    unknown = [name for name in fields if name not in rules]
    missing = [name for name, (needed, _, _) in rules.items() if needed and name not in fields]
    if unknown or missing:
        raise AdapterFileError(
            f"{what} has fields unknown here: {_short(unknown[:5])}, and lacks: {missing}; known are {', '.join(rules)}"
        )
    for name, (_, rule, words) in rules.items():
        if name in fields and not rule(fields[name]):
            raise AdapterFileError(f"{what}: {name!r} must be {words}, got {_short(fields[name])}")


def check_config(config: object, what: str = "adapter_config.json") -> dict[str, Any]:
    """Return `config` if every field is known, well formed and bounded; AdapterFileError otherwise."""
    if not isinstance(config, dict):
        raise AdapterFileError(f"{what} must hold one JSON object, got {_short(config)}")
    if "peft_type" in config:
        raise AdapterFileError(f"{what} belongs to PEFT, not to mmattn; load this folder with peft.PeftModel")
    if config.get("format") != FORMAT:
        raise AdapterFileError(f"{what} must have 'format': {FORMAT!r}, got {_short(config.get('format'))}")
    version = config.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise AdapterFileError(
            f"{what} has format version {_short(version)}, and this mmattn reads up to {FORMAT_VERSION}; "
            "update it with: pip install --upgrade mmattn"
        )
    _check_fields(what, config, _FIELDS)
    _check_fields(f"{what}, host", config["host"], _HOST_FIELDS)
    if config["layers"][-1] >= config["host"]["num_layers"]:
        raise AdapterFileError(
            f"{what}: 'layers' ends at {config['layers'][-1]}, and a host of {config['host']['num_layers']} layers "
            "has none of that number"
        )
    _check_values(f"{what}, adapter", config["adapter"])
    return config


def _check_values(what: str, value: object) -> None:
    """Settings are bounded numbers, short plain names, and lists and objects of them."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not _IDENTIFIER.fullmatch(name):
                raise AdapterFileError(f"{what} has a setting that is no plain name: {_short(name)}")
            _check_values(f"{what}.{name}", item)
    elif isinstance(value, list):
        if len(value) > MAX_LAYERS:
            raise AdapterFileError(f"{what} is a list of {len(value):,}; at most {MAX_LAYERS:,} are read")
        for item in value:
            _check_values(what, item)
    elif isinstance(value, str):
        if not is_label(value):
            raise AdapterFileError(f"{what} must be a plain name, and no path, address or module; got {_short(value)}")
    elif type(value) in (int, float) and not -MAX_NUMBER <= value <= MAX_NUMBER:  # type: ignore[operator]
        raise AdapterFileError(f"{what} must be from -{MAX_NUMBER:,} to {MAX_NUMBER:,}, got {_short(value)}")


def adapter_settings(adapter: Any) -> dict[str, Any]:
    """Return the fields of an adapter's dataclass as plain JSON values, for `config["adapter"]`."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    settings: dict[str, Any] = plain(dataclasses.asdict(adapter))
    return settings


def parse_config(config: Mapping[str, Any], kinds: Mapping[str, type]) -> Any:
    """Return the adapter settings of a checked config, an instance of one of the registered dataclasses `kinds`.

    AdapterFileError for an unknown kind or setting, or a value that the adapter refuses.
    """
    kind = config["kind"]
    if kind not in kinds:
        package = config.get("package")
        hint = (
            "update it with: pip install --upgrade mmattn"
            if package in (None, "mmattn")
            else f"the package {package!r} registers it: import that package first, then load again"
        )
        raise AdapterFileError(
            f"adapter_config.json is of kind {_short(kind)}, and registered are {', '.join(map(repr, kinds))}; {hint}"
        )
    what = f"adapter_config.json, {kind} adapter"
    try:
        read = validated(what, _settings_of(kinds[kind]), json.dumps({"adapter": config["adapter"]}).encode())
    except TypeError as error:
        raise AdapterFileError(f"{what}: {error}") from error
    return read.adapter


@lru_cache(maxsize=64)
def _settings_of(kind: type) -> Any:
    """Return a model of pydantic that holds the settings of one kind, and nothing that they have no field for."""
    from pydantic import ConfigDict, create_model

    return create_model("Settings", __config__=ConfigDict(extra="forbid"), adapter=(kind, ...))


Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def check_tensors(expected: Shapes, given: Shapes | Mapping[str, Tensor]) -> None:
    """Raise AdapterFileError if names, shapes or dtypes of tensors differ from those that an adapter needs."""
    has = {
        name: (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else (tuple(x[0]), x[1]) for name, x in given.items()
    }
    lines = [
        f"{len(names)} {words} ({'; '.join(names[:5])}{'; ...' if len(names) > 5 else ''})"
        for words, names in _differences(expected, has).items()
        if names
    ]
    if lines:
        raise AdapterFileError(
            f"the tensors of the file are not those of this adapter on this host: {', '.join(lines)}"
        )


def _differences(expected: Shapes, has: Shapes) -> dict[str, list[str]]:
    """Return the names of tensors that are missing, unexpected or of another shape or dtype."""
    both = [(name, *has[name], tuple(shape), dtype) for name, (shape, dtype) in expected.items() if name in has]
    return {
        "missing": [name for name in expected if name not in has],
        "unexpected": [name[:200] for name in has if name not in expected],
        "of another shape": [
            f"{name} {list(shape)}, needed {list(needed)}" for name, shape, _, needed, _ in both if shape != needed
        ],
        "of another dtype": [
            f"{name} {_dtype(dtype)}, needed {_dtype(needed)}" for name, _, dtype, _, needed in both if dtype != needed
        ],
    }


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
