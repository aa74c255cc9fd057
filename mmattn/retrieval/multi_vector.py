"""MultiVectorIndex: entries of several vectors, found by MaxSim (ColBERT, arXiv 2004.12832)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexMismatchError, check_float, check_int
from mmattn.retrieval.embedding_space import EmbeddingSpace, Encoder
from mmattn.retrieval.entries import Filter
from mmattn.retrieval.entry_checks import check_filter
from mmattn.retrieval.hits import Hits, hits_of_rows
from mmattn.retrieval.index import Index
from mmattn.retrieval.maxsim import best_entries, mean_vectors, scores_of
from mmattn.retrieval.multi_vector_space import MultiVectorSpace
from mmattn.retrieval.stores import Candidates, VectorStore
from mmattn.retrieval.stores.registry import find_store

Built = TypeVar("Built", bound="MultiVectorIndex")


class MultiVectorIndex(Index):
    """An index whose entries and queries have several vectors each, such as one for each token: late interaction.

    The score of an entry is MaxSim (ColBERT, arXiv 2004.12832, equation 3): the sum over the vectors of a query of the
    largest cosine, or inner product, with a vector of the entry. It is computed in float64 from all of them and rounded
    once. What `Index` says of ids, filters, changes, files and threads holds.

    A search scores every entry, or `num_candidates` of them: those of the nearest mean vectors, which the store finds.
    Hits become a memory of all vectors of each entry, and a slot has the score of its entry.

    Args:
        store: what holds the entries: one that holds encoded tokens, which these vectors are.
        encoder: what encodes texts, as a memory of several slots: `TextEncoder(pooling="none")`, `MultiVectorEncoder`.

    Raises:
        ConfigError: a store that holds no encoded tokens, or that compares by "l2".
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
        _refuse_without_tokens(type(store))
        if store.metric not in MultiVectorSpace.metrics:
            raise ConfigError(f"MaxSim compares by {MultiVectorSpace.metrics}, and the store by {store.metric!r}")
        super().__init__(store, encoder)
        held = self._some_tokens()
        if len(store) and (held is None or held.shape[1] != store.dim):
            raise IndexMismatchError(
                f"this index has entries of one vector of width {store.dim}, and encoded tokens "
                f"{None if held is None else tuple(held.shape)}: open it as Index, or build it again"
            )

    @classmethod
    def build(cls: type[Built], items: Any, *, store: str | None = None, **arguments: Any) -> Built:
        """Make an index.

        Args:
            items: texts, which need an encoder, or the vectors of each entry: a memory (n, m, e), whose mask says which
                are real, a tensor (n, m, e), or a list of tensors or arrays (m, e).
            store: "exact" (the default), "flat", "hnsw", "ivf", "ivfpq", or one that was registered and holds tokens.
            **arguments: `encoder`, `ids`, `texts`, `metadata`, `metric` ("cosine" or "ip") and settings of the store,
                as for `Index.build`.

        Raises:
            ShapeError: an entry without a vector, or of another shape.
            ConfigError: a store that holds no encoded tokens. Else what `Index.build` raises.
        """
        found = find_store(store or cls.default_store)
        if found is not None:  # else `Index.build` says so
            _refuse_without_tokens(found)
        return super().build(items, store=store, **arguments)

    def search(
        self,
        queries: Any,
        top_k: int,
        *,
        score_threshold: float | None = None,
        filter: Filter | None = None,
        encoder: Encoder | None = None,
        num_candidates: int | None = None,
    ) -> Hits:
        """The entries that fit best.

        Args:
            queries: texts, or the vectors of each query: a memory (b, l, e), a tensor (b, l, e) or (l, e), or a list of
                tensors or arrays (l, e).
            top_k: how many entries k per query; what the index does not have is masked.
            score_threshold: entries of a lower score are masked.
            filter: as for `Index.search`.
            encoder: what encoded, or shall encode, the queries, by its `encode_query` where it has one.
            num_candidates: how many entries are scored for each query, at least `top_k`: those whose mean vectors are
                nearest to that of the query, and what else the store proposes with them. By default all.

        Returns:
            Hits (b, k), without vectors, with tokens. Their scores carry gradients to queries that want them.

        Raises:
            ConfigError: fewer candidates than `top_k`. Else what `Index.search` raises.
        """
        check_int("top_k", top_k)
        if num_candidates is not None:
            check_int("num_candidates", num_candidates, at_least=top_k)
        if score_threshold is not None:
            check_float("score_threshold", score_threshold)
        asked = self.space.query_parts(queries, encoder, self.device)
        with torch.autocast(self.device.type, enabled=False):
            with torch.no_grad():
                found = self._candidates(asked, check_filter(filter), num_candidates)
                tokens = found.entries.tokens or ()
                rows = best_entries(asked, tokens, found.rows, self.metric, top_k)
            scores = scores_of(asked, tokens, rows, self.metric)
        hits = hits_of_rows(found.entries, rows, None, scores, token_dim=self.dim)
        return hits if score_threshold is None else hits.above(score_threshold)

    def as_memory(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to be searched by attention, which compares one vector for each entry.

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
        while True:
            found = self.store.search(means, count, filter)
            if len(found.entries) <= count:
                return found
            count = len(found.entries)  # others were added meanwhile


def _refuse_without_tokens(store: type[VectorStore]) -> None:
    if not store.holds_tokens:
        raise ConfigError(
            f"the store {store.kind!r} holds one vector for each entry, and here entries have several: use one that "
            "holds encoded tokens, such as 'exact' or 'hnsw'"
        )
