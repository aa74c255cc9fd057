"""Which stores there are, by name. Nothing is ever imported because a file names it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

from mmattn.errors import ConfigError, IndexFileError
from mmattn.retrieval.stores.base import DatabaseStore, VectorStore

Store = TypeVar("Store", bound=type[VectorStore])

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_NEEDED = (
    *("recall", "holds_tokens", "ids", "__len__", "get"),
    *("add", "update", "delete", "search", "save", "open", "close"),
)
_OF_ADDRESSES = ("settings_of", "connect", "writing", "one", "drop")
#: A scheme has two letters at least: C: is a disk.
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):")
_stores: dict[str, type[VectorStore]] = {}


def register_store(kind: str) -> Callable[[Store], Store]:
    """A class decorator: register a `VectorStore` under a name, by which it is built and loaded again.

    Args:
        kind: the name, in small letters.

    Raises:
        ConfigError: a name of other letters or of another class, or a class that lacks a part of the protocol.
    """

    def register(store: Store) -> Store:
        if not isinstance(kind, str) or not _NAME.fullmatch(kind):
            raise ConfigError(f"a store has a name of small letters, digits, '_' and '-', got {kind!r:.80}")
        needed = (*_NEEDED, *_OF_ADDRESSES) if hasattr(store, "schemes") else _NEEDED
        lacks = [name for name in needed if not hasattr(store, name)]
        if lacks:
            raise ConfigError(f"a vector store has {', '.join(needed)}; {store.__name__} lacks {', '.join(lacks)}")
        other = _stores.get(kind)
        # The same class again is a module that is loaded a second time, as in a notebook.
        if other is not None and _place(other) != _place(store):
            raise ConfigError(f"there is a store {kind!r} already, {'.'.join(_place(other))}; give another name")
        store.kind = kind
        _stores[kind] = store
        return store

    return register


def find_store(kind: str) -> type[VectorStore] | None:
    """The store registered under a name, if there is one."""
    return _stores.get(kind)


def find_address(address: str) -> tuple[type[DatabaseStore], dict[str, Any]] | None:
    """The store that an address is of, and the settings it names; None where it is no address but a path.

    Args:
        address: SCHEME:… of a registered store, or a path.

    Raises:
        IndexFileError: a scheme that no store has.
    """
    match = _ADDRESS.match(address)
    if match is None:
        return None
    schemes: dict[str, Any] = {scheme: store for store in _stores.values() for scheme in getattr(store, "schemes", ())}
    store = schemes.get(match[1])
    if store is not None:
        return store, store.settings_of(address)
    if address[match.end() :].startswith("//"):
        raise IndexFileError(
            f"no store has addresses that begin with {match[1]}://; those there are: "
            f"{', '.join(f'{scheme}:' for scheme in schemes)} or a folder. A store of your own is registered by "
            "importing its module first"
        )
    return None


def make_store(kind: str, dim: int, metric: str, settings: dict[str, Any]) -> VectorStore:
    """A new store.

    Args:
        kind: its name, or an address.
        dim: width e of the vectors.
        metric: how they are compared.
        settings: what it is given beside these.

    Raises:
        ConfigError: an unknown name, or a setting that this store does not have or allow.
        IndexFileError: an address that no store has.
    """
    store = find_store(kind) if isinstance(kind, str) else None
    addressed = find_address(kind) if store is None and isinstance(kind, str) else None
    if addressed is not None:
        store, named = addressed
        kind, twice = store.kind, sorted(named.keys() & settings.keys())
        if twice:
            raise ConfigError(f"the address says {', '.join(twice)} already: leave {', '.join(twice)}= out")
        settings = {**named, **settings}
    if store is None:
        raise ConfigError(
            f"store must be one of {', '.join(map(repr, _stores))}; got {kind!r}. One of your own is registered by "
            "importing its module first"
        )
    has = inspect.signature(store).parameters
    unknown = [name for name in settings if name not in has or name in ("dim", "metric")]
    if unknown and not any(one.kind is one.VAR_KEYWORD for one in has.values()):
        names = ", ".join(name for name in has if name not in ("dim", "metric")) or "none"
        raise ConfigError(f"store {kind!r} has no setting {', '.join(map(repr, unknown))}; its settings: {names}")
    return store(dim, metric, **settings)


def _place(store: type) -> tuple[str, str]:
    return store.__module__, store.__qualname__
