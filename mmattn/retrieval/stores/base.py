"""The protocol of a vector store: what holds the entries of an `Index` and proposes those that fit a query.

The index checks what comes in, numbers entries, encodes texts, computes the scores of what a store proposes in float64,
and selects the best. So a store need not know encoders, errors or ties; `mmattn.testing.check_store` says whether it
does what is written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from mmattn.retrieval.entries import Entries, Filter, Id


@dataclass(frozen=True, eq=False)
class Candidates:
    """Entries that may be among the best for some queries.

    Attributes:
        entries: n entries that never change, in the order in which they were added: those that were found, or more.
        rows: (b, c) int64, for each query rows of `entries`, each once, in any order; -1 is none.
    """

    entries: Entries
    rows: Tensor


class VectorStore(Protocol):
    """Entries with stable ids, found by their vectors.

    A class is registered with `register_store("name")`, which gives it `kind`, and is made by
    `Index.build(..., store="name", **settings)`, or given as an instance to `Index(store)`.

    The index calls `add`, `update`, `delete` and `save` one at a time, and `search`, `get`, `ids` and `len` from any
    thread at any moment: each of them sees the entries before a change or after it. Tensors are given on the CPU, and
    belong to the store from then on. Further arguments are settings of the store, each with a default.

    Args:
        dim: width e of the vectors.
        metric: "cosine", "ip" or "l2".

    Attributes:
        kind: the name it is registered under.
        recall: the share of the true best entries that a search proposes, on average over ordinary data. 1.0 promises
            that it misses none, also among entries that are closer together than float32 can tell.
        holds_tokens: whether it holds the encoded tokens of entries. Where it does not, the index refuses them.
        dim: as given.
        metric: as given.
        about: a small JSON object that the index sets ("encoder", the fingerprint; "next_id"); {} when the store is
            new, or the same with None and 0. A store that outlives the process holds it beside its entries; what `save`
            writes need not have it.

    Raises:
        ConfigError: settings outside what is allowed.
        MissingExtraError: a library that the store needs is not installed.
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
    def about(self) -> dict[str, Any]: ...

    @about.setter
    def about(self, about: dict[str, Any]) -> None: ...

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as plain JSON, which `open` is given when what was saved is loaded."""

    @property
    def ids(self) -> tuple[Id, ...]:
        """All ids, in the order in which the entries were added. 1 and "1" are two ids."""

    def __len__(self) -> int:
        """How many entries there are."""

    def get(self, ids: Sequence[Id]) -> Entries:
        """The entries of those of these ids that are here, each once, in the order in which they were added.

        Args:
            ids: any ids; unknown ones are passed over.
        """

    def add(self, entries: Entries) -> None:
        """Add entries after those that are here, all or none.

        Args:
            entries: at least one. Their ids are new, vectors (n, e) float32, finite and at most 1e18 long, not zero
                under the cosine; the metadata plain JSON; tokens None, or those of each where `holds_tokens`.
        """

    def update(self, entries: Entries) -> None:
        """Replace entries, all or none; they keep their places in the order.

        Args:
            entries: at least one, whole, each of whose ids is here.
        """

    def delete(self, ids: Sequence[Id]) -> None:
        """Delete entries, all or none. Added again, an id is the last in the order.

        Args:
            ids: at least one, each here and given once.
        """

    def search(self, queries: Tensor, top_k: int, filter: Filter | None) -> Candidates:
        """Entries among which the `top_k` best of each query are, up to `recall`; as many more as is convenient.

        Which are the best is said by `mmattn.retrieval.score` and then by the order of adding. Where the filter allows
        at least `top_k` entries, an exact store proposes that many or more, and where it allows fewer, all of them.

        Args:
            queries: (b, e) float32, finite, not zero under the cosine.
            top_k: at least 1.
            filter: a dict of metadata that must be equal, or a function of an entry's metadata: see `Entries.allowed`.
                What it does not allow is never proposed. None allows all.

        Raises:
            ConfigError: a filter that the store cannot apply, such as a function where entries are on a server.
        """

    def save(self, folder: str) -> None:
        """Write all entries, and whatever makes opening them quick, into files.

        The index makes the folder, and lets what was written count only when all of it is on the disk; so a save that
        fails half-way needs no tidying, and leaves what was saved before.

        Args:
            folder: an empty folder. Files lie directly in it, and their names begin with a letter or a digit.
        """

    @classmethod
    def open(cls, folder: str, dim: int, metric: str, *, mapped: bool = False, **settings: Any) -> VectorStore:
        """The store with what `save` wrote. Later changes do not reach the files, which may go away.

        Args:
            folder: where `save` wrote. Each file has the bytes that were written.
            dim: width e of the vectors.
            metric: how they are compared.
            mapped: whether to leave on the disk what can be read from there; a store may ignore it.
            **settings: those of the store that was saved.

        Raises:
            IndexFileError: the files are not what `save` writes.
        """

    def close(self) -> None:
        """Give back what the store holds: connections, files. The second time does nothing."""


class DatabaseStore(VectorStore, Protocol):
    """A store whose entries are there when the process ends: it is found again by an address, with `Index.open`.

    A class that has `schemes` has all of this, which `register_store` looks at.

    Attributes:
        schemes: what its addresses begin with, before ":", such as ("postgresql",).
    """

    schemes: ClassVar[tuple[str, ...]]

    @classmethod
    def settings_of(cls, address: str) -> dict[str, Any]:
        """The settings that an address names, which a new store and `connect` take.

        Args:
            address: SCHEME:… with one of the schemes.
        """

    @classmethod
    def connect(cls, **settings: Any) -> DatabaseStore:
        """A store over entries that are there.

        Args:
            **settings: which, as `settings_of` says.

        Raises:
            IndexFileError: there are none, or they are of something else or of another version. The message says what
                was found, and repeats no password.
        """

    def writing(self) -> AbstractContextManager[Any]:
        """What the index enters around each change, and what it looks up for it: one transaction, where there are any.

        No other process changes the entries meanwhile. An error within leaves them as they were.
        """

    def one(self) -> Entries:
        """Any one entry, or none: quicker than asking for all ids."""

    def drop(self) -> None:
        """Delete the entries and what holds them, and close."""
