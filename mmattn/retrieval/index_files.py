"""An index as a version of a folder: what it is described by, and the store that wrote its files.

    store, module, settings  the name of the store, the module it came from, and what it was made with
    dim, metric, count       of the vectors, which the store must give back
    encoder, next_id         what the index itself knows

The module is a hint for a message. Loading imports nothing: a store of a third party is there once its module is.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from mmattn.errors import IndexFileError, MmattnError
from mmattn.retrieval.scoring import METRICS
from mmattn.retrieval.stores.base import VectorStore
from mmattn.retrieval.stores.registry import find_store
from mmattn.storage.files import Path
from mmattn.storage.versioned_folder import read_version, write_version

_FIELDS = {"store", "module", "settings", "dim", "metric", "count", "encoder", "next_id"}
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){0,20}")


@dataclass(frozen=True)
class _Described:
    """What a manifest says an index is, checked."""

    store: type[VectorStore]
    settings: dict[str, Any]
    dim: int
    metric: str
    count: int
    about: dict[str, Any]


def save_index(path: Path, store: VectorStore, saved: dict[str, str]) -> None:
    """Save a store as a version of a folder.

    Args:
        path: the folder.
        store: the store.
        saved: which save of each folder this one follows; it is brought up to date.

    Raises:
        BlockingIOError: another process has been saving here for long.
        IndexFileError: what is there is no index.
        ConfigError: settings that cannot be written.
        OSError: the disk is full or the folder not writable; what was saved before stays.
    """
    about = {
        "store": store.kind,
        "module": type(store).__module__,
        "settings": store.settings,
        "dim": store.dim,
        "metric": store.metric,
        "count": len(store),
        "encoder": store.about.get("encoder"),
        "next_id": store.about.get("next_id", 0),
    }
    place = os.path.realpath(path)
    saved[place] = write_version(place, about, store.save, saved.get(place))


def load_index(path: Path, mapped: bool) -> tuple[dict[str, str], VectorStore]:
    """Which save it is, by its folder, and the store.

    Args:
        path: the folder.
        mapped: leave on the disk what the store can read from there.

    Raises:
        IndexFileError: as for `read_version`, or a store that is not registered.
    """

    def check(about: dict[str, Any]) -> _Described:
        return _check(os.fspath(path), about)

    def read(described: _Described, folder: str) -> VectorStore:
        try:
            store = described.store.open(folder, described.dim, described.metric, mapped=mapped, **described.settings)
        except (IndexFileError, OSError, MemoryError):
            raise
        except Exception as error:  # of a third party's code, too, which was given settings from a file
            what = str(error) if isinstance(error, MmattnError) else f"{type(error).__name__}: {error}"
            raise IndexFileError(
                f"cannot load an index from {os.fspath(path)!r}: its store {described.store.kind!r} says: {what}"
            ) from error
        numbers = [name for name in store.ids if isinstance(name, int)]
        if len(store) != described.count or max(numbers, default=-1) >= described.about["next_id"]:
            store.close()
            raise IndexFileError(
                f"cannot load an index from {os.fspath(path)!r}: it holds {len(store)} entries, the highest number "
                f"{max(numbers, default=None)}; {described.count} below {described.about['next_id']} were saved"
            )
        store.about = described.about
        return store

    save, store = read_version(path, check, read)
    return {os.path.realpath(path): save}, store


def _check(path: str, about: dict[str, Any]) -> _Described:
    sound = (
        set(about) == _FIELDS
        and all(type(about[name]) is int and 0 <= about[name] < 1 << 48 for name in ("dim", "count"))
        and type(about["next_id"]) is int
        and about["metric"] in METRICS
        and isinstance(about["encoder"], (str, type(None)))
        and isinstance(about["settings"], dict)
        and isinstance(about["store"], str)
        and isinstance(about["module"], str)
        and _MODULE.fullmatch(about["module"])
    )
    if not sound:
        raise IndexFileError(f"cannot load an index from {path!r}: it is described by {about!r:.300}")
    store = find_store(about["store"])
    if store is None:
        raise IndexFileError(
            f"cannot load an index from {path!r}: it was saved by the store {about['store']!r:.80}, which is not "
            f"registered. If you trust it, import the module that registers it first (it says: {about['module']}), or "
            "install what it is part of"
        )
    facts = {"encoder": about["encoder"], "next_id": about["next_id"]}
    return _Described(store, about["settings"], about["dim"], about["metric"], about["count"], facts)
