"""Index: entries with stable ids, found by their vectors."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexMismatchError, check_float, check_int
from mmattn.memory import Memory
from mmattn.retrieval.attention_search import IndexMemory, SearchStructures
from mmattn.retrieval.embedding_space import EmbeddingSpace, Encoder
from mmattn.retrieval.entries import Entries, Entry, Filter, Id
from mmattn.retrieval.entry_checks import (
    as_id_list,
    check_filter,
    check_known,
    check_lines,
    check_metadata,
    check_new,
    check_texts,
    check_tokens_agree,
    is_id,
)
from mmattn.retrieval.hits import Hits, hits_of_rows
from mmattn.retrieval.index_files import load_index, save_index
from mmattn.retrieval.scoring import best_rows, gather, score
from mmattn.retrieval.stores import InMemoryStore, VectorStore
from mmattn.retrieval.stores.registry import find_address, make_store
from mmattn.storage.files import Path

Built = TypeVar("Built", bound="Index")


class Index:
    """Entries with a vector, an id, and where they have them a text, metadata and encoded tokens; searched by vector.

    Made by `Index.build` or `Index.load`, or over a store that is there. Threads may search while others add, delete,
    update or save; in the stores of this process's memory a search sees one version from its beginning to its end.

    Scores are higher for better: the cosine, the inner product, or the squared distance, negative. They are computed in
    float64 from the full vectors and rounded once, whatever the store; entries of equal score come in the order in
    which they were added.

    Stores: "exact" misses nothing: its scan in bfloat16 (where the processor is quick at that) only proposes, within a
    bound on its error. "flat" is faiss's own comparison in float32. "hnsw", "ivf" and "ivfpq" are approximate: they
    may miss some of the best k, with a filter more of them, and the last two may then give fewer than k. "pgvector",
    "qdrant", "qdrant-edge" and "lancedb" hold entries in a database, where `Index.open` finds them again.
    Others are registered with `register_store`.

    Args:
        store: what holds the entries.
        encoder: what encodes texts; it must be the one that encoded the entries.

    Raises:
        IndexMismatchError: another encoder or width.

    >>> index = Index.build(torch.eye(3), ids=["x", "y", "z"], metadata=[{"odd": True}, {"odd": False}, {"odd": True}])
    >>> index.search([0.1, 0.9, 0.2], 2).ids
    [['y', 'z']]
    >>> index.delete(["y"])
    >>> index.search([0.1, 0.9, 0.2], 2, filter={"odd": True}, score_threshold=0.2).ids
    [['z', None]]
    """

    default_store: ClassVar[str] = "exact"
    space_type: ClassVar[type[EmbeddingSpace]] = EmbeddingSpace

    def __init__(self, store: VectorStore, encoder: Encoder | None = None) -> None:
        space = self.space_type(store.dim, store.metric, None, store.about.get("encoder"))
        self.store = store
        self.space = space if encoder is None else space.joined(encoder)
        self._writing = threading.RLock()
        self._saved: dict[str, str] = {}
        #: The entries as attention searches them, for `as_memory`.
        self.search_structures = SearchStructures(self)

    @classmethod
    def build(
        cls: type[Built],
        items: Any,
        *,
        encoder: Encoder | None = None,
        ids: Iterable[Id] | None = None,
        texts: Iterable[str | None] | None = None,
        metadata: Iterable[Any] | None = None,
        tokens: Memory | None = None,
        metric: str = "cosine",
        store: str | None = None,
        **settings: Any,
    ) -> Built:
        """Make an index.

        Args:
            items: texts, which need an encoder, or vectors: a tensor (n, e), an array, lists of numbers, or a memory
                with one slot per row.
            encoder: what encodes texts, here and in `search`: `encode(texts) -> Memory`, `dim` and `fingerprint`.
            ids: text or ints, no two the same; by default 0, 1, 2 …, and never one that was deleted.
            texts: the text of each entry, where items are vectors.
            metadata: a JSON value for each entry, which filters see.
            tokens: encoded tokens of each entry, one row each, for `hits.memory(tokens=True)`.
            metric: "cosine", "ip" or "l2".
            store: "exact" (the default), "flat", "hnsw", "ivf", "ivfpq", "qdrant", "qdrant-edge", "pgvector",
                "lancedb", one that was registered, or an address, as for `open`.
            **settings: those of the store, such as `links=16` of "hnsw": see `mmattn.retrieval.stores`.

        Raises:
            IndexMismatchError: duplicate ids, or another number or width.
            NonFiniteError: NaN or infinity.
            ConfigError: texts without an encoder, or an unknown metric, store or setting.

        >>> Index.build([[3.0, 4.0], [1.0, 0.0]]).search([1.0, 0.0], 1).scores
        tensor([[1.]])
        """
        space, items = cls.space_type.first(items, encoder, metric)
        # Before there is a store, so that what is refused leaves none behind.
        columns = space.columns(items, ids, texts, metadata, tokens)
        index = cls(make_store(store or cls.default_store, space.dim, metric, settings), encoder)
        try:
            index._add(columns)
        except BaseException:
            index._abandon()
            raise
        return index

    def _abandon(self) -> None:
        """Leave nothing of a store that was made in vain."""
        getattr(self.store, "drop", self.store.close)()

    def __len__(self) -> int:
        return len(self.store)

    def __contains__(self, name: object) -> bool:
        return is_id(name) and len(self.store.get([name])) == 1  # type: ignore[list-item]

    def __getitem__(self, name: Id) -> Entry:
        return self._known([name]).entry(0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} entries, e={self.dim}, {self.metric}, {self.store.kind})"

    @property
    def ids(self) -> tuple[Id, ...]:
        """The ids, in the order in which the entries were added."""
        return self.store.ids

    @property
    def dim(self) -> int:
        """Width e of the vectors."""
        return self.space.dim

    @property
    def metric(self) -> str:
        """How vectors are compared."""
        return self.space.metric

    @property
    def device(self) -> torch.device:
        """Where the vectors are."""
        return self.store.device if isinstance(self.store, InMemoryStore) else torch.device("cpu")

    @property
    def has_tokens(self) -> bool:
        """Whether the entries have encoded tokens; False where there is none."""
        return self._some_tokens() is not None

    def add(
        self,
        items: Any,
        *,
        ids: Iterable[Id] | None = None,
        texts: Iterable[str | None] | None = None,
        metadata: Iterable[Any] | None = None,
        tokens: Memory | None = None,
    ) -> tuple[Id, ...]:
        """Add entries, all or none, and return their ids. Arguments and errors as for `build`."""
        return self._add(self.space.columns(items, ids, texts, metadata, tokens))

    def _add(self, columns: dict[str, Any]) -> tuple[Id, ...]:
        """Add checked columns; ids are numbered where they are None."""
        count = len(columns["vectors"])
        with self._changing():
            about = self.store.about
            next_id = about.get("next_id", 0)
            if columns["ids"] is None:
                columns["ids"] = tuple(range(next_id, next_id + count))
            new = Entries(**columns)
            check_new(new.ids, self.store.get(new.ids).rows)
            check_lines(new)
            if count:
                self._check_tokens(new.tokens)
            highest = max((name for name in new.ids if isinstance(name, int)), default=-1)
            self.store.about = {"encoder": self.space.fingerprint, "next_id": max(next_id, highest + 1)}
            try:
                if count:
                    self.store.add(new)
            except BaseException:
                with contextlib.suppress(Exception):  # of a server that is away; the first error says so
                    self.store.about = about
                raise
        return new.ids

    def delete(self, ids: Iterable[Id]) -> None:
        """Delete entries, all or none. Their ids stay free.

        Args:
            ids: which.

        Raises:
            IndexMismatchError: an id that is not in the index.
        """
        names = as_id_list(ids)
        with self._changing():
            self._known(names)
            if names:
                self.store.delete(names)

    def update(
        self,
        ids: Iterable[Id],
        items: Any = None,
        *,
        texts: Iterable[str | None] | None = None,
        metadata: Iterable[Any] | None = None,
        tokens: Memory | None = None,
    ) -> None:
        """Replace what is given of entries, all or none; they keep their ids and their place. Arguments as for `build`.

        Raises:
            IndexMismatchError: an id that is not in the index, or another width.
        """
        names = as_id_list(ids)
        columns: dict[str, Any] = {}
        if items is not None:
            columns, texts = self.space.entries(items, texts)
            if len(columns["vectors"]) != len(names):
                raise IndexMismatchError(
                    f"each entry needs one item: got {len(columns['vectors'])} items for {len(names)} ids"
                )
        if texts is not None:
            columns["texts"] = check_texts(texts, len(names), optional=True)
        if metadata is not None:
            columns["metadata"] = check_metadata(metadata, len(names))
        if tokens is not None:
            columns["tokens"] = self.space.tokens(tokens, len(names))
        with self._changing():
            old = self._known(names)
            if not names:
                return
            if columns.keys() & {"vectors", "tokens"}:
                self._check_tokens(columns.get("tokens"))
            new = old.to(torch.device("cpu")).replaced([old.rows[name] for name in names], **columns)
            check_lines(new)
            self.store.update(new)

    def search(
        self,
        queries: Any,
        top_k: int,
        *,
        score_threshold: float | None = None,
        filter: Filter | None = None,
        encoder: Encoder | None = None,
    ) -> Hits:
        """The entries that fit best.

        Args:
            queries: texts, a tensor (b, e) or (e,), an array, lists of numbers, or a memory with one slot per row.
            top_k: how many entries k per query; what the index does not have is masked.
            score_threshold: entries of a lower score are masked.
            filter: metadata that must be equal ({"lang": "de"}), or a function of an entry's metadata, which a store
                on a server refuses.
            encoder: what encoded, or shall encode, the queries: refused if it is not the one of the entries.

        Returns:
            Hits (b, k). Their scores carry gradients to queries that want them.

        Raises:
            IndexMismatchError: queries of another width or encoder.
            TextError: an empty query.
            NonFiniteError: NaN or infinity.
            ShapeError: a query of zeros under "cosine", or no numbers (b, e).
        """
        check_int("top_k", top_k)
        if score_threshold is not None:
            check_float("score_threshold", score_threshold)
        values = self.space.queries(queries, encoder, self.device)
        with torch.autocast(values.device.type, enabled=False):
            with torch.no_grad():
                found = self.store.search(values.detach(), top_k, check_filter(filter))
                vectors = found.entries.vectors
                rows = best_rows(values.detach(), vectors, found.rows, self.metric, top_k)
            near = gather(vectors, rows)
            hits = hits_of_rows(found.entries, rows, near, score(values, near, self.metric))
        return hits if score_threshold is None else hits.above(score_threshold)

    def as_memory(self, per_query: int = 64, *, queries: Any = None, encoder: Encoder | None = None) -> IndexMemory:
        """All entries as a memory that attention searches by itself, instead of the hits of one search.

        Args:
            per_query: how many entries each token sees, in each layer and head.
            queries: for adapters with score_bias what each row of text is looked up by, as in `search`.
            encoder: as in `search`.

        Raises:
            ConfigError: the entries are not in this process, or their distances ("l2") were to be scores.
            IndexMismatchError: queries of another width or encoder.

        >>> Index.build(torch.randn(1000, 24)).as_memory(per_query=8)
        IndexMemory(1000 entries, e=24, per_query=8)
        """
        return IndexMemory(self, per_query, queries=queries, encoder=encoder)

    def to(self, device: str | torch.device) -> Index:
        """Move the vectors to a device, where searches then happen; returns this index.

        Args:
            device: where to.

        Raises:
            ConfigError: the vectors are not in the memory of this process.
        """
        if not isinstance(self.store, InMemoryStore):
            raise ConfigError(f"the store {self.store.kind!r} has its vectors elsewhere, so they cannot be moved")
        with self._writing, torch.inference_mode(False), torch.no_grad():
            self.store.to(torch.device(device))
        return self

    def save(self, path: Path) -> None:
        """Save as a folder, atomically: a process killed at any moment leaves what was there, or this index.

        Args:
            path: the folder.

        Raises:
            BlockingIOError: another writer is saving there.
            IndexFileError: another writer has saved there since this index was loaded from or saved to that folder.
            OSError: the disk is full, or the path is a file or not writable; what was saved there stays.
        """
        with self._writing, torch.inference_mode(False), torch.no_grad():
            save_index(path, self.store, self._saved)

    @classmethod
    def load(cls: type[Built], path: Path, *, encoder: Encoder | None = None, mapped: bool = False) -> Built:
        """Load what `save` saved: the version that counts, checked.

        Args:
            path: the folder.
            encoder: what encodes texts; it must be the one the index was built with.
            mapped: leave the vectors, and what faiss built, on the disk, from where a search reads what it needs. The
                "exact" store still has a scan of all entries in memory; other stores may read everything.

        Raises:
            IndexFileError: the folder or a file is missing, torn, changed, newer or something else, or of a store that
                is not registered.
            IndexMismatchError: another encoder.
        """
        saved, store = load_index(path, mapped)
        try:
            index = cls(store, encoder)
        except BaseException:
            store.close()
            raise
        index._saved = saved
        return index

    @classmethod
    def open(cls: type[Built], address: Path, *, encoder: Encoder | None = None) -> Built:
        """Open an index where it is: a folder that `save` wrote, or what a database holds, which changes then reach.

        Args:
            address: a folder; "postgresql://user@host/database#table"; "qdrant:http://host:6333/collection" or
                "qdrant:FOLDER"; "qdrant-edge:FOLDER"; "lance:FOLDER" or "lance:s3://bucket/path#table"; or what a
                registered store says are its addresses. `Index.build(…, store=address)` makes one there.
            encoder: what encodes texts; it must be the one the index was built with.

        Raises:
            IndexFileError: nothing is there, or something else, or of another version.
            IndexMismatchError: another encoder.
            MissingExtraError: a library that the store needs is not installed.
        """
        found = find_address(address) if isinstance(address, str) else None
        if found is None or os.path.isdir(address):
            return cls.load(address, encoder=encoder)
        store = found[0].connect(**found[1])
        try:
            return cls(store, encoder)
        except BaseException:
            store.close()
            raise

    def copy(self, store: str, **settings: Any) -> Index:
        """The same entries in another store, such as a database; they keep ids, order and encoder.

        Args:
            store: its name or an address, as for `build`.
            **settings: those of the store.

        Raises:
            ConfigError: as for `build`; or the entries have encoded tokens, and the store holds none.

        >>> Index.build([[3.0, 4.0]], ids=["a"], metric="ip").copy("flat")
        Index(1 entries, e=2, ip, flat)
        """
        entries = self.store.get(self.ids)
        copied = self._like(make_store(store, self.dim, self.metric, settings))
        copied.space = self.space
        try:
            with copied._changing():
                copied.store.about = self.store.about
                if len(entries):
                    copied._check_tokens(entries.tokens)
                    copied.store.add(entries.to(torch.device("cpu")))
        except BaseException:
            copied._abandon()
            raise
        return copied

    def _like(self, store: VectorStore) -> Index:
        """An index of this kind over another store."""
        return type(self)(store)

    def close(self) -> None:
        """Give back what the store holds, such as a connection."""
        self.store.close()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """One change at a time, and where the store has transactions, one of them."""
        writing = getattr(type(self.store), "writing", None)
        transaction = contextlib.nullcontext() if writing is None else writing(self.store)
        with self._writing, torch.inference_mode(False), torch.no_grad(), transaction:
            yield

    def _known(self, names: list[Id]) -> Entries:
        """The entries of ids, all of which must be here."""
        entries = self.store.get([name for name in names if is_id(name)])
        check_known(names, entries.rows if len(entries) == len(names) else dict.fromkeys(self.ids))
        return entries

    def _some_tokens(self) -> Tensor | None:
        if not self.store.holds_tokens:
            return None
        one = getattr(self.store, "one", None)
        tokens = (self.store.get(self.store.ids[:1]) if one is None else one()).tokens
        return tokens[0] if tokens else None

    def _check_tokens(self, tokens: tuple[Tensor, ...] | None) -> None:
        if tokens is not None and not self.store.holds_tokens:
            raise ConfigError(
                f"the store {self.store.kind!r} holds no encoded tokens: leave tokens= out, or use one that does, such "
                "as 'exact'"
            )
        if len(self):
            check_tokens_agree(self._some_tokens(), tokens)
        else:
            check_tokens_agree(None if tokens is None else tokens[0], tokens)
