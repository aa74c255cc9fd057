"""An adapter as a folder: `adapter_model.safetensors`, `adapter_config.json` and a `README.md`.

The tensor file carries the config in its header and is the truth; the JSON file is a copy for people and tools, and
must agree. Two files cannot be replaced in one step, so a save first puts the new config aside in a file of its own,
then replaces the tensor file (the one step that decides between old and new), then the JSON copy, and removes the file
put aside. A load whose copy is older than the tensor file reads the config put aside: if they agree, the save was
killed between the two steps, and the tensor file is right. Any other disagreement is an error. Saves into one folder
wait for each other. Whatever takes room on the disk is written before the deciding step.

A file names things; it never decides what is imported or opened. The kind of an adapter is one of those that are
registered, sizes are bounded before a tensor is created, and no text may be a path, an address or the name of a module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, create_model
from torch import Tensor, nn

from mmattn.adapters.settings import AdapterConfig
from mmattn.errors import AdapterFileError, AttachError, ConfigError
from mmattn.storage.files import Path, lock_folder, replacing, sync_folder, write_text
from mmattn.storage.json_files import read_json, validated, write_json
from mmattn.storage.safetensors import check_values, read_header, read_tensors, write_tensors

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
    both = [(name, *has[name], tuple(shape), dtype) for name, (shape, dtype) in expected.items() if name in has]
    differences = {
        "missing": [name for name in expected if name not in has],
        "unexpected": [name[:200] for name in has if name not in expected],
        "of another shape": [
            f"{name} {list(shape)}, needed {list(needed)}" for name, shape, _, needed, _ in both if shape != needed
        ],
        "of another dtype": [
            f"{name} {dtype}, needed {needed}".replace("torch.", "")
            for name, _, dtype, _, needed in both
            if dtype != needed
        ],
    }
    lines = [
        f"{len(names)} {words} ({'; '.join(names[:5])}{'; ...' if len(names) > 5 else ''})"
        for words, names in differences.items()
        if names
    ]
    if lines:
        raise AdapterFileError(
            f"the tensors of the file are not those of this adapter on this host: {', '.join(lines)}"
        )


CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
CARD = "README.md"
PENDING = ".adapter_config.json.next"

CARD_MARK = "<!-- Written by mmattn and replaced at every save; remove this line to keep a text of your own. -->"

#: Seconds to wait for another save into the same folder.
_WAIT = 60.0


def _make_folder(folder: str) -> list[str]:
    """Create `folder` and those above it; return the ones that are new, deepest first."""
    created = []
    above = folder
    while not os.path.lexists(above):
        created.append(above)
        above = os.path.dirname(above)
    if not os.path.isdir(folder) and not created:
        raise NotADirectoryError(
            errno.ENOTDIR, "an adapter was to be saved in this folder, and it is a file; name a folder", folder
        )
    os.makedirs(folder, exist_ok=True)
    for path in created:
        sync_folder(os.path.dirname(path))
    return created


def save_folder(folder: Path, *, config: Config, tensors: Mapping[str, Tensor], card: str) -> None:
    """Write an adapter to a folder; a process killed meanwhile leaves the old adapter or the new one.

    Other files in `folder` stay, and so does a `README.md` that mmattn did not write. Missing folders are created.
    """
    try:
        config = check_config(json.loads(json.dumps(config)), "the config to be saved")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"this adapter cannot be saved: {error}") from error
    for name, tensor in tensors.items():
        check_values(name, tensor.detach())
    folder = os.path.realpath(folder)
    created = _make_folder(folder)
    try:
        with lock_folder(folder, wait=_WAIT):
            _replace(folder, config, tensors, card)
    except BaseException:
        for path in created:
            with contextlib.suppress(OSError):  # not empty: another process saved here meanwhile
                os.rmdir(path)
        raise


def _replace(folder: str, config: Config, tensors: Mapping[str, Tensor], card: str) -> None:
    pending = os.path.join(folder, PENDING)
    _settle(folder)
    write_json(pending, config)
    texts = {CONFIG: json.dumps(config, indent=2, ensure_ascii=False) + "\n"}
    if not os.path.lexists(os.path.join(folder, CARD)) or _is_our_card(os.path.join(folder, CARD)):
        texts[CARD] = card.rstrip() + "\n\n" + CARD_MARK + "\n"
    try:
        with contextlib.ExitStack() as stack:
            for name, text in texts.items():
                file = stack.enter_context(replacing(os.path.join(folder, name)))
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
            write_tensors(os.path.join(folder, TENSORS), tensors, config)
    except BaseException:
        with contextlib.suppress(OSError):  # the config stays aside then, where a load reads it
            _settle(folder)
        raise
    os.unlink(pending)


def replace_card(folder: Path, change: Callable[[str], str]) -> None:
    """Rewrite the `README.md` of a saved adapter with `change(text)`; one that mmattn did not write stays."""
    path = os.path.join(os.path.realpath(folder), CARD)
    if os.path.lexists(path) and _is_our_card(path):
        with open(path, encoding="utf-8") as file:
            text = file.read()
        write_text(path, change(text.replace(CARD_MARK, "").rstrip() + "\n").rstrip() + f"\n\n{CARD_MARK}\n")


def _settle(folder: str) -> None:
    """Finish a killed save: update the copy, then remove the config put aside."""
    pending = os.path.join(folder, PENDING)
    if not os.path.lexists(pending):
        return
    with contextlib.suppress(AdapterFileError):
        _, config = read_header(os.path.join(folder, TENSORS), FORMAT)
        if _same(read_json(pending), config):
            write_json(os.path.join(folder, CONFIG), config)
    os.unlink(pending)


def _is_our_card(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return CARD_MARK.encode() in file.read(1 << 20)
    except OSError:
        return False


def _same(a: object, b: object) -> bool:
    """Equal as JSON: 1, 1.0 and true are three values."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _read_config(folder: str) -> tuple[Config, Shapes]:
    """Return the checked config on which both files agree, and shape and dtype of the tensors."""
    path = os.path.join(folder, CONFIG)
    pending = os.path.join(folder, PENDING)
    copy = check_config(read_json(path)) if os.path.lexists(path) or not os.path.lexists(pending) else None
    shapes, config = read_header(os.path.join(folder, TENSORS), FORMAT)
    if not _same(copy, config):
        aside = read_json(pending) if os.path.lexists(pending) else None
        if not _same(aside, config):
            raise AdapterFileError(
                f"{CONFIG} and {TENSORS} in {folder!r} disagree: {_difference(copy, config)}. They come from different "
                "saves, or one was edited; fetch or save both again"
            )
    return check_config(config, f"the header of {TENSORS}"), shapes


def _difference(a: object, b: object) -> str:
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return f"there is no {CONFIG}"
    names = [name for name in {**a, **b} if not (name in a and name in b and _same(a[name], b[name]))]
    return f"{', '.join(map(repr, names[:5]))} differ"


def _check_folder(folder: str) -> None:
    if not os.path.isdir(folder):
        what = "it is a file; name the folder that holds it" if os.path.exists(folder) else "there is no such folder"
        raise AdapterFileError(f"cannot load an adapter from {folder!r}: {what}")
    lacks = {CONFIG, TENSORS} - set(os.listdir(folder))
    if TENSORS in lacks or (CONFIG in lacks and not os.path.lexists(os.path.join(folder, PENDING))):
        names = " and no ".join(sorted(lacks))
        has = sorted(os.listdir(folder))[:5] or "nothing"
        raise AdapterFileError(f"cannot load an adapter from {folder!r}: it has no {names} (it has {has})")


def load_folder(
    folder: Path, check: Callable[[Config, Shapes], object] | None = None
) -> tuple[Config, dict[str, Tensor]]:
    """Read the config and the tensors that `save_folder` wrote."""
    folder = os.fspath(folder)
    try:
        _check_folder(folder)
        try:
            return _load(folder, check)
        except AdapterFileError:
            # Perhaps a save is under way: wait for its end, and read again.
            with lock_folder(folder, shared=True, wait=_WAIT):
                return _load(folder, check)
    except OSError as error:
        raise AdapterFileError(f"cannot load an adapter from {folder!r}: {error.strerror or error}") from error


def _load(folder: str, check: Callable[[Config, Shapes], object] | None) -> tuple[Config, dict[str, Tensor]]:
    config, shapes = _read_config(folder)
    if check is not None:
        check(config, shapes)
    tensors, metadata = read_tensors(os.path.join(folder, TENSORS), FORMAT)
    if not _same(metadata, config) or {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()} != shapes:
        raise AdapterFileError(f"{TENSORS} in {folder!r} was replaced while it was read")
    return config, tensors
