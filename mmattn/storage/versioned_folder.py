"""An index on the disk: a folder of versions, of which one small file names the one that counts.

    index.json  which version counts, what it is, and size and sha256 of each of its files
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
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

from mmattn.errors import AdapterFileError, ConfigError, IndexFileError
from mmattn.storage.file_kinds import describe
from mmattn.storage.files import Path, fcntl, sync_folder
from mmattn.storage.json_files import read_json, write_json

FORMAT = "mmattn-index"
FORMAT_VERSION = 1
MANIFEST = "index.json"

_FIELDS = {"format", "format_version", "version", "save", "files", "about", "sha256"}
_VERSION = re.compile(r"v[0-9]{1,18}")
_SAVE = re.compile(r"[0-9a-f]{16}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 8 << 20

Described = TypeVar("Described")
Result = TypeVar("Result")


def write_version(folder: Path, about: dict[str, Any], write: Callable[[str], None], expected: str | None) -> str:
    """Save a version; a process killed in the middle leaves the old one.

    Args:
        folder: created where there is none.
        about: what the version is, as JSON.
        write: writes the files of the version into the folder it is given.
        expected: the save this one follows, which must still be the one that counts; None replaces any.

    Returns:
        The name of this save.

    Raises:
        BlockingIOError: another writer is saving here.
        IndexFileError: another writer has saved here since `expected`, or the folder holds something else.
        ConfigError: `write` made a file of another name than a version may hold.
        OSError: the disk is full, or the folder is a file or not writable. What was saved before is kept.
    """
    folder = os.path.realpath(folder)
    made = not os.path.lexists(folder)
    if not made and not os.path.isdir(folder):
        raise NotADirectoryError(errno.ENOTDIR, "an index is saved as a folder, and this is a file", folder)
    if made:
        os.makedirs(folder, exist_ok=True)  # another writer may have been quicker
    with _locked(folder, exclusive=True, busy="another writer is saving an index here; save again when it is done"):
        try:
            return _write_version(folder, about, write, expected)
        except BaseException:
            if made:
                with contextlib.suppress(OSError):  # not empty: something was saved after all
                    os.rmdir(folder)
            raise


def _write_version(folder: str, about: dict[str, Any], write: Callable[[str], None], expected: str | None) -> str:
    current = _current(folder)
    if expected is not None and (current is None or current["save"] != expected):
        raise IndexFileError(
            f"cannot save to {folder!r}: another writer has saved there since this index was loaded or saved. Load it "
            "again and repeat the changes, or save to another folder"
        )
    _remove_versions(folder, current)
    save = secrets.token_hex(8)
    number = 1 if current is None else current["version"] + 1
    place = os.path.join(folder, f"v{number}")
    try:
        os.mkdir(place)
        write(place)
        files = {name: _described(os.path.join(place, name)) for name in sorted(os.listdir(place))}
        strange = [name for name in files if not _FILE.fullmatch(name)]
        if strange:
            raise ConfigError(f"files of an index begin with a letter or a digit, and the store wrote {strange[:5]}")
        sync_folder(place)
        sync_folder(folder)
        body = {"format": FORMAT, "format_version": FORMAT_VERSION, "version": number, "save": save}
        body |= {"files": files, "about": about}
        write_json(os.path.join(folder, MANIFEST), {**body, "sha256": _checksum(body)})
    except BaseException:
        with contextlib.suppress(IndexFileError, OSError):  # unless the one deciding step is already done
            if (_current(folder) or {}).get("save") != save:
                shutil.rmtree(place)
        raise
    _remove_versions(folder, body)
    return save


def read_version(
    folder: Path,
    check: Callable[[dict[str, Any]], Described],
    read: Callable[[Described, str], Result],
) -> tuple[str, Result]:
    """The name of the save that counts, and what is read from its files.

    Args:
        folder: where `write_version` wrote.
        check: given what the version is, checks it before any other file is opened.
        read: given what `check` gave and the folder of the files, whose bytes are those that were written.

    Raises:
        IndexFileError: the folder or a file is missing, torn, changed, newer or something else.
    """
    folder = os.fspath(folder)
    while True:
        manifest = _read_manifest(folder)
        described = check(manifest["about"])
        place = os.path.join(folder, f"v{manifest['version']}")
        try:
            with _locked(place, exclusive=False):
                _check_files(place, manifest["files"])
                return manifest["save"], read(described, place)
        except (AdapterFileError, IndexFileError, OSError) as error:
            # Perhaps it was removed between the two looks, by a save: then there is a newer one.
            if _read_manifest(folder)["save"] != manifest["save"]:
                continue
            if isinstance(error, IndexFileError):
                raise
            raise IndexFileError(f"cannot load an index from {folder!r}: {error}") from error


def _read_manifest(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, MANIFEST)
    if not os.path.isdir(folder):
        what = f"it is {describe(folder)}; name the folder" if os.path.exists(folder) else "there is no such folder"
        raise IndexFileError(f"cannot load an index from {folder!r}: {what}")
    if not os.path.lexists(path):
        has = sorted(os.listdir(folder))[:5] or "nothing"
        raise IndexFileError(f"cannot load an index from {folder!r}: it has no {MANIFEST} (it has {has})")
    try:
        manifest = read_json(path)
    except AdapterFileError as error:
        raise IndexFileError(f"cannot load an index from {folder!r}: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise IndexFileError(f"{path!r} does not describe an index of mmattn")
    number = manifest.get("format_version")
    if type(number) is not int or not 1 <= number <= FORMAT_VERSION:
        raise IndexFileError(
            f"{path!r} has format version {number!r:.80}, and this mmattn reads {FORMAT_VERSION}; a newer mmattn "
            "wrote it, or it was changed"
        )
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    if set(manifest) != _FIELDS or manifest["sha256"] != _checksum(body):
        raise IndexFileError(f"{path!r} was changed after it was written (wrong checksum). Fetch or save it again")
    number, save, files, about = (manifest[name] for name in ("version", "save", "files", "about"))
    if type(number) is not int or not _VERSION.fullmatch(f"v{number}") or not _is(save, _SAVE):
        raise IndexFileError(f"{path!r} names a version that no index has: {number!r:.80}, {save!r:.80}")
    if not isinstance(files, dict) or not all(_FILE.fullmatch(name) and _is_file(one) for name, one in files.items()):
        raise IndexFileError(f"{path!r} names files that no index has, or not the size and sha256 of each")
    if not isinstance(about, dict):
        raise IndexFileError(f"{path!r} does not say what the index is, but {about!r:.80}")
    return manifest


def _is(value: object, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_file(described: object) -> bool:
    return (
        isinstance(described, dict)
        and set(described) == {"bytes", "sha256"}
        and type(described["bytes"]) is int
        and _is(described["sha256"], _SHA256)
    )


def _current(folder: str) -> dict[str, Any] | None:
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
    with open(path, "rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": _digest(file)}


def _check_files(place: str, files: dict[str, dict[str, Any]]) -> None:
    # Hidden files are those of the system: .DS_Store, .nfs…
    strange = [name for name in sorted(os.listdir(place)) if name not in files and not name.startswith(".")]
    if strange:
        raise IndexFileError(
            f"cannot load an index from {place!r}: it has files that do not belong to it: {strange[:5]}"
        )
    for name, described in files.items():
        _check_file(os.path.join(place, name), described)


def _check_file(path: str, described: dict[str, Any]) -> None:
    with open(path, "rb") as file:
        size, wanted = os.fstat(file.fileno()).st_size, described["bytes"]
        if size != wanted:
            what = "truncated" if size < wanted else "followed by bytes that belong to nothing"
            raise IndexFileError(f"cannot read {path!r}: it is {what} ({size:,} bytes, expected {wanted:,})")
        if _digest(file) != described["sha256"]:
            raise IndexFileError(
                f"cannot read {path!r}: it was changed after it was written (wrong checksum). Fetch or save it again"
            )


def _digest(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while piece := file.read(_CHUNK):
        digest.update(piece)
    return digest.hexdigest()


def _remove_versions(folder: str, current: dict[str, Any] | None) -> None:
    """Remove all versions but the one that counts: those replaced, and those of killed saves; not while one is read."""
    keep = None if current is None else f"v{current['version']}"
    for name in os.listdir(folder):
        if _VERSION.fullmatch(name) and name != keep:
            with contextlib.suppress(OSError), _locked(os.path.join(folder, name), exclusive=True):
                shutil.rmtree(os.path.join(folder, name))


@contextlib.contextmanager
def _locked(folder: str, *, exclusive: bool, busy: str = "it is being read") -> Iterator[None]:
    """Hold a folder; the lock sits on the folder itself and dies with the process."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX | fcntl.LOCK_NB) if exclusive else fcntl.LOCK_SH)
        except BlockingIOError as error:
            raise BlockingIOError(errno.EWOULDBLOCK, busy, folder) from error
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)
