"""What an index of many vectors per entry compares: the way in for entries and queries of several vectors, checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from mmattn.errors import ConfigError, ShapeError, check_choice
from mmattn.memory import Memory
from mmattn.retrieval.embedding_space import EmbeddingSpace, Encoder, are_texts, as_numbers, as_vectors, check_vectors
from mmattn.retrieval.maxsim import mean_vectors


class MultiVectorSpace(EmbeddingSpace):
    """Vectors of one width, metric and encoder, several for each entry and query."""

    metrics: ClassVar[tuple[str, ...]] = ("cosine", "ip")

    @classmethod
    def first(cls, items: Any, encoder: Encoder | None, metric: str) -> tuple[EmbeddingSpace, Any]:
        """The space of a new index, and its first items: as they are where an encoder is given, else vectors.

        Args:
            items: texts or vectors.
            encoder: what encodes texts.
            metric: how vectors are compared.
        """
        check_choice("metric", metric, cls.metrics)
        if encoder is not None or are_texts(items):
            return super().first(items, encoder, metric)
        parts = as_parts("vectors", items)
        return cls(parts[0].shape[1] if parts else _width(items), metric), parts

    def entries(
        self, items: Any, texts: Iterable[str | None] | None
    ) -> tuple[dict[str, Any], Iterable[str | None] | None]:
        """The columns that are computed of the items of new entries, checked, and their texts where there are any.

        Args:
            items: texts or vectors.
            texts: the texts, where items are vectors.

        Returns:
            "tokens", the vectors (m, e) of each entry, and "vectors" (n, e), their means; and the texts.
        """
        items, texts = self.encoded(items, texts)
        parts = [part.detach().to("cpu", copy=True) for part in self._checked("vectors", items, False)]
        means = mean_vectors(parts, self.metric) if parts else torch.empty(0, self.dim)
        return {"vectors": means, "tokens": tuple(parts)}, texts

    def tokens(self, tokens: Memory, count: int) -> NoReturn:
        """Refuse encoded tokens beside the vectors.

        Args:
            tokens: as given.
            count: how many entries there are.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "tokens= is for entries of one vector; here the vectors of an entry are its encoded tokens: leave it out"
        )

    def query_parts(self, given: Any, encoder: Encoder | None, device: torch.device) -> list[Tensor]:
        """The vectors (l, e) of each query, checked; gradients reach the ones that were given.

        Args:
            given: texts or vectors.
            encoder: what encodes texts; by default the one of this space.
            device: where the vectors are wanted.
        """
        parts = self._checked("queries", self.encoded_queries(given, encoder), True)
        return [part.to(device) for part in parts]

    def _checked(self, what: str, given: Any, single: bool) -> list[Tensor]:
        parts = [as_vectors(what, part, dim=self.dim) for part in as_parts(what, given, single=single)]
        for number, part in enumerate(parts):
            check_vectors(f"{what}, number {number}", part, self.metric)
        return parts


def as_parts(what: str, given: Any, *, single: bool = False) -> list[Tensor]:
    """The vectors (m, e) of each row of a memory, a tensor (n, m, e), an array, or a list of such (m, e).

    Args:
        what: their name in messages.
        given: what was given.
        single: whether (m, e) stands for a batch of one.

    Raises:
        ShapeError: no numbers, another shape, or a row without a vector.
    """
    if isinstance(given, Memory):
        parts = [row[real] for row, real in zip(given.tokens, given.real_slots(), strict=True)]
    else:
        if hasattr(given, "__array__"):
            given = as_numbers(f"{what} must be numbers (n, m, e)", given)
        try:
            parts = [as_numbers(f"{what} must be numbers (m, e) each", part) for part in given]
        except TypeError as error:
            raise ShapeError(f"{what} must be numbers (m, e) each, got {type(given).__name__}: {error}") from error
        if single and parts and all(part.dim() == 1 for part in parts):
            parts = [torch.stack(parts)]
    for number, part in enumerate(parts):
        if part.dim() != 2:
            raise ShapeError(
                f"{what} must be a memory, a tensor (n, m, e) or a list of tensors (m, e), where each has m vectors; "
                f"number {number} is {tuple(part.shape)}. Entries of one vector are what Index holds"
            )
        if not len(part):
            raise ShapeError(f"{what}: number {number} has no vector, so nothing can be compared; leave it out")
    return parts


def _width(given: Any) -> int:
    """The width of no rows."""
    shape = tuple(given.tokens.shape if isinstance(given, Memory) else getattr(given, "shape", ()))
    if len(shape) != 3:
        raise ShapeError("an index of no entries needs their width: give torch.empty(0, m, e), or an encoder")
    return int(shape[2])
