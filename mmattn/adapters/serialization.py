"""An adapter as a folder: `adapter_model.safetensors`, `adapter_config.json` and a `README.md`.

The tensor file carries the config in its header and is the truth; the JSON file is a copy for people and tools, and
must agree. Two files cannot be replaced in one step, so a save first puts the new config aside in a file of its own,
then replaces the tensor file (the one step that decides between old and new), then the JSON copy, and removes the file
put aside. A load whose copy is older than the tensor file reads the config put aside: if they agree, the save was
killed between the two steps, and the tensor file is right. Any other disagreement is an error. Saves into one folder
wait for each other. Whatever takes room on the disk is written before the deciding step.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Mapping

from torch import Tensor

from mmattn.adapters.adapter_config import FORMAT, Config, Shapes, check_config
from mmattn.errors import AdapterFileError, ConfigError
from mmattn.storage.files import Path, lock_folder, replacing, sync_folder, write_text
from mmattn.storage.json_files import read_json, write_json
from mmattn.storage.safetensors import check_values, read_header, read_tensors, write_tensors

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
