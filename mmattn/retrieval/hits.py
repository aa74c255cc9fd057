"""The hits of a search, the memory they become, and their reranking by models of sentence-transformers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mmattn.errors import (
    ConfigError,
    IndexMismatchError,
    NonFiniteError,
    ShapeError,
    check_bool_mask,
    check_float,
    check_int,
    import_extra,
)
from mmattn.memory import Memory
from mmattn.models.cache import resolve
from mmattn.models.loading import load_model, without_progress_bars
from mmattn.retrieval.entries import Entries, copied
from mmattn.tokenization import check_text, refuse_empty


class Hits:
    """The k best entries of each of b queries, best first; missing entries are masked.

    Args:
        scores: (b, k) float, higher is better; masked scores become -inf.
        mask: (b, k) bool, True = a hit; None: all are hits.
        vectors: (b, k, e) the vector of each entry; masked vectors become zeros.
        ids: k ids per query; masked ids become None, and so do masked texts, metadata and tokens.
        texts: k texts per query, None for an entry without a text.
        metadata: k JSON values per query.
        tokens: k tensors (m_i, e') per query, the encoded tokens of each entry.
        token_dim: width e' of the tokens, also of a memory without hits; by default the width of the first.

    Raises:
        ShapeError: sizes do not fit.
        MaskError: the mask is not bool.

    >>> hits = Hits(torch.tensor([[0.9, 0.2]]), vectors=torch.ones(1, 2, 3), ids=[["a", "b"]])
    >>> hits.above(0.5).ids, hits.memory()
    ([['a', None]], Memory(b=1, m=2, e=3, float32, segments, scores, sources))
    """

    __slots__ = ("ids", "mask", "metadata", "scores", "texts", "token_dim", "tokens", "vectors")

    def __init__(
        self,
        scores: Tensor,
        mask: Tensor | None = None,
        vectors: Tensor | None = None,
        ids: Sequence[Sequence[Any]] | None = None,
        texts: Sequence[Sequence[str | None]] | None = None,
        metadata: Sequence[Sequence[Any]] | None = None,
        tokens: Sequence[Sequence[Tensor | None]] | None = None,
        token_dim: int | None = None,
    ) -> None:
        self.mask = mask = _checked_mask(scores, mask, vectors)
        if not bool(mask.all()):
            scores = scores.masked_fill(~mask, -torch.inf)
            vectors = None if vectors is None else vectors.masked_fill(~mask[..., None], 0)
        self.scores, self.vectors = scores, vectors
        columns = {"ids": ids, "texts": texts, "metadata": metadata, "tokens": tokens}
        self.ids, self.texts, self.metadata, self.tokens = (_masked(*column, mask) for column in columns.items())
        widths = (part.shape[1] for row in self.tokens or () for part in row if part is not None)
        self.token_dim = next(widths, None) if token_dim is None else token_dim

    def __len__(self) -> int:
        return len(self.scores)

    def __repr__(self) -> str:
        return f"Hits(b={self.scores.shape[0]}, k={self.scores.shape[1]}, found={self.mask.sum(1).tolist()[:8]})"

    def above(self, score_threshold: float) -> Hits:
        """Return the hits, with hits below a score masked.

        Args:
            score_threshold: the lowest score that stays.

        Raises:
            ConfigError: the threshold is not a finite number.
        """
        return self._masked(self.scores.detach() >= check_float("score_threshold", score_threshold))

    def near_best(self, margin: float) -> Hits:
        """Return the hits, with hits masked whose score is lower than the best of their query by more than a margin.

        Args:
            margin: from 0.

        Raises:
            ConfigError: the margin is not a finite number from 0.
        """
        scores = self.scores.detach()
        return self._masked(scores >= scores[:, :1] - check_float("margin", margin, at_least=0))

    def first(self, count: int) -> Hits:
        """Return the first `count` hits of each query, or all if there are fewer.

        Args:
            count: number of hits.

        Raises:
            ConfigError: the count is not a positive int.
        """
        places = torch.arange(self.scores.shape[1], device=self.scores.device)[: check_int("count", count)]
        return self._reordered(self.scores, places.expand(len(self), -1))

    def rerank(self, queries: str | Iterable[str], model: Any, *, batch_size: int = 32) -> Hits:
        """Sort the hits by new scores: `index.search(q, 50).rerank(q, model).first(5)`.

        Masked hits stay masked and come last. The new scores carry no gradient. Longer texts than the model's limit are
        truncated, as in sentence-transformers.

        Args:
            queries: the text of the search, or b texts.
            model: a `sentence_transformers.CrossEncoder`, which reads each pair of query and text; or an encoder with a
                vector for each token, a `sentence_transformers.MultiVectorEncoder` or `TextEncoder(pooling="none")`,
                whose vectors are compared by MaxSim (late interaction). Encoded tokens of the hits are used as the
                vectors of their texts.
            batch_size: number of texts per batch of the model.

        Raises:
            ConfigError: a hit has no text, or the model does not give one score for each.
            IndexMismatchError: tokens and query differ in width.
            NonFiniteError: a score that is not finite.
            ShapeError: another number of queries.
            TextError: an empty query.
            MissingExtraError: sentence-transformers is not installed.
        """
        query_texts = check_text(queries)
        refuse_empty([len(query.strip()) for query in query_texts])
        if len(query_texts) != len(self):
            raise ShapeError(f"{len(self)} rows of hits need as many queries, got {len(query_texts)}")
        texts = self.texts or [[None] * self.scores.shape[1]] * len(self)
        scores = torch.full(self.scores.shape, -torch.inf)
        for row, real in enumerate(self.mask.tolist()):
            places = [place for place, there in enumerate(real) if there]
            for place in places:
                if texts[row][place] is None:
                    name = f"hit {place} of query {row}" if self.ids is None else f"the entry {self.ids[row][place]!r}"
                    raise ConfigError(f"reranking reads texts, and {name} has none; build the index with texts=")
            if places:
                tokens = None if self.tokens is None else [self.tokens[row][place] for place in places]
                new = text_scores(model, query_texts[row], [texts[row][place] for place in places], tokens, batch_size)
                scores[row, places] = new
        order = torch.argsort(scores, dim=1, descending=True, stable=True)
        return self._reordered(scores.to(self.scores.device), order.to(self.scores.device))

    def _masked(self, mask: Tensor) -> Hits:
        mask = self.mask & mask
        return Hits(self.scores, mask, self.vectors, self.ids, self.texts, self.metadata, self.tokens, self.token_dim)

    def _reordered(self, scores: Tensor, places: Tensor) -> Hits:
        """Return the hits at places (b, c), with new scores (b, k) of the old places."""
        lines = places.tolist()
        ids, texts, metadata, tokens = (
            values and [[row[place] for place in line] for row, line in zip(values, lines, strict=True)]
            for values in (self.ids, self.texts, self.metadata, self.tokens)
        )
        vectors = None if self.vectors is None else self.vectors.take_along_dim(places[..., None], 1)
        scores, mask = scores.gather(1, places), self.mask.gather(1, places)
        return Hits(scores, mask, vectors, ids, texts, metadata, tokens, self.token_dim)

    def memory(self, *, tokens: bool = False) -> Memory:
        """Return a memory of the hits: one slot per entry (b, k, e), or all encoded tokens of all entries (b, m, e').

        Masked hits become masked slots. A slot has the score of its hit (0 if masked), its rank as segment, and as
        source {"id": …, "text": …}, with tokens also {"slot": …} within the entry.

        Args:
            tokens: use the encoded tokens of each entry instead of its vector.

        Raises:
            ConfigError: these hits have no vectors, or no tokens.
        """
        if tokens:
            return self._token_memory()
        if self.vectors is None:
            raise ConfigError("these hits have no vectors, so they make no memory; give vectors (b, k, e) to Hits")
        ranks = torch.arange(self.scores.shape[1], device=self.scores.device).expand_as(self.scores)
        sources = [
            [self._source(i, j) if real else None for j, real in enumerate(row)]
            for i, row in enumerate(self.mask.tolist())
        ]
        mask = None if bool(self.mask.all()) else self.mask
        scores = self.scores.masked_fill(~self.mask, 0)
        return Memory(self.vectors, mask, ranks, scores, sources if self.ids is not None else None)

    def _token_memory(self) -> Memory:
        if self.tokens is None:
            raise ConfigError(
                "these hits have no encoded tokens; build the index with tokens=, a Memory with one row per entry"
            )
        if self.token_dim is None:
            raise ConfigError("no query found an entry, so the width of the tokens is unknown; use the vectors")
        device, empty = self.scores.device, torch.zeros(0, self.token_dim)
        rows = []
        for i, line in enumerate(self.tokens):
            parts = [(j, part) for j, part in enumerate(line) if part is not None]
            values = torch.cat([part for _, part in parts]) if parts else empty
            ranks = torch.tensor([j for j, part in parts for _ in range(len(part))], dtype=torch.long, device=device)
            source = [{**self._source(i, j), "slot": slot} for j, part in parts for slot in range(len(part))]
            rows.append(Memory(values.to(device)[None], None, ranks[None], self.scores[i][ranks][None], [source]))
        return Memory.stack(rows or [Memory(empty[None].to(device))[:0]])

    def _source(self, row: int, rank: int) -> dict[str, Any]:
        source = {} if self.ids is None else {"id": self.ids[row][rank]}
        return source if self.texts is None else {**source, "text": self.texts[row][rank]}


def hits_of_rows(entries: Entries, rows: Tensor, vectors: Tensor, scores: Tensor) -> Hits:
    """Return the hits of rows (b, k) of entries, -1 being none, with vectors (b, k, e) and scores (b, k)."""
    columns: list[Any] = [
        None
        if values is None
        else [[copied(values[row]) if row >= 0 else None for row in line] for line in rows.tolist()]
        for values in (entries.ids, entries.texts, entries.metadata, entries.tokens)
    ]
    return Hits(scores, rows >= 0, vectors, *columns)


def _checked_mask(scores: Tensor, mask: Tensor | None, vectors: Tensor | None) -> Tensor:
    """Refuse sizes that do not fit, and return the mask (b, k)."""
    if not isinstance(scores, Tensor) or scores.dim() != 2 or not scores.is_floating_point():
        raise ShapeError(f"scores must be a float tensor (b, k), got {_kind(scores)}")
    if mask is None:
        mask = torch.ones_like(scores, dtype=torch.bool)
    check_bool_mask("mask", mask)
    if mask.shape != scores.shape:
        raise ShapeError(f"mask must be (b, k) = {tuple(scores.shape)} as the scores are, got {tuple(mask.shape)}")
    if vectors is not None and (vectors.dim() != 3 or vectors.shape[:2] != scores.shape):
        raise ShapeError(f"vectors must be (b, k, e) with (b, k) = {tuple(scores.shape)}, got {_kind(vectors)}")
    return mask


def _masked(name: str, values: Sequence[Sequence[Any]] | None, mask: Tensor) -> list[list[Any]] | None:
    """Return one value per hit, None where the mask is False."""
    if values is None:
        return None
    lengths = [len(row) for row in values]
    if lengths != [mask.shape[1]] * mask.shape[0]:
        raise ShapeError(
            f"{name} need one value per hit, {mask.shape[0]} rows of {mask.shape[1]}; got rows of {lengths}"
        )
    return [
        [value if real else None for value, real in zip(row, line, strict=True)]
        for row, line in zip(values, mask.tolist(), strict=True)
    ]


def _kind(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def text_scores(model: Any, query: str, texts: list[str], tokens: Sequence[Tensor] | None, batch_size: int) -> Tensor:
    """Return the scores (n,) float32 of n texts: those of a cross-encoder, or MaxSim of token vectors.

    MaxSim (ColBERT, arXiv 2004.12832, equation 3) is the sum over the vectors of the query of the largest cosine with a
    vector of the text. `tokens`, n tensors (m, e), are the vectors of the texts, which are otherwise encoded.
    """
    library = import_extra("sentence_transformers", "multivector")
    if hasattr(model, "predict"):
        pairs = [(query, text) for text in texts]
        options = {"activation_fn": torch.nn.Identity(), "convert_to_tensor": True, "show_progress_bar": False}
        scores = model.predict(pairs, batch_size=batch_size, **options)
    else:
        (query_vectors,) = _token_vectors(model.encode_query([query]))
        if tokens is None:
            tokens = _token_vectors(model.encode_document(texts, batch_size=batch_size))
        if tokens[0].shape[1] != len(query_vectors[0]):
            raise IndexMismatchError(
                f"the query has vectors of width {len(query_vectors[0])} and the hits have tokens of width "
                f"{tokens[0].shape[1]}: use the encoder of the tokens"
            )
        scores = library.util.maxsim([normalize(query_vectors, dim=1)], [normalize(part, dim=1) for part in tokens])[0]
    if scores.shape != (len(texts),):
        raise ConfigError(f"a reranker gives each text one score; {len(texts)} texts got scores {tuple(scores.shape)}")
    scores = scores.float().cpu()
    if not scores.isfinite().all():
        place = int((~scores.isfinite()).nonzero()[0])
        raise NonFiniteError(f"the score of {texts[place]!r:.60} is {scores[place]}; load the model in float32")
    return scores


def load_cross_encoder(name: str | os.PathLike[str]) -> Any:
    """Load a `CrossEncoder` of sentence-transformers with one label, whose weights are complete and finite."""
    library, place = import_extra("sentence_transformers", "multivector"), os.fspath(resolve(name))
    # sentence-transformers itself starts missing weights at random.
    load_model("AutoModelForSequenceClassification", place, "cross-encoder")
    with without_progress_bars():
        return library.CrossEncoder(place, model_kwargs={"use_safetensors": True})


def _token_vectors(encoded: Memory | Sequence[Tensor]) -> list[Tensor]:
    """Return the vectors (m, e) of each text, of an encoder of mmattn or of sentence-transformers."""
    if not isinstance(encoded, Memory):
        return [vectors.float().cpu() for vectors in encoded]
    rows = zip(encoded.tokens.float().cpu(), encoded.real_slots().cpu(), strict=True)
    return [tokens[real] for tokens, real in rows]
