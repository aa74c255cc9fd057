"""`IndexMemory`: all entries of an index as a memory, which attention searches by itself; no retriever in between."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError, check_int
from mmattn.memory import Memory
from mmattn.retrieval.embedding_space import Encoder
from mmattn.retrieval.entries import Entries
from mmattn.retrieval.scoring import directions, lengths_of, score
from mmattn.retrieval.stores.in_memory import InMemoryStore, Version
from mmattn.searched_memory import SearchedMemory

_ROWS = 1 << 16
#: Numbers of candidates that are compared at once.
_NUMBERS = 1 << 24
#: How far from their mean ratios may be that count as one.
_ALIKE = 0.02


class IndexMemory(SearchedMemory):
    """All entries of an index as a memory of one slot each, made by `Index.as_memory`.

    In each layer and head the query of every token, multiplied into the space of the entries, searches them, and the
    softmax runs over the `per_query` entries with the largest scores, and the null slot where the adapter has one
    (Unlimiformer, arXiv 2305.01625). The size normalisation of an adapter counts all entries.

    One search structure serves all layers and heads. It is of the kind of the index's store, with its settings: "exact"
    finds the best for certain, "hnsw" and "ivfpq" nearly. It is made at the first use, lies in memory beside the index,
    and follows its changes. A call sees the entries as they were when it began.

    Args:
        index: the index, in the memory of this process.
        per_query: how many entries each token sees, in each layer and head.
        queries: for adapters with score_bias what each row of text is looked up by, as in `index.search`; the scores
            of all entries are added to the attention's own.
        encoder: what encoded, or shall encode, the queries.

    Raises:
        ConfigError: the entries are not in this process, or their distances ("l2") were to be scores.
        IndexMismatchError: queries of another width or encoder.
    """

    def __init__(self, index: Any, per_query: int = 64, *, queries: Any = None, encoder: Encoder | None = None) -> None:
        self.per_query = check_int("per_query", per_query)
        if not isinstance(index.store, InMemoryStore):
            raise ConfigError(
                f"attention searches in every layer, and the store {index.store.kind!r} has its vectors elsewhere: "
                "copy it into this process, index.copy('exact').as_memory(), or give hits.memory() of a search"
            )
        if queries is not None and index.metric == "l2":
            raise ConfigError(
                "score_bias adds scores that are inner products, and this index has metric='l2': build it with "
                "'cosine' or 'ip'"
            )
        self.index, self.dim = index, index.dim
        self.queries = None if queries is None else index.space.queries(queries, encoder, index.device).detach()
        self.rows = None if self.queries is None else len(self.queries)

    def entries(self, eps: float | None, scored: bool = False) -> IndexEntries:
        """The entries as they are now.

        Args:
            eps: ε of the LayerNorm as which they are searched; None for none.
            scored: searches weigh the scores of the queries, too.
        """
        searched = self.index.search_structures.get(eps, scored)
        return IndexEntries(searched, self.index.metric, self.queries)

    def __repr__(self) -> str:
        return f"IndexMemory({len(self.index)} entries, e={self.dim}, per_query={self.per_query})"


@dataclass(frozen=True, eq=False)
class Searched:
    """One version of the entries of an index, and as what they are searched.

    Args:
        entries: of the index.
        version: finds them by inner products with what they are searched as, (n, e) or (n, 2e).
        ratio: of a score to the inner product with that, where it is the same for all; None where what the scores are
            inner products with stands beside it.
    """

    entries: Entries
    version: Version
    ratio: float | None


class SearchStructures:
    """The entries of an index as attention searches them, made when they are first needed and kept up to date.

    Args:
        index: the index.
    """

    def __init__(self, index: Any) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._known: dict[tuple[float | None, bool], Searched] = {}

    def get(self, eps: float | None, scored: bool = False) -> Searched:
        """Those of the entries as they are now.

        Args:
            eps: ε of the LayerNorm as which they are searched; None for none.
            scored: scores of the index are added to the inner products.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad():
            store, known = self._index.store, self._known.get((eps, scored))
            own = store.version
            if known is not None and known.entries is own.entries:
                return known
            if eps is None and store.metric == "ip":
                searched = Searched(own.entries, own, 1.0)
            else:
                vectors, ratio = as_searched(own.entries.vectors, eps, store.metric, scored)
                shown = Entries(own.entries.ids, own.entries.texts, own.entries.metadata, vectors)
                build = type(store)(vectors.shape[1], "ip", **store.settings).build
                before = None if known is None else known.version.entries.vectors
                alike = before is not None and (before.device, before.shape[1]) == (vectors.device, vectors.shape[1])
                if known is None or not alike:
                    version = Version.over(shown, "ip", build)
                else:
                    version = known.version.followed(shown, moves(known.entries, own.entries), build)
                searched = Searched(own.entries, version, ratio)
            self._known[eps, scored] = searched
            return searched

    def nbytes(self) -> int:
        """Bytes of the vectors as they are searched, without what the store builds over them."""
        return sum(
            one.version.entries.vectors.nbytes for one in self._known.values() if one.version.entries is not one.entries
        )


@dataclass(frozen=True, eq=False)
class IndexEntries:
    """What adapters see of one version of an index.

    Args:
        searched: the version.
        metric: of the index.
        queries: (b, e) what each row of text is looked up by; None without scores.
    """

    searched: Searched
    metric: str
    queries: Tensor | None

    def __len__(self) -> int:
        return len(self.searched.entries)

    def search(self, queries: Tensor, count: int, score_weight: float | None = None) -> Tensor:
        """The rows (b, n, count or fewer) of the entries with the largest inner products; -1 is none."""
        version = self.searched.version
        vectors = version.entries.vectors
        queries = queries.to(vectors.device, torch.float32)
        if score_weight is not None:
            queries = self._with_scores(queries, score_weight)
        asked = queries.flatten(0, 1)
        rows = version.candidates(asked, count, None)
        if rows.shape[1] > count:
            step = max(1, _NUMBERS // (rows.shape[1] * vectors.shape[1]))
            parts = zip(asked.split(step), rows.split(step), strict=True)
            rows = torch.cat([_best(some, vectors, own, count) for some, own in parts])
        return rows.unflatten(0, queries.shape[:2])

    def _with_scores(self, queries: Tensor, weight: float) -> Tensor:
        assert self.queries is not None
        given = self.queries.to(queries.device)
        asked = directions(given) if self.metric == "cosine" else given
        asked = asked.repeat_interleave(len(queries) // len(asked), 0)[:, None].float() * weight
        ratio = self.searched.ratio
        if ratio is None:
            return torch.cat([queries, asked.expand_as(queries)], 2)
        return queries + ratio * asked

    def slots(self, rows: Tensor) -> Tensor:
        """The vectors (n, e) of rows (n,)."""
        vectors = self.searched.entries.vectors
        return vectors[rows.to(vectors.device)] if len(self) else vectors.new_zeros(*rows.shape, vectors.shape[1])

    def scores(self, rows: Tensor) -> Tensor:
        """The scores (b, n) that entries of rows (n,) have for the query of each row of text."""
        assert self.queries is not None
        vectors = self.searched.entries.vectors
        return score(self.queries.to(vectors.device), self.slots(rows), self.metric)

    def memory(self) -> Memory:
        """All entries, one row."""
        entries = self.searched.entries
        sources = [[{"id": name, "text": text} for name, text in zip(entries.ids, entries.texts, strict=True)]]
        return Memory(entries.vectors[None], sources=sources, check_finite=False)


def _best(queries: Tensor, vectors: Tensor, rows: Tensor, count: int) -> Tensor:
    """Those of the rows (b, c) with the `count` largest inner products, as attention computes them: in float32."""
    fit = (vectors[rows.clamp(min=0)] @ queries[..., None])[..., 0].masked_fill(rows < 0, -torch.inf)
    return rows.gather(1, fit.topk(count).indices)


def as_searched(vectors: Tensor, eps: float | None, metric: str, scored: bool) -> tuple[Tensor, float | None]:
    """As what entries are searched, (n, e) or (n, 2e), and the ratio of a score to an inner product with that.

    Vectors of about one length, as encoders make them, are multiples of what their norm leaves, and so are their
    scores. Of others, what the scores are inner products with is put beside it.

    Args:
        vectors: (n, e).
        eps: ε of the LayerNorm that is applied; None for none.
        metric: of the scores.
        scored: whether there are any.
    """
    shown, ratios = torch.empty_like(vectors), vectors.new_ones(len(vectors))
    for start in range(0, len(vectors), _ROWS):
        block, part = vectors[start : start + _ROWS], slice(start, start + _ROWS)
        if eps is None:
            shown[part] = block
        else:
            shown[part] = torch.nn.functional.layer_norm(block, block.shape[1:], eps=eps)
            ratios[part] = (block.var(1, correction=0) + eps).sqrt()
        if metric == "cosine":
            ratios[part] /= lengths_of(block).to(ratios.dtype).clamp(min=1e-12)
    if not len(vectors) or not scored:
        return shown, 1.0
    ratio = float(ratios.mean())
    if float((ratios - ratio).abs().max()) < _ALIKE * ratio:
        return shown, ratio
    return torch.cat([shown, directions(vectors) if metric == "cosine" else vectors], 1), None


def moves(old: Entries, new: Entries) -> Tensor:
    """The new row (n,) of each old entry; -1 where it is gone or has another vector."""
    if not len(new):
        return torch.full((len(old),), -1, device=old.vectors.device)
    if new.ids[: len(old)] == old.ids:
        rows = torch.arange(len(old))
    else:
        rows = torch.tensor([new.rows.get(name, -1) for name in old.ids], dtype=torch.long)
    rows = rows.to(old.vectors.device)
    kept = rows >= 0
    for start in range(0, len(old), _ROWS):
        part = slice(start, start + _ROWS)
        kept[part] &= (new.vectors[rows[part].clamp(min=0)] == old.vectors[part]).all(1)
    return torch.where(kept, rows, -1)
