"""The protocol of vector stores, and their registry by name and address.

The index validates input, numbers entries, encodes texts, computes scores in float64 and selects the best candidates by
the scores rounded to float32, so a store knows nothing of encoders, errors or ties. `mmattn.testing.check_store` checks
a store against this protocol.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypedDict, TypeVar

from torch import Tensor

from mmattn.errors import ConfigError, IndexFileError
from mmattn.lazy import Registry
from mmattn.retrieval.entries import Entries, Filter, Id

Store = TypeVar("Store", bound="type[VectorStore]")
#: A scheme has at least two letters: C: is a disk.
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):")
#: The registered stores by name.
STORES = Registry(
    "the store",
    {
        "exact": "mmattn.retrieval.stores.exact",
        "hnsw": "mmattn.retrieval.stores.faiss",
        "ivf": "mmattn.retrieval.stores.faiss",
        "ivfpq": "mmattn.retrieval.stores.faiss",
        "lancedb": "mmattn.retrieval.stores.lancedb",
        "pgvector": "mmattn.retrieval.stores.pgvector",
        "qdrant": "mmattn.retrieval.stores.qdrant",
    },
)


class About(TypedDict, total=False):
    """Facts of an index beside its entries.

    Attributes:
        encoder: fingerprint of the encoder, or None.
        next_id: the next number that names an entry.
        token_dim: width of the encoded tokens, or None.
    """

    encoder: str | None
    next_id: int
    token_dim: int | None


@dataclass(frozen=True, eq=False)
class Candidates:
    """Entries that may be among the best for the queries of a search.

    Attributes:
        entries: n entries in the order of adding, which never change.
        rows: (b, c) int64, for each query rows of `entries`, each once, in any order; -1 is none.
    """

    entries: Entries
    rows: Tensor


class VectorStore(Protocol):
    """Entries with stable ids, searched by their vectors.

    `register_store("name")` registers a class and sets `kind`; `Index.build(..., store="name", **settings)` makes an
    instance, and `Index(store)` takes it. Arguments after `dim` and `metric` are settings with defaults.

    The index calls `add`, `update`, `delete` and `save` one at a time, and `search`, `get`, `ids` and `len` from any
    thread at any moment; each of these sees the entries before a change or after it. The store owns the tensors that it
    receives, which are on the CPU.

    Args:
        dim: width e of the vectors.
        metric: "cosine", "ip" or "l2".

    Attributes:
        kind: the registered name.
        recall: share of the true best entries that a search proposes on average; 1.0 promises all of them, also among
            near ties.
        holds_tokens: the store keeps encoded tokens; otherwise the index refuses them.
        about: small JSON object that the index writes and reads; {} in a new store. A database keeps it beside its
            entries; `save` need not write it.

    Raises:
        ConfigError: a setting is not allowed.
        MissingExtraError: a library of the store is not installed.
    """

    kind: ClassVar[str]
    recall: ClassVar[float]
    holds_tokens: ClassVar[bool]

    def __init__(self, dim: int, metric: str) -> None: ...

    @property
    def dim(self) -> int: ...

    @property
    def metric(self) -> str: ...

    @property
    def about(self) -> About: ...

    @about.setter
    def about(self, about: About) -> None: ...

    @property
    def settings(self) -> Mapping[str, object]:
        """Return the settings as plain JSON, for `open`."""

    @property
    def ids(self) -> tuple[Id, ...]:
        """Return all ids in the order of adding. 1 and "1" are two ids."""

    def __len__(self) -> int: ...

    def get(self, ids: Sequence[Id]) -> Entries:
        """Return the entries with these ids, each once, in the order of adding; skip unknown ids."""

    def add(self, entries: Entries) -> None:
        """Append entries with new ids, all or none.

        Vectors (n, e) are float32, finite, at most 1e18 long, and not zero under the cosine; metadata is plain JSON;
        tokens are None unless `holds_tokens`.
        """

    def update(self, entries: Entries) -> None:
        """Replace whole entries, all or none; each keeps its place in the order."""

    def delete(self, ids: Sequence[Id]) -> None:
        """Delete entries, all or none. An id that is added again is the last in the order."""

    def search(self, queries: Tensor, top_k: int, filter: Filter | None) -> Candidates:
        """Return candidates that contain the `top_k` best entries of each query (b, e), up to `recall`.

        `mmattn.retrieval.score`, then the order of adding, ranks entries. A filter is as for `Entries.allowed`; where
        it allows fewer than `top_k` entries, an exact store returns all of them. A store refuses a filter that it
        cannot apply, such as a function on a server, by ConfigError.
        """

    def save(self, folder: str) -> None:
        """Write all entries into an empty folder, in files whose names begin with a letter or a digit.

        The index commits the folder after this call, so that a failed save needs no cleaning up.
        """

    @classmethod
    def open(cls, folder: str, dim: int, metric: str, *, mapped: bool = False, **settings: Any) -> VectorStore:
        """Return the store that `save` wrote, or raise IndexFileError.

        Later changes do not reach the files, which may be deleted. `mapped` leaves on the disk what can be read from
        there; a store may ignore it.
        """

    def close(self) -> None:
        """Release connections and files; a second call does nothing."""


def register_store(kind: str) -> Callable[[Store], Store]:
    """Return a class decorator that registers a `VectorStore` under a name, by which it is built and loaded.

    Args:
        kind: the name.

    Raises:
        ConfigError: the name is taken.
    """

    def register(store: Store) -> Store:
        STORES.add(kind, store)
        store.kind = kind
        return store

    return register


def find_address(address: str) -> tuple[type[Any], dict[str, Any]] | None:
    """Return the store of an address and its settings, or None for a path."""
    match = _ADDRESS.match(address)
    if match is None:
        return None
    schemes = {scheme: store for store in STORES.values() for scheme in getattr(store, "schemes", ())}
    if match[1] in schemes:
        return schemes[match[1]], schemes[match[1]].settings_of(address)
    if address[match.end() :].startswith("//"):
        raise IndexFileError(
            f"no store has addresses that begin with {match[1]}://; known: {', '.join(f'{name}:' for name in schemes)} "
            "or a folder. Import the module of your own store first"
        )
    return None


def make_store(kind: str, dim: int, metric: str, settings: dict[str, Any]) -> VectorStore:
    """Return a new store, by its name or an address."""
    found = (STORES[kind], {}) if kind in STORES else find_address(kind)
    if found is None:
        raise ConfigError(
            f"store must be one of {', '.join(map(repr, STORES))}; got {kind!r}. Import the module of your own first"
        )
    store: VectorStore = found[0](dim, metric, **found[1], **settings)
    return store
