"""`IndexMemory`: all entries of an index as a memory, which attention searches by itself; no retriever in between."""

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
#: How far from their mean, relatively, ratios may be that count as one: of scores, and of an approximate order.
_ALIKE, _ROUGHLY_ALIKE = 0.02, 0.1


class IndexMemory(SearchedMemory):
    """All entries of an index as a memory of one slot each, made by `Index.as_memory`.

    In each layer and head the query of every token, multiplied into the space of the entries, searches them, and the
    softmax runs over the `per_query` entries with the largest scores, and the null slot where the adapter has one
    (Unlimiformer, arXiv 2305.01625). The size normalisation of an adapter counts all entries.

    One search structure serves all layers and heads. It is of the kind of the index's store, with its settings: "exact"
    finds the best for certain, "ivf", "hnsw" and "ivfpq" nearly. Approximate ones are searched where they are when the
    entries are about equally long, as encoders make them; others are made at the first use, over the entries as the
    adapter's norm leaves them, lie in memory beside the index, and follow its changes. A call sees the entries as they
    were when it began.

    Args:
        index: the index, in the memory of this process.
        per_query: how many entries each token sees, in each layer and head.
        queries: for adapters with score_bias what each row of text is looked up by, as in `index.search`; the scores
            of all entries are added to the attention's own. Where the store is approximate, all entries are compared
            with them once, so that those with the best scores are always among what is found.
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
        self._compared: tuple[Entries, Tensor] | None = None

    def entries(self, eps: float | None, scored: bool = False) -> IndexEntries:
        """The entries as they are now.

        Args:
            eps: ε of the LayerNorm as which they are searched; None for none.
            scored: searches weigh the scores of the queries, too.
        """
        searched = self.index.search_structures.get(eps, scored)
        exact = all(part.structure.exact for part in searched.version.parts)
        best = self._best_scores(searched.entries) if scored and not exact else None
        return IndexEntries(searched, self.index.metric, self.queries, best)

    @torch.no_grad()
    def _best_scores(self, entries: Entries) -> Tensor:
        """The rows (b, c) of the entries with the best scores."""
        assert self.queries is not None
        known = self._compared
        if known is not None and known[0] is entries:
            return known[1]
        asked, cosine = self.queries.to(entries.vectors.device), self.index.metric == "cosine"
        blocks = entries.vectors.split(_ROWS)
        fits = torch.cat([asked @ (directions(block) if cosine else block).T for block in blocks], 1)
        rows = fits.topk(min(self.per_query, len(entries))).indices
        self._compared = entries, rows
        return rows

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
        centred: queries have to lose their mean, in place of the entries.
    """

    entries: Entries
    version: Version
    ratio: float | None
    centred: bool = False


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
            known, own = self._known.get((eps, scored)), self._index.store.version
            if known is not None and known.entries is own.entries:
                return known
            searched = self._as_it_is(own, eps) or self._beside(own, eps, scored, known)
            self._known[eps, scored] = searched
            return searched

    def versions(self) -> list[Version]:
        """What stands beside the index."""
        return [one.version for one in self._known.values() if one.version.entries is not one.entries]

    def _as_it_is(self, own: Version, eps: float | None) -> Searched | None:
        """The index's own structure, where it finds what attention looks for."""
        metric = self._index.metric
        if eps is None and metric == "ip":
            return Searched(own.entries, own, 1.0)
        if metric == "l2" or all(part.structure.exact for part in own.parts):
            return None
        # Entries of about one length are in one order by ⟨q, norm(x)⟩ and by ⟨q - mean(q), x⟩, but for near ties.
        ratio = common(ratios(own.entries.vectors, eps, metric), _ROUGHLY_ALIKE)
        return None if ratio is None else Searched(own.entries, own, ratio, centred=eps is not None)

    def _beside(self, own: Version, eps: float | None, scored: bool, known: Searched | None) -> Searched:
        """A structure of the same kind over the entries as attention sees them."""
        store = self._index.store
        vectors, ratio = as_searched(own.entries.vectors, eps, store.metric, scored)
        shown = Entries(own.entries.ids, own.entries.texts, own.entries.metadata, vectors)
        build = type(store)(vectors.shape[1], "ip", **store.settings).build
        if known is None or known.version.entries is known.entries:
            return Searched(own.entries, Version.over(shown, "ip", build), ratio)
        before = known.version.entries.vectors
        if (before.device, before.shape[1]) != (vectors.device, vectors.shape[1]):
            return Searched(own.entries, Version.over(shown, "ip", build), ratio)
        version = known.version.followed(shown, moves(known.entries, own.entries), build)
        return Searched(own.entries, version, ratio)


@dataclass(frozen=True, eq=False)
class IndexEntries:
    """What adapters see of one version of an index.

    Args:
        searched: the version.
        metric: of the index.
        queries: (b, e) what each row of text is looked up by; None without scores.
        best: rows (b, c) of the entries with the best scores, which a search must not miss; None where it does not.
    """

    searched: Searched
    metric: str
    queries: Tensor | None
    best: Tensor | None = None

    def __len__(self) -> int:
        return len(self.searched.entries)

    def search(self, queries: Tensor, count: int, score_weight: float | None = None) -> Tensor:
        """The rows (b, n, count or fewer) of the entries with the largest inner products; -1 is none."""
        version = self.searched.version
        vectors = version.entries.vectors
        queries = queries.to(vectors.device, torch.float32)
        if self.searched.centred:
            queries = queries - queries.mean(-1, keepdim=True)
        if score_weight is not None:
            queries = self._with_scores(queries, score_weight)
        asked = queries.flatten(0, 1)
        rows = version.candidates(asked, count, None)
        if self.best is not None:
            best = self.best.repeat_interleave(len(asked) // len(self.best), 0)
            rows = torch.cat([rows, best.to(rows.device)], 1).sort(1).values
            rows[:, 1:].masked_fill_(rows[:, 1:] == rows[:, :-1], -1)
        if rows.shape[1] > count:
            step = max(1, _NUMBERS // (rows.shape[1] * vectors.shape[1]))
            parts = zip(asked.split(step), rows.split(step), strict=True)
            cosine = version.metric == "cosine"
            rows = torch.cat([_best(some, vectors, own, count, cosine) for some, own in parts])
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


def _best(queries: Tensor, vectors: Tensor, rows: Tensor, count: int, cosine: bool) -> Tensor:
    """Those of the rows (b, c) with the `count` largest inner products, as attention computes them: in float32."""
    found = vectors[rows.clamp(min=0)]
    fit = ((directions(found) if cosine else found) @ queries[..., None])[..., 0].masked_fill(rows < 0, -torch.inf)
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
    shown = vectors
    if eps is not None:
        shown = torch.cat([torch.nn.functional.layer_norm(one, one.shape[1:], eps=eps) for one in vectors.split(_ROWS)])
    if not scored:
        return shown, 1.0
    ratio = common(ratios(vectors, eps, metric))
    if ratio is not None:
        return shown, ratio
    return torch.cat([shown, directions(vectors) if metric == "cosine" else vectors], 1), None


def ratios(vectors: Tensor, eps: float | None, metric: str) -> Tensor:
    """How many times each score (n,) of a metric is the inner product with what the norm leaves of an entry."""
    found = vectors.new_ones(len(vectors))
    for block, part in zip(vectors.split(_ROWS), found.split(_ROWS), strict=True):
        if eps is not None:
            part *= (block.var(1, correction=0) + eps).sqrt()
        if metric == "cosine":
            part /= lengths_of(block).to(part.dtype).clamp(min=1e-12)
    return found


def common(ratios: Tensor, within: float = _ALIKE) -> float | None:
    """Their mean, where all are so near to it."""
    if not len(ratios):
        return 1.0
    ratio = float(ratios.mean())
    return ratio if float((ratios - ratio).abs().max()) < within * ratio else None


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
