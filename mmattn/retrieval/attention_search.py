"""`IndexMemory`: all entries of an index as a memory that attention searches in each layer."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError, check_int
from mmattn.memory import Memory, SearchedMemory
from mmattn.retrieval.embedding_space import Encoder
from mmattn.retrieval.entries import Entries
from mmattn.retrieval.scoring import directions, lengths_of, score
from mmattn.retrieval.stores.exact import InMemoryStore, Version

_ROWS = 1 << 16
#: Numbers of candidates that are compared at once.
_NUMBERS = 1 << 24
#: Relative deviation from their mean within which ratios count as equal: for scores, and for an approximate order.
_EQUAL, _NEARLY_EQUAL = 0.02, 0.1


class IndexMemory(SearchedMemory):
    """All entries of an index as a memory of one slot each, made by `Index.as_memory`.

    In each layer and head the query of every token, mapped into the space of the entries, searches them, and the
    softmax runs over the `per_query` entries with the largest scores, and the null slot where the adapter has one
    (Unlimiformer, arXiv 2305.01625). The size normalisation of an adapter counts all entries.

    One search structure serves all layers and heads. It has the kind and settings of the index's store: "exact" finds
    the best for certain, "ivf", "hnsw" and "ivfpq" nearly. The index's own approximate structure is used where entries
    are about equally long, as encoders make them; otherwise another one is built at the first use, over the entries
    after the adapter's norm, same in memory, and updated with the index. A call reads the entries of its beginning.

    Args:
        index: an index in the memory of this process.
        per_query: how many entries each token attends to, in each layer and head.
        queries: for adapters with score_bias the query of each row of text, as in `index.search`; the scores of all
            entries are added to the attention's. An approximate search always includes the entries of the best scores.
        encoder: encodes, or encoded, the queries.

    Raises:
        ConfigError: the entries are not in this process, or queries are given for an index of distances ("l2").
        IndexMismatchError: queries of another width or encoder.
    """

    def __init__(
        self, index: Any, per_query: int = 64, *, queries: object = None, encoder: Encoder | None = None
    ) -> None:
        self.per_query = check_int("per_query", per_query)
        if not isinstance(index.store, InMemoryStore):
            raise ConfigError(
                f"the store {index.store.kind!r} has its vectors elsewhere: copy the index into this process, "
                "index.copy('exact').as_memory(), or give hits.memory()"
            )
        if queries is not None and index.metric == "l2":
            raise ConfigError(
                "score_bias adds scores that are inner products, and this index has metric='l2': build it with "
                "'cosine' or 'ip'"
            )
        self.index, self.dim = index, index.dim
        self.queries = None if queries is None else index.space.queries(queries, encoder, index.device).detach()
        self.rows = None if self.queries is None else len(self.queries)
        self._compared: tuple[Entries, Tensor] | None = None

    def entries(self, eps: float | None, scored: bool = False) -> IndexEntries:
        """Return the current entries, after a LayerNorm with this ε; `scored` adds the scores of the queries."""
        searched = self.index.search_structures.get(eps, scored)
        exact = all(part.structure.exact for part in searched.version.parts)
        best = self._best_scores(searched.entries) if scored and not exact else None
        return IndexEntries(searched, self.index.metric, self.queries, best)

    @torch.no_grad()
    def _best_scores(self, entries: Entries) -> Tensor:
        """Return the rows (b, c) of the entries with the best scores."""
        assert self.queries is not None
        if self._compared is not None and self._compared[0] is entries:
            return self._compared[1]
        queries, cosine = self.queries.to(entries.vectors.device), self.index.metric == "cosine"
        blocks = entries.vectors.split(_ROWS)
        fits = torch.cat([queries @ (directions(block) if cosine else block).T for block in blocks], 1)
        rows = fits.topk(min(self.per_query, len(entries))).indices
        self._compared = entries, rows
        return rows

    def __repr__(self) -> str:
        return f"IndexMemory({len(self.index)} entries, e={self.dim}, per_query={self.per_query})"


@dataclass(frozen=True, eq=False)
class Searched:
    """One version of the entries of an index, and the structure that attention searches.

    `version` finds entries by inner products with `(n, e)`, or `(n, 2e)` where scores lie beside. `ratio` is that of a
    score to the inner product, None where scores lie beside. `centred`: queries are centred, instead of the entries.
    """

    entries: Entries
    version: Version
    ratio: float | None
    centred: bool = False


class SearchStructures:
    """The structures of an index that attention searches, built at the first use and updated with the index."""

    def __init__(self, index: Any) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._structures: dict[tuple[float | None, bool], Searched] = {}

    def get(self, eps: float | None, scored: bool = False) -> Searched:
        """Return the structure over the current entries, after a LayerNorm with this ε."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            last, version = self._structures.get((eps, scored)), self._index.store.version
            if last is not None and last.entries is version.entries:
                return last
            searched = self._of_index(version, eps) or self._built(version, eps, scored, last)
            self._structures[eps, scored] = searched
            return searched

    def versions(self) -> list[Version]:
        """Return the structures that were built beside the index."""
        return [one.version for one in self._structures.values() if one.version.entries is not one.entries]

    def _of_index(self, version: Version, eps: float | None) -> Searched | None:
        """Return the index's own structure, where it ranks entries as attention does."""
        metric = self._index.metric
        if eps is None and metric == "ip":
            return Searched(version.entries, version, 1.0)
        if metric == "l2" or all(part.structure.exact for part in version.parts):
            return None
        # Entries of about one length are in one order by ⟨q, norm(x)⟩ and by ⟨q - mean(q), x⟩, but for near ties.
        ratio = common(ratios(version.entries.vectors, eps, metric), _NEARLY_EQUAL)
        return None if ratio is None else Searched(version.entries, version, ratio, centred=eps is not None)

    def _built(self, version: Version, eps: float | None, scored: bool, last: Searched | None) -> Searched:
        """Return a structure of the same kind over the entries after the norm."""
        store, entries = self._index.store, version.entries
        vectors, ratio = as_searched(entries.vectors, eps, store.metric, scored)
        normed = Entries(entries.ids, entries.texts, entries.metadata, vectors)
        build = type(store)(vectors.shape[1], "ip", **store.settings).build
        if last is not None and last.version.entries is not last.entries:
            before = last.version.entries.vectors
            if (before.device, before.shape[1]) == (vectors.device, vectors.shape[1]):
                moved = moves(last.entries, entries)
                return Searched(entries, last.version.followed(normed, moved, build), ratio)
        return Searched(entries, Version.over(normed, "ip", build), ratio)


@dataclass(frozen=True, eq=False)
class IndexEntries:
    """The entries of one version of an index, for adapters; `best` are rows (b, c) that a search must not miss."""

    searched: Searched
    metric: str
    queries: Tensor | None
    best: Tensor | None = None

    def __len__(self) -> int:
        return len(self.searched.entries)

    def search(self, queries: Tensor, count: int, score_weight: float | None = None) -> Tensor:
        """Return the rows (b, n, count or fewer) of the entries with the largest inner products; -1 is none."""
        version = self.searched.version
        vectors = version.entries.vectors
        queries = queries.to(vectors.device, torch.float32)
        if self.searched.centred:
            queries = queries - queries.mean(-1, keepdim=True)
        if score_weight is not None:
            queries = self._with_scores(queries, score_weight)
        flat = queries.flatten(0, 1)
        rows = version.candidates(flat, count, None)
        if self.best is not None:
            best = self.best.repeat_interleave(len(flat) // len(self.best), 0)
            rows = torch.cat([rows, best.to(rows.device)], 1).sort(1).values
            rows[:, 1:].masked_fill_(rows[:, 1:] == rows[:, :-1], -1)
        if rows.shape[1] > count:
            step = max(1, _NUMBERS // (rows.shape[1] * vectors.shape[1]))
            blocks = zip(flat.split(step), rows.split(step), strict=True)
            cosine = version.metric == "cosine"
            rows = torch.cat([_best(some, vectors, candidates, count, cosine) for some, candidates in blocks])
        return rows.unflatten(0, queries.shape[:2])

    def _with_scores(self, queries: Tensor, weight: float) -> Tensor:
        assert self.queries is not None
        scored = self.queries.to(queries.device)
        scored = directions(scored) if self.metric == "cosine" else scored
        scored = scored.repeat_interleave(len(queries) // len(scored), 0)[:, None].float() * weight
        ratio = self.searched.ratio
        if ratio is None:
            return torch.cat([queries, scored.expand_as(queries)], 2)
        return queries + ratio * scored

    def slots(self, rows: Tensor) -> Tensor:
        """Return the vectors (n, e) of rows (n,)."""
        vectors = self.searched.entries.vectors
        return vectors[rows.to(vectors.device)] if len(self) else vectors.new_zeros(*rows.shape, vectors.shape[1])

    def scores(self, rows: Tensor) -> Tensor:
        """Return the scores (b, n) of rows (n,) for the query of each row of text."""
        assert self.queries is not None
        vectors = self.searched.entries.vectors
        return score(self.queries.to(vectors.device), self.slots(rows), self.metric)

    def memory(self) -> Memory:
        """Return all entries as a memory of one row."""
        entries = self.searched.entries
        sources = [[{"id": name, "text": text} for name, text in zip(entries.ids, entries.texts, strict=True)]]
        return Memory(entries.vectors[None], sources=sources, check_finite=False)


def _best(queries: Tensor, vectors: Tensor, rows: Tensor, count: int, cosine: bool) -> Tensor:
    """Return the candidates (b, c) with the `count` largest inner products in float32, as in attention."""
    near = vectors[rows.clamp(min=0)]
    fit = ((directions(near) if cosine else near) @ queries[..., None])[..., 0].masked_fill(rows < 0, -torch.inf)
    return rows.gather(1, fit.topk(count).indices)


def as_searched(vectors: Tensor, eps: float | None, metric: str, scored: bool) -> tuple[Tensor, float | None]:
    """Return the vectors to search, (n, e) or (n, 2e), and the ratio of a score to an inner product with them.

    Vectors of about one length, as encoders make them, are multiples of their normalised ones, and so are their scores.
    For others, the vectors of the scores are put beside them, and the ratio is None.
    """
    normed = vectors
    if eps is not None:
        normed = torch.cat(
            [torch.nn.functional.layer_norm(one, one.shape[1:], eps=eps) for one in vectors.split(_ROWS)]
        )
    if not scored:
        return normed, 1.0
    ratio = common(ratios(vectors, eps, metric))
    if ratio is not None:
        return normed, ratio
    return torch.cat([normed, directions(vectors) if metric == "cosine" else vectors], 1), None


def ratios(vectors: Tensor, eps: float | None, metric: str) -> Tensor:
    """Return the ratio (n,) of the score of each entry to the inner product with its normalised vector."""
    result = vectors.new_ones(len(vectors))
    for block, part in zip(vectors.split(_ROWS), result.split(_ROWS), strict=True):
        if eps is not None:
            part *= (block.var(1, correction=0) + eps).sqrt()
        if metric == "cosine":
            part /= lengths_of(block).to(part.dtype).clamp(min=1e-12)
    return result


def common(ratios: Tensor, within: float = _EQUAL) -> float | None:
    """Return the mean of ratios where all are within a relative distance of it, or None."""
    if not len(ratios):
        return 1.0
    ratio = float(ratios.mean())
    return ratio if float((ratios - ratio).abs().max()) < within * ratio else None


def moves(old: Entries, new: Entries) -> Tensor:
    """Return the new row (n,) of each old entry; -1 where it is gone or has another vector."""
    if not len(new):
        return torch.full((len(old),), -1, device=old.vectors.device)
    if new.ids[: len(old)] == old.ids:
        rows = torch.arange(len(old))
    else:
        rows = torch.tensor([new.rows.get(name, -1) for name in old.ids], dtype=torch.long)
    rows = rows.to(old.vectors.device)
    same = rows >= 0
    for start in range(0, len(old), _ROWS):
        part = slice(start, start + _ROWS)
        same[part] &= (new.vectors[rows[part].clamp(min=0)] == old.vectors[part]).all(1)
    return torch.where(same, rows, -1)
