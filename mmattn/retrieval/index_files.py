"""An index as a version of a folder: the store writes its files, and a manifest describes store, settings and vectors.

Loading imports nothing: the store of a third party is registered by importing its module first.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from mmattn.errors import AdapterFileError, IndexFileError, MmattnError
from mmattn.retrieval.stores.base import About, VectorStore, stores
from mmattn.storage.files import Path
from mmattn.storage.json_files import validated
from mmattn.storage.versioned_folder import read_version, write_version

_Count = Annotated[int, Field(ge=0, lt=1 << 48)]


class _Manifest(BaseModel, extra="forbid"):
    store: str
    module: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]{0,200}$")]
    settings: dict[str, Any]
    dim: _Count
    metric: Literal["cosine", "ip", "l2"]
    count: _Count
    encoder: str | None
    next_id: int
    token_dim: int | None


def save_index(path: Path, store: VectorStore, saved: dict[str, str]) -> None:
    """Save a store as a version of a folder, and update `saved`: the save of each folder that this one follows."""
    manifest = {
        "store": store.kind,
        "module": type(store).__module__,
        "settings": store.settings,
        "dim": store.dim,
        "metric": store.metric,
        "count": len(store),
        "encoder": store.about.get("encoder"),
        "next_id": store.about.get("next_id", 0),
        "token_dim": store.about.get("token_dim"),
    }
    place = os.path.realpath(path)
    saved[place] = write_version(place, manifest, store.save, saved.get(place))


def load_index(path: Path, mapped: bool) -> tuple[dict[str, str], VectorStore]:
    """Return the save by its folder, and the store."""
    where = f"cannot load an index from {os.fspath(path)!r}"

    def check(content: dict[str, Any]) -> _Manifest:
        try:
            manifest: _Manifest = validated("what it is described by", _Manifest, content)
        except AdapterFileError as error:
            raise IndexFileError(f"{where}: {error}") from error
        if manifest.store not in stores():
            raise IndexFileError(
                f"{where}: it was saved by the store {manifest.store!r:.80}, which is not registered. If you trust it, "
                f"import the module that registers it first (it says: {manifest.module})"
            )
        return manifest

    def read(manifest: _Manifest, folder: str) -> VectorStore:
        kind: Any = stores()[manifest.store]
        try:
            store: VectorStore = kind.open(folder, manifest.dim, manifest.metric, mapped=mapped, **manifest.settings)
        except (IndexFileError, OSError, MemoryError):
            raise
        except Exception as error:  # third parties' code, too, receives settings from a file
            what = str(error) if isinstance(error, MmattnError) else f"{type(error).__name__}: {error}"
            raise IndexFileError(f"{where}: its store {manifest.store!r} says: {what}") from error
        fault = _contradiction(store, manifest)
        if fault is not None:
            store.close()
            raise IndexFileError(f"{where}: {fault}")
        store.about = About(encoder=manifest.encoder, next_id=manifest.next_id, token_dim=manifest.token_dim)
        return store

    save, store = read_version(path, check, read)
    return {os.path.realpath(path): save}, store


def _contradiction(store: VectorStore, manifest: _Manifest) -> str | None:
    """Return how the entries differ from what the manifest says, or None."""
    ids = store.ids
    highest = max((name for name in ids if isinstance(name, int)), default=-1)
    if len(ids) != manifest.count or highest >= manifest.next_id:
        saved = f"{manifest.count} below {manifest.next_id} were saved"
        return f"it holds {len(ids)} entries, the highest number {highest}; {saved}"
    tokens = store.get(ids[:1]).tokens
    width = tokens[0].shape[1] if tokens else None
    if ids and width != manifest.token_dim:
        return f"its tokens have width {width}, and {manifest.token_dim} was saved"
    return None
