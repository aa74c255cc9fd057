"""Index: entries with stable ids, found by their vectors."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from mmattn.errors import ConfigError, ShapeError, check_int
from mmattn.memory import Memory
from mmattn.retrieval.attention_search import IndexMemory, SearchStructures
from mmattn.retrieval.embedding_space import EmbeddingSpace, Encoder
from mmattn.retrieval.entries import (
    Columns,
    Entries,
    Entry,
    Filter,
    Id,
    as_list,
    check_filter,
    check_ids,
    check_known,
    check_new,
    is_id,
)
from mmattn.retrieval.hits import Hits, hits_of_rows
from mmattn.retrieval.index_files import load_index, save_index
from mmattn.retrieval.scoring import best_rows, gather, score
from mmattn.retrieval.stores import VectorStore, find_address, make_store
from mmattn.retrieval.stores.exact import InMemoryStore
from mmattn.storage.files import Path


class Index:
    """A search index. Each entry has a vector and an id, and optionally a text, metadata and encoded tokens.

    Create one with `Index.build`, `Index.load` or `Index.open`. Threads may search while another thread changes or
    saves the index; in an in-memory store, each search sees a single version.

    A higher score is better: the cosine, the inner product, or the negative squared distance. Every store computes it
    in float64 from the full vectors and rounds it to float32. Entries with equal scores are in the order of adding.

    Stores: "exact" finds the best k. "hnsw", "ivf" and "ivfpq" (faiss) are approximate: they may miss some of the best
        k, more of them with a filter, and then "ivf" and "ivfpq" may return fewer than k. "pgvector", "qdrant" and
        "lancedb" keep entries in a database; reopen it with `Index.open`. Add further stores with `register_store`.

    Args:
        store: the store with the entries.
        encoder: the encoder of the entries, for texts.

    Raises:
        IndexMismatchError: another encoder or width.

    >>> index = Index.build(torch.eye(3), ids=["x", "y", "z"], metadata=[{"odd": True}, {"odd": False}, {"odd": True}])
    >>> index.search([0.1, 0.9, 0.2], 2).ids
    [['y', 'z']]
    >>> index.delete(["y"])
    >>> index.search([0.1, 0.9, 0.2], 2, filter={"odd": True}, score_threshold=0.2).ids
    [['z', None]]
    """

    def __init__(self, store: VectorStore, encoder: Encoder | None = None) -> None:
        space = EmbeddingSpace(store.dim, store.metric, None, store.about.get("encoder"))
        self.store = store
        self.space = space if encoder is None else space.with_encoder(encoder)
        self._writing = threading.RLock()
        self._saved: dict[str, str] = {}
        #: Search structures for `as_memory`.
        self.search_structures = SearchStructures()

    @classmethod
    def build(
        cls,
        items: object,
        *,
        encoder: Encoder | None = None,
        ids: Iterable[Id] | None = None,
        texts: Iterable[str | None] | None = None,
        metadata: Iterable[object] | None = None,
        tokens: Memory | None = None,
        metric: str = "cosine",
        store: str | None = None,
        **settings: Any,
    ) -> Self:
        """Make an index.

        Args:
            items: texts, with an encoder, or vectors: a tensor (n, e), an array, lists of numbers, or a memory with one
                slot per row.
            encoder: encodes texts, here and in `search`; it has `encode(texts) -> Memory`, `dim` and `fingerprint`.
            ids: unique texts or ints; by default 0, 1, 2 …, and never a deleted id.
            texts: the text of each entry, if items are vectors.
            metadata: a JSON value for each entry, for filters.
            tokens: encoded tokens of each entry, one row each, for `hits.memory(tokens=True)`.
            metric: "cosine", "ip" or "l2".
            store: "exact" (the default), "hnsw", "ivf", "ivfpq", "qdrant", "pgvector", "lancedb", a registered store,
                or an address, as in `open`.
            **settings: settings of the store, such as `links=16` of "hnsw": see `mmattn.retrieval.stores`.

        Raises:
            IndexMismatchError: duplicate ids, or another number or width.
            NonFiniteError: NaN or infinity.
            ConfigError: texts without an encoder, an unknown metric or store, or a setting that is not allowed.
            TypeError: a setting that the store does not have.

        >>> Index.build([[3.0, 4.0], [1.0, 0.0]]).search([1.0, 0.0], 1).scores
        tensor([[1.]])
        """
        space, items = EmbeddingSpace.of_items(items, encoder, metric)
        # Everything is checked before there is a store, so that what is refused leaves none behind.
        columns = space.columns(items, texts, metadata, tokens)
        names = None if ids is None else check_ids(ids, len(columns["vectors"]))
        new = make_store(store or "exact", space.dim, metric, settings)
        with _dropped_on_error(new):
            index = cls(new, encoder)
            index._add(names, columns)
        return index

    def __len__(self) -> int:
        return len(self.store)

    def __contains__(self, name: object) -> bool:
        return is_id(name) and len(self.store.get([name])) == 1

    def __getitem__(self, name: Id) -> Entry:
        return self._get_known([name]).entry(0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} entries, e={self.dim}, {self.metric}, {self.store.kind})"

    @property
    def ids(self) -> tuple[Id, ...]:
        """The ids of all entries, in the order of adding."""
        return self.store.ids

    @property
    def dim(self) -> int:
        """Width e of the vectors."""
        return self.space.dim

    @property
    def metric(self) -> str:
        """The metric: "cosine", "ip" or "l2"."""
        return self.space.metric

    @property
    def device(self) -> torch.device:
        """The device of the vectors."""
        return self.store.device if isinstance(self.store, InMemoryStore) else torch.device("cpu")

    @property
    def has_tokens(self) -> bool:
        """True if the entries have encoded tokens."""
        return self.store.about.get("token_dim") is not None

    def add(
        self,
        items: object,
        *,
        ids: Iterable[Id] | None = None,
        texts: Iterable[str | None] | None = None,
        metadata: Iterable[object] | None = None,
        tokens: Memory | None = None,
    ) -> tuple[Id, ...]:
        """Add entries, all or none, and return their ids. Arguments and errors as in `build`."""
        columns = self.space.columns(items, texts, metadata, tokens)
        return self._add(None if ids is None else check_ids(ids, len(columns["vectors"])), columns)

    def _add(self, names: tuple[Id, ...] | None, columns: Columns) -> tuple[Id, ...]:
        """Add checked columns, and number the entries where there are no names."""
        count = len(columns["vectors"])
        missing = (None,) * count
        with self._changing():
            about = self.store.about
            next_id = about.get("next_id", 0)
            new = Entries(
                tuple(range(next_id, next_id + count)) if names is None else names,
                columns.get("texts", missing),
                columns.get("metadata", missing),
                columns["vectors"],
                columns.get("tokens"),
            )
            check_new(new.ids, self.store.get(new.ids).rows)
            highest = max((name for name in new.ids if isinstance(name, int)), default=-1)
            token_dim = self._check_tokens(new.tokens) if count else about.get("token_dim")
            self.store.about = {
                "encoder": self.space.fingerprint,
                "next_id": max(next_id, highest + 1),
                "token_dim": token_dim,
            }
            try:
                if count:
                    self.store.add(new)
            except BaseException:
                with contextlib.suppress(Exception):  # of a server that is away; the first error says so
                    self.store.about = about
                raise
        return new.ids

    def delete(self, ids: Iterable[Id]) -> None:
        """Delete entries, all or none. Their ids are never reused.

        Args:
            ids: a list of ids.

        Raises:
            IndexMismatchError: an id that is not in the index.
        """
        names = as_list("ids", ids)
        with self._changing():
            self._get_known(names)
            if names:
                self.store.delete(names)

    def update(
        self,
        ids: Iterable[Id],
        items: object = None,
        *,
        texts: Iterable[str | None] | None = None,
        metadata: Iterable[object] | None = None,
        tokens: Memory | None = None,
    ) -> None:
        """Replace the passed columns of entries, all or none; ids and order stay. Arguments as in `build`.

        Raises:
            IndexMismatchError: an id that is not in the index, or another width.
        """
        names = as_list("ids", ids)
        columns = self.space.columns(items, texts, metadata, tokens, len(names))
        with self._changing():
            old = self._get_known(names)
            if not names:
                return
            if columns.keys() & {"vectors", "tokens"}:
                self._check_tokens(columns.get("tokens"))
            self.store.update(old.to(torch.device("cpu")).replaced([old.rows[name] for name in names], columns))

    def search(
        self,
        queries: object,
        top_k: int,
        *,
        score_threshold: float | None = None,
        filter: Filter | None = None,
    ) -> Hits:
        """Return the best entries for each query.

        Args:
            queries: texts, a tensor (b, e) or (e,), an array, lists of numbers, or a memory with one slot per row.
            top_k: number k of entries per query; missing entries are masked.
            score_threshold: entries with a lower score are masked.
            filter: a dict of metadata that must be equal as Python compares ({"lang": "de"}). A list allows each of its
                values ({"lang": ["de", "fr"]}); an entry with a list matches each value in it. Or a function of an
                entry's metadata (not for databases).

        Returns:
            Hits (b, k). Scores carry gradients to queries that require them.

        Raises:
            IndexMismatchError: queries of another width, or the encoder has changed since it encoded the entries.
            TextError: an empty query.
            NonFiniteError: NaN or infinity.
            ShapeError: a query of zeros with "cosine", or queries that are not (b, e).
            ConfigError: no entry has a key of the filter.
        """
        check_int("top_k", top_k)
        values = self.space.queries(queries, self.device)
        with torch.autocast(values.device.type, enabled=False):
            with torch.no_grad():
                candidates = self.store.search(values.detach(), top_k, check_filter(filter))
                vectors = candidates.entries.vectors
                rows = best_rows(values.detach(), vectors, candidates.rows, self.metric, top_k)
            near = gather(vectors, rows)
            hits = hits_of_rows(candidates.entries, rows, near, score(values, near, self.metric))
        return hits if score_threshold is None else hits.above(score_threshold)

    def as_memory(self, per_query: int = 64, *, queries: object = None) -> IndexMemory:
        """Return all entries as a memory that attention searches in each layer.

        Args:
            per_query: number of entries that each token attends to, in each layer and head.
            queries: for adapters with score_bias, the query of each row of text, as in `search`.

        Raises:
            ConfigError: the entries are not in this process, or queries for the metric "l2".
            IndexMismatchError: as in `search`.

        >>> Index.build(torch.randn(1000, 24)).as_memory(per_query=8)
        IndexMemory(1000 entries, e=24, per_query=8)
        """
        store = self._store_in_memory()
        if queries is not None and self.metric == "l2":
            raise ConfigError(
                "score_bias adds scores that are inner products, and this index has metric='l2': build it with "
                "'cosine' or 'ip'"
            )
        vectors = None if queries is None else self.space.queries(queries, self.device).detach()
        return IndexMemory(store, self.search_structures, per_query, vectors)

    def to(self, device: str | torch.device) -> Index:
        """Move the vectors, and so the searches, to a device, and return this index.

        Args:
            device: the device.

        Raises:
            ConfigError: the vectors are not in the memory of this process.
        """
        store = self._store_in_memory()
        with self._writing, torch.inference_mode(False), torch.no_grad():
            store.to(torch.device(device))
        return self

    def save(self, path: Path) -> None:
        """Save as a folder, atomically: a process that is killed leaves the previous version or this one.

        Args:
            path: the folder.

        Raises:
            BlockingIOError: another writer is saving there.
            IndexFileError: another writer has saved there since this index was loaded from or saved to that folder.
            OSError: the disk is full, or the path is a file or not writable; the previous version stays.
        """
        with self._writing, torch.inference_mode(False), torch.no_grad():
            save_index(path, self.store, self._saved)

    @classmethod
    def load(cls, path: Path, *, encoder: Encoder | None = None, mapped: bool = False) -> Self:
        """Load a saved folder.

        Args:
            path: the folder.
            encoder: the encoder of the entries, for texts.
            mapped: leave the vectors, and the structures of faiss, on the disk, and read what a search needs. The
                "exact" store still has a scan of all entries in memory; other stores may read everything.

        Raises:
            IndexFileError: the folder or a file is missing, truncated, modified, of a newer version or not an index, or
                its store is not registered.
            IndexMismatchError: another encoder.
        """
        saved, store = load_index(path, mapped)
        index = cls._over(store, encoder)
        index._saved = saved
        return index

    @classmethod
    def open(cls, address: Path, *, encoder: Encoder | None = None) -> Self:
        """Open a saved folder, or a database; later changes are written to the database.

        Args:
            address: a folder; "postgresql://user@host/database#table"; "qdrant:http://host:6333/collection" or
                "qdrant:FOLDER"; "lance:FOLDER" or "lance:s3://bucket/path#table"; or an address of a registered store.
                `Index.build(…, store=address)` creates one.
            encoder: the encoder of the entries, for texts.

        Raises:
            IndexFileError: there is no index, or one of another version.
            IndexMismatchError: another encoder.
            MissingExtraError: a library of the store is not installed.
        """
        target = find_address(address) if isinstance(address, str) else None
        if target is None or os.path.isdir(address):
            return cls.load(address, encoder=encoder)
        return cls._over(target[0].connect(**target[1]), encoder)

    @classmethod
    def _over(cls, store: VectorStore, encoder: Encoder | None) -> Self:
        """Return an index over a store, which is closed on errors."""
        try:
            return cls(store, encoder)
        except BaseException:
            store.close()
            raise

    def copy(self, store: str, **settings: Any) -> Self:
        """Copy the index to another store, such as a database; entries keep ids, order and encoder.

        Args:
            store: its name or an address, as in `build`.
            **settings: settings of the store.

        Raises:
            ConfigError: as in `build`; or the entries have encoded tokens, which the store does not support.

        >>> Index.build([[3.0, 4.0]], ids=["a"], metric="ip").copy("hnsw")
        Index(1 entries, e=2, ip, hnsw)
        """
        entries = self.store.get(self.ids).to(torch.device("cpu"))
        new = make_store(store, self.dim, self.metric, settings)
        with _dropped_on_error(new):
            copied = type(self)(new)
            copied.space = self.space
            with copied._changing():
                if len(entries):
                    copied._check_tokens(entries.tokens)
                new.about = self.store.about
                if len(entries):
                    new.add(entries)
        return copied

    def close(self) -> None:
        """Release resources of the store, such as a connection."""
        self.store.close()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """One change at a time, and one transaction where the store has them."""
        writing = getattr(type(self.store), "writing", None)
        transaction = contextlib.nullcontext() if writing is None else writing(self.store)
        with self._writing, torch.inference_mode(False), torch.no_grad(), transaction:
            yield

    def _store_in_memory(self) -> InMemoryStore:
        if not isinstance(self.store, InMemoryStore):
            raise ConfigError(
                f"the store {self.store.kind!r} has its vectors elsewhere: copy the index into this process with "
                "index.copy('exact')"
            )
        return self.store

    def _get_known(self, names: Sequence[Id]) -> Entries:
        """Return the entries of ids; raise IndexMismatchError for unknown ids."""
        entries = self.store.get([name for name in names if is_id(name)])
        check_known(names, entries.rows if len(entries) == len(names) else dict.fromkeys(self.ids))
        return entries

    def _check_tokens(self, tokens: tuple[Tensor, ...] | None) -> int | None:
        """Return the width of the encoded tokens of new entries, which all entries share."""
        if tokens is not None and not self.store.holds_tokens:
            raise ConfigError(
                f"the store {self.store.kind!r} holds no encoded tokens: leave tokens= out, or use a store that does, "
                "such as 'exact'"
            )
        widths = {part.shape[1] for part in tokens or ()}
        if len(self):
            if self.has_tokens == (tokens is None):
                raise ShapeError(
                    "the index has encoded tokens for its entries: give tokens= with these, too"
                    if tokens is None
                    else "the index has no encoded tokens for its entries: leave tokens= out, or build it again"
                )
            token_dim = self.store.about.get("token_dim")
            widths |= set() if token_dim is None else {token_dim}
        if len(widths) > 1:
            raise ShapeError(f"encoded tokens of one index have one width, got {sorted(widths)}")
        return next(iter(widths), None)


@contextlib.contextmanager
def _dropped_on_error(store: VectorStore) -> Iterator[None]:
    try:
        yield
    except BaseException:
        getattr(store, "drop", store.close)()
        raise
