"""MultiVectorIndex: entries and queries of several vectors each, scored by MaxSim (ColBERT, arXiv 2004.12832).

Equation 3, with q_i the vectors of a query and d_j those of an entry:

    score(q, d) = Σ_i max_j sim(q_i, d_j)

Queries and entries are lists of tensors (m, e) of any lengths, so that nothing is padded and no padding counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexMismatchError, ShapeError, check_float, check_int
from mmattn.memory import Memory
from mmattn.retrieval.embedding_space import EmbeddingSpace, Encoder, as_numbers, as_vectors, check_vectors
from mmattn.retrieval.entries import Columns, Filter, check_filter
from mmattn.retrieval.hits import Hits, hits_of_rows
from mmattn.retrieval.index import Index
from mmattn.retrieval.scoring import directions, lengths_of, wide
from mmattn.retrieval.stores import Candidates, VectorStore

#: Products that are computed at once: they should fit into the cache of the processor.
_BLOCK = 1 << 19


class MultiVectorSpace(EmbeddingSpace):
    """The vectors of a `MultiVectorIndex`: several per entry and query."""

    metrics: ClassVar[tuple[str, ...]] = ("cosine", "ip")

    @classmethod
    def of_vectors(cls, items: object, metric: str) -> tuple[EmbeddingSpace, object]:
        """Return the space of the vectors of each entry, and these as tensors."""
        parts = as_parts("vectors", items)
        return cls(parts[0].shape[1] if parts else _width_of_empty(items), metric), parts

    def vector_columns(self, items: object) -> Columns:
        """Return "tokens", the vectors (m, e) of each entry, and "vectors" (n, e), their means."""
        parts = [part.detach().to("cpu", copy=True) for part in self._checked("vectors", items)]
        means = mean_vectors(parts, self.metric) if parts else torch.empty(0, self.dim)
        return {"vectors": means, "tokens": tuple(parts)}

    def check_tokens(self, tokens: Memory, count: int) -> NoReturn:
        """Refuse encoded tokens beside the vectors."""
        raise ConfigError(
            "tokens= is for entries of one vector; here the vectors of an entry are its encoded tokens: leave it out"
        )

    def query_parts(self, queries: object, encoder: Encoder | None, device: torch.device) -> list[Tensor]:
        """Return the vectors (l, e) of each query, checked; gradients reach vectors that are given."""
        parts = self._checked("queries", self.encoded_queries(queries, encoder), single=True)
        return [part.to(device) for part in parts]

    def _checked(self, what: str, values: object, single: bool = False) -> list[Tensor]:
        parts = [as_vectors(what, part, dim=self.dim) for part in as_parts(what, values, single=single)]
        for number, part in enumerate(parts):
            check_vectors(f"{what}, number {number}", part, self.metric)
        return parts


class MultiVectorIndex(Index):
    """An index whose entries and queries have several vectors each, such as one per token: late interaction.

    The score of an entry is MaxSim: the sum over the vectors of a query of the largest cosine, or inner product, with a
    vector of the entry, computed in float64 and rounded to float32. A search scores every entry, or `num_candidates` of
    them: those with the nearest mean vectors. Hits become a memory of all vectors of each entry, and a slot has the
    score of its entry.

    Items are texts, which need an encoder, or the vectors of each entry: a memory (n, m, e), whose mask says which are
    real, a tensor (n, m, e), or a list of tensors or arrays (m, e). The metric is "cosine" or "ip".

    Args:
        store: a store that holds encoded tokens, which these vectors are.
        encoder: encodes texts as a memory of several slots: `TextEncoder(pooling="none")`, `MultiVectorEncoder`.

    Raises:
        ConfigError: a store that holds no encoded tokens, or compares by "l2".
        IndexMismatchError: another encoder or width, or entries of one vector.

    >>> entries = [torch.eye(3)[:2], torch.eye(3)[1:], torch.eye(3)[2:]]
    >>> index = MultiVectorIndex.build(entries, texts=["x and y", "y and z", "z"])
    >>> hits = index.search(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]), 2)
    >>> hits.texts, hits.scores
    ([['y and z', 'x and y']], tensor([[2., 1.]]))
    >>> hits.memory(), hits.memory().sources[0][3]
    (Memory(b=1, m=4, e=3, float32, segments, scores, sources), {'id': 0, 'text': 'x and y', 'slot': 1})
    """

    space_type: ClassVar[type[EmbeddingSpace]] = MultiVectorSpace
    space: MultiVectorSpace

    def __init__(self, store: VectorStore, encoder: Encoder | None = None) -> None:
        if not store.holds_tokens:
            raise ConfigError(
                f"the store {store.kind!r} holds one vector for each entry, and here entries have several: use one "
                "that holds encoded tokens, such as 'exact' or 'hnsw'"
            )
        if store.metric not in MultiVectorSpace.metrics:
            raise ConfigError(f"MaxSim compares by {MultiVectorSpace.metrics}, and the store by {store.metric!r}")
        super().__init__(store, encoder)
        width = store.about.get("token_dim")
        if len(store) and width != store.dim:
            raise IndexMismatchError(
                f"this index has entries of one vector of width {store.dim}, and encoded tokens of width {width}: open "
                "it as Index, or build it again"
            )

    def search(
        self,
        queries: object,
        top_k: int,
        *,
        score_threshold: float | None = None,
        filter: Filter | None = None,
        encoder: Encoder | None = None,
        num_candidates: int | None = None,
    ) -> Hits:
        """Return the entries that fit best.

        Args:
            queries: texts, or the vectors of each query: a memory (b, l, e), a tensor (b, l, e) or (l, e), or a list of
                tensors or arrays (l, e).
            top_k: how many entries k per query; missing ones are masked.
            score_threshold: entries of a lower score are masked.
            filter: as for `Index.search`.
            encoder: as for `Index.search`; its `encode_query` is used where it has one.
            num_candidates: how many entries are scored per query, at least `top_k`: those with the nearest mean
                vectors, and what else the store proposes. By default all.

        Returns:
            Hits (b, k), without vectors, with tokens. Scores carry gradients to queries that require them.

        Raises:
            ConfigError: fewer candidates than `top_k`. Otherwise as `Index.search`.
        """
        check_int("top_k", top_k)
        if num_candidates is not None:
            check_int("num_candidates", num_candidates, at_least=top_k)
        if score_threshold is not None:
            check_float("score_threshold", score_threshold)
        parts = self.space.query_parts(queries, encoder, self.device)
        with torch.autocast(self.device.type, enabled=False):
            with torch.no_grad():
                candidates = self._candidates(parts, check_filter(filter), num_candidates)
                tokens = candidates.entries.tokens or ()
                rows = best_entries(parts, tokens, candidates.rows, self.metric, top_k)
            scores = scores_of(parts, tokens, rows, self.metric)
        hits = hits_of_rows(candidates.entries, rows, None, scores, token_dim=self.dim)
        return hits if score_threshold is None else hits.above(score_threshold)

    def as_memory(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse: attention compares one vector per entry.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "attention searches entries of one vector, and these have several: give index.search(...).memory(), or "
            "build an Index"
        )

    def _candidates(self, queries: Sequence[Tensor], filter: Filter | None, count: int | None) -> Candidates:
        means = mean_vectors(queries, self.metric) if queries else torch.empty(0, self.dim, device=self.device)
        if count is not None:
            return self.store.search(means, count, filter)
        count = max(1, len(self))
        while len((candidates := self.store.search(means, count, filter)).entries) > count:
            count = len(candidates.entries)  # others were added meanwhile
        return candidates


def maxsim(queries: Sequence[Tensor], entries: Sequence[Tensor], metric: str) -> Tensor:
    """Return the scores (b, n) float32 of queries (l, e) and entries (m, e), rounded from float64. Differentiable."""
    lengths = [len(query) for query in queries]
    if not lengths or not entries:
        return torch.zeros(len(queries), len(entries))
    joint = torch.cat(list(queries))
    joint = joint.to(wide(joint.device))
    if metric == "cosine":
        joint = directions(joint)
    scores = []
    for block in _blocks(entries, len(joint) + joint.shape[1]):
        vectors = torch.cat(block).to(joint)
        fit = joint @ vectors.T
        if metric == "cosine":
            fit = fit / lengths_of(vectors)
        best = torch.stack([part.amax(1) for part in fit.split([len(entry) for entry in block], 1)], 1)
        scores.append(torch.stack([part.sum(0) for part in best.split(lengths)]))
    return torch.cat(scores, 1).float()


def best_entries(queries: Sequence[Tensor], entries: Sequence[Tensor], rows: Tensor, metric: str, count: int) -> Tensor:
    """Return the `count` best of candidate rows (b, c), best first, and equal scores in their order; -1 is none."""
    candidates = [sorted(row for row in line if row >= 0) for line in rows.tolist()]
    best = rows.new_full((len(rows), count), -1)
    # Where all queries have the same candidates, these are read once.
    same = len(candidates) > 1 and all(line == candidates[0] for line in candidates)
    step = len(candidates) if same else 1
    for start in range(0, len(candidates), step):
        line = candidates[start]
        fit = maxsim(queries[start : start + step], [entries[row] for row in line], metric).to(rows.device)
        order = fit.sort(dim=1, descending=True, stable=True).indices[:, :count]
        best[start : start + step, : order.shape[1]] = rows.new_tensor(line)[order]
    return best


def scores_of(queries: Sequence[Tensor], entries: Sequence[Tensor], rows: Tensor, metric: str) -> Tensor:
    """Return the scores (b, k) of rows (b, k) of entries, in which -1 comes last and becomes -inf."""
    lines = []
    for query, line in zip(queries, rows.tolist(), strict=True):
        real = [entries[row] for row in line if row >= 0]
        scores = maxsim([query], real, metric)[0].to(rows.device)
        lines.append(torch.nn.functional.pad(scores, (0, len(line) - len(real)), value=-torch.inf))
    return torch.stack(lines) if lines else torch.zeros(rows.shape, device=rows.device)


def mean_vectors(parts: Sequence[Tensor], metric: str) -> Tensor:
    """Return the means (b, e) float32 of tensors (m, e), by which a store proposes candidates."""
    means = []
    for part in parts:
        vectors = part.to(wide(part.device))
        mean = (directions(vectors) if metric == "cosine" else vectors).mean(0).float()
        # Vectors that cancel each other have no direction: one of them stands for all.
        means.append(mean if metric != "cosine" or bool(mean.any()) else part[0].float())
    return torch.stack(means)


def as_parts(what: str, values: object, *, single: bool = False) -> list[Tensor]:
    """Return tensors (m, e) of a memory, a tensor (n, m, e), an array, or a list; `single` allows one (m, e)."""
    if isinstance(values, Memory):
        parts = [row[real] for row, real in zip(values.tokens, values.real_slots(), strict=True)]
    else:
        if hasattr(values, "__array__"):
            values = as_numbers(f"{what} must be numbers (n, m, e)", values)
        if not isinstance(values, Iterable) or (isinstance(values, Tensor) and not values.dim()):
            raise ShapeError(f"{what} must be numbers (m, e) each, got {type(values).__name__}")
        parts = [as_numbers(f"{what} must be numbers (m, e) each", part) for part in values]
        if single and parts and all(part.dim() == 1 for part in parts):
            parts = [torch.stack(parts)]
    for number, part in enumerate(parts):
        if part.dim() != 2:
            raise ShapeError(
                f"{what} must be a memory, a tensor (n, m, e) or a list of tensors (m, e); number {number} is "
                f"{tuple(part.shape)}. Entries of one vector are what Index holds"
            )
        if not len(part):
            raise ShapeError(f"{what}: number {number} has no vector, so nothing can be compared; leave it out")
    return parts


def _width_of_empty(values: object) -> int:
    shape = tuple(values.tokens.shape if isinstance(values, Memory) else getattr(values, "shape", ()))
    if len(shape) != 3:
        raise ShapeError("an index of no entries needs their width: give torch.empty(0, m, e), or an encoder")
    return int(shape[2])


def _blocks(entries: Sequence[Tensor], width: int) -> Iterator[list[Tensor]]:
    """Yield runs of entries whose products fit into the cache."""
    step = max(1, _BLOCK * len(entries) // (sum(map(len, entries)) * width))
    for start in range(0, len(entries), step):
        yield list(entries[start : start + step])
