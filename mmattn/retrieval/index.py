"""Index: entries with stable ids, found by their vectors."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import IndexMismatchError, ShapeError, check_float, check_int
from mmattn.memory import Memory
from mmattn.retrieval.approximate import describe_maker, engine_maker
from mmattn.retrieval.entries import (
    Entries,
    Entry,
    Filter,
    Id,
    as_id_list,
    check_ids,
    check_lines,
    check_metadata,
    check_texts,
    check_tokens,
)
from mmattn.retrieval.files import load_index, save_index
from mmattn.retrieval.hits import Hits, found
from mmattn.retrieval.space import Encoder, Space
from mmattn.retrieval.state import EngineMaker, State
from mmattn.retrieval.vectors import gather, score
from mmattn.storage.atomic import Path


class Index:
    """Entries with a vector, an id, and where they have them a text, metadata and encoded tokens; searched by vector.

    Made by `Index.build` or `Index.load`. A search sees one committed version from its beginning to its end: threads
    may search while others add, remove, update or save. Every change copies the columns it changes, so add many entries
    at a time.

    Scores are higher for better: the cosine, the inner product, or the squared distance, negative. They are computed in
    float64 from the full vectors and rounded once, whatever the engine; entries of equal score come in the order in
    which they were added.

    Engines: "exact" misses nothing: its scan in bfloat16 (where the processor is quick at that) only proposes, within a
    bound on its error. "flat" is faiss's own comparison in float32. "hnsw" and "ivfpq" are approximate: they may miss
    some of the best k, with a filter more of them, and "ivfpq" may then give fewer than k. Up to 1,024 allowed entries,
    or four times k, every engine compares all of them. Settings are objects: `retrieval.approximate.HNSW(links=16)`.

    >>> index = Index.build(torch.eye(3), ids=["x", "y", "z"], metadata=[{"odd": True}, {"odd": False}, {"odd": True}])
    >>> index.search([0.1, 0.9, 0.2], 2).ids
    [['y', 'z']]
    >>> index.remove(["y"])
    >>> index.search([0.1, 0.9, 0.2], 2, filter={"odd": True}, score_threshold=0.2).ids
    [['z', None]]
    """

    def __init__(self, state: State, space: Space, make: EngineMaker, next_id: int = 0) -> None:
        self.state = state
        self.space = space
        self._make = make
        self._next_id = next_id
        self._writing = threading.RLock()
        self._saved: dict[str, str] = {}

    @classmethod
    def build(
        cls,
        items: Any,
        *,
        encoder: Encoder | None = None,
        ids: Iterable[Id] | None = None,
        texts: Iterable[str | None] | None = None,
        metadata: Iterable[Any] | None = None,
        tokens: Memory | None = None,
        metric: str = "cosine",
        engine: object = "exact",
    ) -> Index:
        """Make an index.

        Args:
            items: texts, which need an encoder, or vectors: a tensor (n, e), an array, lists of numbers, or a memory
                with one slot per row.
            encoder: what encodes texts, here and in `search`: `encode(texts) -> Memory`, `dim` and `fingerprint`.
            ids: text or ints, no two the same; by default 0, 1, 2 …, and never one that was removed.
            texts: the text of each entry, where items are vectors.
            metadata: a JSON value for each entry, which filters see.
            tokens: encoded tokens of each entry, one row each, for `hits.memory(tokens=True)`.
            metric: "cosine", "ip" or "l2".
            engine: "exact", "flat", "hnsw", "ivfpq", or settings.

        Raises:
            IndexMismatchError: duplicate ids, or another number or width. NonFiniteError: NaN or infinity.
            ConfigError: texts without an encoder, or an unknown metric or engine.

        >>> Index.build([[3.0, 4.0], [1.0, 0.0]]).search([1.0, 0.0], 1).scores
        tensor([[1.]])
        """
        make = engine_maker(engine)
        space, items = Space.first(items, encoder, metric)
        nothing = Entries((), (), (), torch.empty(0, space.dim))
        index = cls(State.made(nothing, metric, make), space, make)
        index.add(items, ids=ids, texts=texts, metadata=metadata, tokens=tokens)
        return index

    def __len__(self) -> int:
        return len(self.state.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.state.entries.rows

    def __getitem__(self, name: Id) -> Entry:
        entries = self.state.entries
        return entries.entry(entries.find([name])[0])

    def __repr__(self) -> str:
        return f"Index({len(self)} entries, e={self.dim}, {self.metric}, {describe_maker(self._make)['kind']})"

    @property
    def ids(self) -> tuple[Id, ...]:
        """The ids, in the order in which the entries were added."""
        return self.state.entries.ids

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
        return self.state.entries.vectors.device

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
        vectors, texts = self.space.entries(items, texts)
        count = len(vectors)
        given = None if ids is None else check_ids(ids, count)
        columns = {
            "texts": (None,) * count if texts is None else check_texts(texts, count, optional=True),
            "metadata": (None,) * count if metadata is None else check_metadata(metadata, count),
            "tokens": None if tokens is None else check_tokens(tokens, count, self.device),
        }
        with self._writing, torch.inference_mode(False), torch.no_grad():
            old = self.state.entries
            named = given if given is not None else tuple(range(self._next_id, self._next_id + count))
            new = Entries(named, vectors=vectors.to(old.vectors.device, copy=True), **columns)  # type: ignore[arg-type]
            check_lines(new)
            if count:
                _check_tokens_fit(old, new.tokens)
            entries = old.joined(new)
            moved = torch.arange(len(old), device=self.device)
            state = self.state.follow(entries, moved, self._make)
            self._next_id = max(self._next_id, 1 + max((name for name in named if isinstance(name, int)), default=-1))
            self.state = state
        return named

    def remove(self, ids: Iterable[Id]) -> None:
        """Remove entries, all or none. Their ids stay free.

        Raises:
            IndexMismatchError: an id that is not in the index.
        """
        names = as_id_list(ids)
        with self._writing, torch.inference_mode(False), torch.no_grad():
            old = self.state.entries
            gone = set(old.find(names))
            rows = [row for row in range(len(old)) if row not in gone]
            moved = torch.full((len(old),), -1, device=self.device)
            moved[rows] = torch.arange(len(rows), device=self.device)
            self.state = self.state.follow(old.kept(rows), moved, self._make)

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
            columns["vectors"], texts = self.space.entries(items, texts)
            if len(columns["vectors"]) != len(names):
                raise IndexMismatchError(
                    f"each entry needs one item: got {len(columns['vectors'])} items for {len(names)} ids"
                )
        if texts is not None:
            columns["texts"] = check_texts(texts, len(names), optional=True)
        if metadata is not None:
            columns["metadata"] = check_metadata(metadata, len(names))
        if tokens is not None:
            columns["tokens"] = check_tokens(tokens, len(names), self.device)
        with self._writing, torch.inference_mode(False), torch.no_grad():
            old = self.state.entries
            rows = old.find(names)
            if (columns.keys() & {"vectors", "tokens"}) and rows:
                _check_tokens_fit(old, columns.get("tokens"))
            entries = old.replaced(rows, **columns)
            check_lines(entries.kept(rows))
            moved = torch.arange(len(old), device=self.device)
            if items is not None:
                moved[rows] = -1
            self.state = self.state.follow(entries, moved, self._make)

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
            filter: metadata that must be equal ({"lang": "de"}), or a function of an entry's metadata.
            encoder: what made, or shall make, the queries: refused if it is not the one of the entries.

        Returns:
            Hits (b, k). Their scores carry gradients to queries that want them.

        Raises:
            IndexMismatchError: queries of another width or encoder. TextError: an empty query.
            NonFiniteError: NaN or infinity. ShapeError: a query of zeros under "cosine", or no numbers (b, e).
        """
        check_int("top_k", top_k)
        if score_threshold is not None:
            check_float("score_threshold", score_threshold)
        state = self.state
        vectors = state.entries.vectors
        values = self.space.queries(queries, encoder, vectors.device)
        allowed = state.entries.allowed(filter)
        with torch.autocast(vectors.device.type, enabled=False):
            rows = state.search(values.detach(), top_k, allowed)
            near = gather(vectors, rows)
            scores = score(values, near, state.metric)
        hits = found(state.entries, rows, near, scores)
        return hits if score_threshold is None else hits.above(score_threshold)

    def to(self, device: str | torch.device) -> Index:
        """Move the vectors to a device, where searches then happen; returns this index."""
        with self._writing, torch.inference_mode(False), torch.no_grad():
            self.state = State.made(self.state.entries.to(torch.device(device)), self.metric, self._make)
        return self

    def save(self, path: Path) -> None:
        """Save as a folder, atomically: a process killed at any moment leaves what was there, or this index.

        Raises:
            BlockingIOError: another writer is saving there.
            IndexFileError: another writer has saved there since this index was loaded from or saved to that folder.
            OSError: the disk is full, or the path is a file or not writable; what was saved there is kept.
        """
        about = {"encoder": self.space.fingerprint, "engine": describe_maker(self._make), "next_id": self._next_id}
        save_index(path, self.state, about, self._saved)

    @classmethod
    def load(cls, path: Path, *, encoder: Encoder | None = None, mapped: bool = False) -> Index:
        """Load what `save` saved: the version that counts, checked.

        Args:
            path: the folder.
            encoder: what encodes texts; it must be the one the index was built with.
            mapped: leave the vectors, and what faiss built, on the disk, from where a search reads what it needs. The
                "exact" engine still keeps a scan of all entries in memory.

        Raises:
            IndexFileError: the folder or a file is missing, torn, changed, newer or something else.
            IndexMismatchError: another encoder.
        """
        saved, state, about, make = load_index(path, mapped)
        space = Space(about["dim"], about["metric"], None, about["encoder"])
        index = cls(state, space if encoder is None else space.joined(encoder), make, about["next_id"])
        index._saved = saved
        return index


def _check_tokens_fit(entries: Entries, tokens: tuple[Tensor, ...] | None) -> None:
    if len(entries) and (entries.tokens is None) != (tokens is None):
        raise ShapeError(
            "the index has encoded tokens for its entries: give tokens= with these, too"
            if tokens is None
            else "the index has no encoded tokens for its entries: leave tokens= out, or build it again with all"
        )
    widths = {part.shape[1] for part in (*(entries.tokens or ())[:1], *(tokens or ()))}
    if len(widths) > 1:
        raise ShapeError(f"encoded tokens of one index have one width, got {sorted(widths)}")
