"""The format of `adapter_config.json`: its fields, the values that they may have, and bounds on sizes.

A file names things; it never decides what is imported or opened. The kind of an adapter is one of those that are
registered, sizes are bounded before a tensor is created, and no text may be a path, an address or the name of a module.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, create_model
from torch import Tensor, nn

from mmattn.adapters.protocols import AdapterConfig
from mmattn.errors import AdapterFileError, AttachError
from mmattn.storage.json_files import validated

#: The content of `adapter_config.json`.
Config = dict[str, Any]
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

FORMAT = "mmattn-adapter"
FORMAT_VERSION = 1

MAX_LAYERS = 1024
MAX_NUMBER = 1 << 20

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
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
    plain = isinstance(name, str) and _NAME.fullmatch(name) is not None
    # An `nn.ModuleDict` has attributes that its entries cannot be named after.
    if not plain or hasattr(nn.ModuleDict(), str(name)):
        raise AttachError(
            "an adapter's name must be 1 to 100 letters, digits, '_' and '-', not beginning with '-', and no attribute "
            f"of torch's ModuleDict such as 'keys'; got {name!r:.120}"
        )
    return str(name)


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")]
Identifier = Annotated[str, Field(pattern=f"^{_IDENTIFIER.pattern}$")]


class HostFields(BaseModel, extra="forbid"):
    """The field `host` of `adapter_config.json`."""

    kind: Identifier | None = None
    class_: Identifier = Field(alias="class")
    model_type: Name | None
    hidden_size: int = Field(ge=1, le=65536)
    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{40,64}$")] | None
    revision: Name | None = None


class ConfigFields(BaseModel, extra="forbid"):
    """The fields of `adapter_config.json`."""

    format: Literal["mmattn-adapter"]
    format_version: int = Field(ge=1, le=FORMAT_VERSION)
    mmattn_version: str = Field(pattern="^[0-9][A-Za-z0-9.+-]{0,49}$")
    kind: Identifier
    package: Identifier | None = None  # which registers the kind
    adapter: dict[str, object]
    layers: list[Annotated[int, Field(ge=0, lt=MAX_LAYERS)]] = Field(min_length=1, max_length=MAX_LAYERS)
    host: HostFields
    encoder: str | None = None
    name: Name = "default"


def check_config(config: object, what: str = "adapter_config.json") -> Config:
    """Return `config` if every field is known, well formed and bounded; AdapterFileError otherwise."""
    if not isinstance(config, dict):
        raise AdapterFileError(f"{what} must hold one JSON object, got {config!r:.100}")
    if "peft_type" in config:
        raise AdapterFileError(f"{what} belongs to PEFT, not to mmattn; load this folder with peft.PeftModel")
    version = config.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise AdapterFileError(
            f"{what} has format version {version!r:.100}, and this mmattn reads up to {FORMAT_VERSION}; "
            "update it with: pip install --upgrade mmattn"
        )
    fields: ConfigFields = validated(what, ConfigFields, config)
    if fields.layers != sorted(set(fields.layers)) or fields.layers[-1] >= fields.host.num_layers:
        raise AdapterFileError(
            f"{what}: 'layers' must be a rising list of layers of a host of {fields.host.num_layers} layers, got "
            f"{fields.layers!r:.100}"
        )
    _check_values(f"{what}, adapter", fields.adapter)
    if fields.encoder is not None:
        _check_values(f"{what}, encoder", fields.encoder)
    return config


def _check_values(what: str, value: object) -> None:
    """Settings are bounded numbers, short plain names, and lists and objects of them."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not _IDENTIFIER.fullmatch(name):
                raise AdapterFileError(f"{what} has a setting that is no plain name: {name!r:.100}")
            _check_values(f"{what}.{name}", item)
    elif isinstance(value, list):
        if len(value) > MAX_LAYERS:
            raise AdapterFileError(f"{what} is a list of {len(value):,}; at most {MAX_LAYERS:,} are read")
        for item in value:
            _check_values(what, item)
    elif isinstance(value, str):
        if not is_label(value):
            raise AdapterFileError(f"{what} must be a plain name, and no path, address or module; got {value!r:.100}")
    elif type(value) in (int, float) and not -MAX_NUMBER <= value <= MAX_NUMBER:  # type: ignore[operator]
        raise AdapterFileError(f"{what} must be from -{MAX_NUMBER:,} to {MAX_NUMBER:,}, got {value!r:.100}")


def adapter_settings(adapter: AdapterConfig) -> Config:
    """Return the fields of an adapter's dataclass as plain JSON values, for `config["adapter"]`."""
    assert dataclasses.is_dataclass(adapter)
    return json.loads(json.dumps(dataclasses.asdict(adapter)))


def parse_config(config: Config, kinds: Mapping[str, type]) -> AdapterConfig:
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
            f"adapter_config.json is of kind {kind!r:.100}, and registered are {', '.join(map(repr, kinds))}; {hint}"
        )
    what = f"adapter_config.json, {kind} adapter"
    try:
        read = validated(what, _settings_of(kinds[kind]), json.dumps({"adapter": config["adapter"]}).encode())
    except TypeError as error:
        raise AdapterFileError(f"{what}: {error}") from error
    return read.adapter


@lru_cache(maxsize=64)
def _settings_of(kind: type) -> type[BaseModel]:
    """Return a model of pydantic that holds the settings of one kind, and nothing that they have no field for."""
    return create_model("Settings", __config__=ConfigDict(extra="forbid"), adapter=(kind, ...))


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
