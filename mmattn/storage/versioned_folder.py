"""An index on the disk: a folder of versions, of which one small file names the current one.

    index.json  the current version, its description, and size and sha256 of each of its files
    v7/…        the files of a version, which the store of the index writes and reads

A save writes a new version beside the old one and then replaces `index.json` in one step: a process killed at any
moment leaves the old version or the new one. One writer at a time: a second one is refused, and so is one whose index
came from a version that another has replaced meanwhile. Readers need not wait: a version stays while one reads it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field

from mmattn.errors import AdapterFileError, ConfigError, IndexFileError
from mmattn.storage.files import Path, describe, lock_folder, sync_folder
from mmattn.storage.fingerprints import file_fingerprint
from mmattn.storage.json_files import read_json, validated, write_json

FORMAT = "mmattn-index"
FORMAT_VERSION = 1
MANIFEST = "index.json"

_FILE = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
_VERSION = re.compile(r"v[0-9]{1,18}")

Described = TypeVar("Described")
Result = TypeVar("Result")


class _File(BaseModel, extra="forbid"):
    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Manifest(BaseModel, extra="forbid"):
    format: Literal["mmattn-index"]
    format_version: int
    version: Annotated[int, Field(ge=0, lt=10**18)]
    save: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    files: dict[Annotated[str, Field(pattern=_FILE)], _File]
    about: dict[str, Any]
    sha256: str


def write_version(folder: Path, about: dict[str, Any], write: Callable[[str], None], expected: str | None) -> str:
    """Save a version and return the name of the save; a process killed in the middle leaves the old one."""
    folder = os.path.realpath(folder)
    created = not os.path.lexists(folder)
    if not created and not os.path.isdir(folder):
        raise NotADirectoryError(errno.ENOTDIR, "an index is saved as a folder, and this is a file", folder)
    if created:
        os.makedirs(folder, exist_ok=True)  # another writer may have been quicker
    try:
        with lock_folder(folder, wait=False):
            return _write_version(folder, about, write, expected)
    except BlockingIOError as error:
        raise BlockingIOError(
            errno.EWOULDBLOCK, "another writer is saving an index here; save again when it is done", folder
        ) from error
    except BaseException:
        if created:
            with contextlib.suppress(OSError):  # not empty: something was saved after all
                os.rmdir(folder)
        raise


def _write_version(folder: str, about: dict[str, Any], write: Callable[[str], None], expected: str | None) -> str:
    current = _current(folder)
    if expected is not None and (current is None or current.save != expected):
        raise IndexFileError(
            f"cannot save to {folder!r}: another writer has saved there since this index was loaded or saved. Load it "
            "again and repeat the changes, or save to another folder"
        )
    _remove_versions(folder, current)
    save = secrets.token_hex(8)
    number = 1 if current is None else current.version + 1
    place = os.path.join(folder, f"v{number}")
    try:
        os.mkdir(place)
        write(place)
        files = {name: _described(os.path.join(place, name)) for name in sorted(os.listdir(place))}
        strange = [name for name in files if not re.fullmatch(_FILE, name)]
        if strange:
            raise ConfigError(f"files of an index begin with a letter or a digit, and the store wrote {strange[:5]}")
        sync_folder(place)
        sync_folder(folder)
        body = {"format": FORMAT, "format_version": FORMAT_VERSION, "version": number, "save": save}
        body |= {"files": files, "about": about}
        write_json(os.path.join(folder, MANIFEST), {**body, "sha256": _checksum(body)})
    except BaseException:
        with contextlib.suppress(IndexFileError, OSError):  # unless the one deciding step is already done
            written = _current(folder)
            if written is None or written.save != save:
                shutil.rmtree(place)
        raise
    _remove_versions(folder, _read_manifest(folder))
    return save


def read_version(
    folder: Path, check: Callable[[dict[str, Any]], Described], read: Callable[[Described, str], Result]
) -> tuple[str, Result]:
    """Return the name of the current save and the result of `read`."""
    folder = os.fspath(folder)
    while True:
        manifest = _read_manifest(folder)
        described = check(manifest.about)
        place = os.path.join(folder, f"v{manifest.version}")
        try:
            with lock_folder(place, shared=True):
                _check_files(place, manifest.files)
                return manifest.save, read(described, place)
        except (AdapterFileError, IndexFileError, OSError) as error:
            # A save may have removed it after the manifest was read: then there is a newer one.
            if _read_manifest(folder).save != manifest.save:
                continue
            if isinstance(error, IndexFileError):
                raise
            raise IndexFileError(f"cannot load an index from {folder!r}: {error}") from error


def _read_manifest(folder: str) -> _Manifest:
    path = os.path.join(folder, MANIFEST)
    if not os.path.isdir(folder):
        what = f"it is {describe(folder)}; name the folder" if os.path.exists(folder) else "there is no such folder"
        raise IndexFileError(f"cannot load an index from {folder!r}: {what}")
    if not os.path.lexists(path):
        has = sorted(os.listdir(folder))[:5] or "nothing"
        raise IndexFileError(f"cannot load an index from {folder!r}: it has no {MANIFEST} (it has {has})")
    try:
        content = read_json(path)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise IndexFileError(f"{path!r} does not describe an index of mmattn")
        manifest: _Manifest = validated(repr(path), _Manifest, content)
    except AdapterFileError as error:
        raise IndexFileError(f"cannot load an index from {folder!r}: {error}") from error
    if manifest.format_version != FORMAT_VERSION:
        raise IndexFileError(
            f"{path!r} has format version {manifest.format_version}, and this mmattn reads {FORMAT_VERSION}; a newer "
            "mmattn wrote it, or it was changed"
        )
    if content.pop("sha256") != _checksum(content):
        raise IndexFileError(f"{path!r} was changed after it was written (wrong checksum). Fetch or save it again")
    return manifest


def _current(folder: str) -> _Manifest | None:
    if os.path.lexists(os.path.join(folder, MANIFEST)):
        return _read_manifest(folder)
    strange = [name for name in os.listdir(folder) if not _VERSION.fullmatch(name) and not name.startswith(".")]
    if strange:
        raise IndexFileError(
            f"cannot save an index to {folder!r}: it holds other things ({sorted(strange)[:5]}); name a folder of its "
            "own"
        )
    return None


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _described(path: str) -> dict[str, Any]:
    return {"bytes": os.path.getsize(path), "sha256": file_fingerprint(path)}


def _check_files(place: str, files: dict[str, _File]) -> None:
    # Hidden files are those of the system: .DS_Store, .nfs…
    strange = [name for name in sorted(os.listdir(place)) if name not in files and not name.startswith(".")]
    if strange:
        raise IndexFileError(
            f"cannot load an index from {place!r}: it has files that do not belong to it: {strange[:5]}"
        )
    for name, described in files.items():
        path = os.path.join(place, name)
        size = os.path.getsize(path)
        if size != described.bytes:
            what = "truncated" if size < described.bytes else "followed by bytes that belong to nothing"
            raise IndexFileError(f"cannot read {path!r}: it is {what} ({size:,} bytes, expected {described.bytes:,})")
        if file_fingerprint(path) != described.sha256:
            raise IndexFileError(
                f"cannot read {path!r}: it was changed after it was written (wrong checksum). Fetch or save it again"
            )


def _remove_versions(folder: str, current: _Manifest | None) -> None:
    """Remove replaced versions and those of killed saves, except one that is being read."""
    for name in os.listdir(folder):
        if _VERSION.fullmatch(name) and (current is None or name != f"v{current.version}"):
            with contextlib.suppress(OSError), lock_folder(os.path.join(folder, name), wait=False):
                shutil.rmtree(os.path.join(folder, name))
