"""An index on the disk: a folder of versions, and a small file that names the current version.

    index.json  the current version, its store, settings and vectors, and size and sha256 of each of its files
    v7/…        the files of a version, which the store of the index writes and reads

A save writes a new version beside the old one and then replaces `index.json` in one step: a process killed at any
moment leaves the old version or the new version. One writer at a time: a second writer is refused, and so is a writer
whose index came from a version that was replaced meanwhile. Readers need not wait: a version stays while it is read.
Loading imports nothing: the store of a third party is registered by importing its module first.
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
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from mmattn.errors import AdapterFileError, ConfigError, IndexFileError, MmattnError
from mmattn.retrieval.stores import STORES, About, VectorStore
from mmattn.storage.files import Path, describe, file_fingerprint, lock_folder, sync_folder
from mmattn.storage.json_files import read_json, validated, write_json

FORMAT = "mmattn-index"
FORMAT_VERSION = 1
MANIFEST = "index.json"

_FILE = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
_VERSION = re.compile(r"v[0-9]{1,18}")
_Count = Annotated[int, Field(ge=0, lt=1 << 48)]


class _File(BaseModel, extra="forbid"):
    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _About(BaseModel, extra="forbid"):
    store: str
    module: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]{0,200}$")]
    settings: dict[str, Any]
    dim: _Count
    metric: Literal["cosine", "ip", "l2"]
    count: _Count
    encoder: str | None
    next_id: int
    token_dim: int | None


class _Manifest(BaseModel, extra="forbid"):
    format: Literal["mmattn-index"]
    format_version: Annotated[int, Field(ge=1, le=1)]
    version: Annotated[int, Field(ge=0, lt=10**18)]
    save: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    files: dict[Annotated[str, Field(pattern=_FILE)], _File]
    about: _About
    sha256: str


def save_index(path: Path, store: VectorStore, saved: dict[str, str]) -> None:
    """Save a store as a version of a folder, and update `saved`: the save of each folder that this one follows."""
    folder = os.path.realpath(path)
    created = not os.path.lexists(folder)
    if not created and not os.path.isdir(folder):
        raise NotADirectoryError(errno.ENOTDIR, "an index is saved as a folder, and this is a file", folder)
    if created:
        os.makedirs(folder, exist_ok=True)  # another writer may have been quicker
    try:
        with lock_folder(folder, wait=False):
            saved[folder] = _write_version(folder, store, saved.get(folder))
    except BlockingIOError as error:
        raise BlockingIOError(
            errno.EWOULDBLOCK, "another writer is saving an index here; save again when it is done", folder
        ) from error
    except BaseException:
        if created:
            with contextlib.suppress(OSError):  # not empty: something was saved after all
                os.rmdir(folder)
        raise


def _write_version(folder: str, store: VectorStore, expected: str | None) -> str:
    """Write a version, and return the name of the save."""
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
    about = {"store": store.kind, "module": type(store).__module__, "settings": store.settings, "dim": store.dim}
    about |= {"metric": store.metric, "count": len(store), "encoder": None, "next_id": 0, "token_dim": None}
    try:
        os.mkdir(place)
        store.save(place)
        files = {name: _described(os.path.join(place, name)) for name in sorted(os.listdir(place))}
        strange = [name for name in files if not re.fullmatch(_FILE, name)]
        if strange:
            raise ConfigError(f"files of an index begin with a letter or a digit, and the store wrote {strange[:5]}")
        sync_folder(place)
        sync_folder(folder)
        body = {"format": FORMAT, "format_version": FORMAT_VERSION, "version": number, "save": save}
        body |= {"files": files, "about": about | store.about}
        write_json(os.path.join(folder, MANIFEST), {**body, "sha256": _checksum(body)})
    except BaseException:
        with contextlib.suppress(IndexFileError, OSError):  # unless the one deciding step is already done
            written = _current(folder)
            if written is None or written.save != save:
                shutil.rmtree(place)
        raise
    _remove_versions(folder, _read_manifest(folder))
    return save


def load_index(path: Path, mapped: bool) -> tuple[dict[str, str], VectorStore]:
    """Return the save by its folder, and the store."""
    folder = os.fspath(path)
    while True:
        manifest = _read_manifest(folder)
        place = os.path.join(folder, f"v{manifest.version}")
        try:
            if manifest.about.store not in STORES:
                raise IndexFileError(
                    f"it was saved by the store {manifest.about.store!r:.80}, which is not registered. If you trust "
                    f"it, import the module that registers it first (it says: {manifest.about.module})"
                )
            with lock_folder(place, shared=True):
                _check_files(place, manifest.files)
                return {os.path.realpath(path): manifest.save}, _open_store(manifest.about, place, mapped)
        except (AdapterFileError, IndexFileError, OSError) as error:
            # A save may have removed it after the manifest was read: then there is a newer one.
            if _read_manifest(folder).save == manifest.save:
                raise IndexFileError(f"cannot load an index from {folder!r}: {error}") from error


def _open_store(about: _About, place: str, mapped: bool) -> VectorStore:
    """Open the store in the folder of a version, whose entries must be those that were saved."""
    kind: Any = STORES[about.store]
    try:
        store: VectorStore = kind.open(place, about.dim, about.metric, mapped=mapped, **about.settings)
    except (IndexFileError, OSError, MemoryError):
        raise
    except Exception as error:  # third parties' code, too, receives settings from a file
        what = str(error) if isinstance(error, MmattnError) else f"{type(error).__name__}: {error}"
        raise IndexFileError(f"its store {about.store!r} says: {what}") from error
    ids = store.ids
    highest = max((name for name in ids if isinstance(name, int)), default=-1)
    tokens = store.get(ids[:1]).tokens
    width = tokens[0].shape[1] if tokens else None
    fault = None
    if len(ids) != about.count or highest >= about.next_id:
        saved = f"{about.count} below {about.next_id} were saved"
        fault = f"it holds {len(ids)} entries, the highest number {highest}; {saved}"
    elif ids and width != about.token_dim:
        fault = f"its tokens have width {width}, and {about.token_dim} was saved"
    if fault is not None:
        store.close()
        raise IndexFileError(fault)
    store.about = About(encoder=about.encoder, next_id=about.next_id, token_dim=about.token_dim)
    return store


def _read_manifest(folder: str) -> _Manifest:
    path = os.path.join(folder, MANIFEST)
    try:
        if not os.path.isdir(folder):
            what = f"it is {describe(folder)}; name the folder" if os.path.exists(folder) else "there is no such folder"
            raise IndexFileError(what)
        if not os.path.lexists(path):
            raise IndexFileError(f"it has no {MANIFEST} (it has {sorted(os.listdir(folder))[:5] or 'nothing'})")
        content = read_json(path)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise IndexFileError(f"{path!r} does not describe an index of mmattn")
        if content.get("format_version") != FORMAT_VERSION:
            raise IndexFileError(
                f"{path!r} has format version {content.get('format_version')!r:.80}, and this mmattn reads "
                f"{FORMAT_VERSION}; a newer mmattn wrote it, or it was changed"
            )
        manifest: _Manifest = validated(repr(path), _Manifest, content)
        if content.pop("sha256") != _checksum(content):
            raise IndexFileError(f"{path!r} was changed after it was written (wrong checksum). Fetch or save it again")
    except (AdapterFileError, IndexFileError) as error:
        raise IndexFileError(f"cannot load an index from {folder!r}: {error}") from error
    return manifest


def _current(folder: str) -> _Manifest | None:
    if os.path.lexists(os.path.join(folder, MANIFEST)):
        return _read_manifest(folder)
    strange = [name for name in os.listdir(folder) if not _VERSION.fullmatch(name) and not name.startswith(".")]
    if strange:
        raise IndexFileError(
            f"cannot save an index to {folder!r}: it holds other things ({sorted(strange)[:5]}); name an empty folder"
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
        raise IndexFileError(f"{place!r} has files that do not belong to it: {strange[:5]}")
    for name, described in files.items():
        path = os.path.join(place, name)
        if file_fingerprint(path) != described.sha256:
            size = f"{os.path.getsize(path):,} bytes, {described.bytes:,} were written"
            raise IndexFileError(
                f"{path!r} was changed after it was written (wrong checksum; {size}). Fetch or save it again"
            )


def _remove_versions(folder: str, current: _Manifest | None) -> None:
    """Remove replaced versions and leftovers of killed saves, except a version that is being read."""
    for name in os.listdir(folder):
        if _VERSION.fullmatch(name) and (current is None or name != f"v{current.version}"):
            with contextlib.suppress(OSError), lock_folder(os.path.join(folder, name), wait=False):
                shutil.rmtree(os.path.join(folder, name))
