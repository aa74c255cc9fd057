"""What an index compares: vectors of one width, metric and encoder; the way in for entries and queries, checked."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexMismatchError, NonFiniteError, ShapeError, TextError, check_choice
from mmattn.memory import Memory
from mmattn.retrieval.entries import Id
from mmattn.retrieval.entry_checks import check_ids, check_metadata, check_texts, check_tokens
from mmattn.retrieval.scoring import METRICS, lengths_of

#: Products of two such vectors still fit into float32.
LARGEST = 1e18


class Encoder(Protocol):
    """What computes the vectors of texts: any object with these three.

    Where it encodes queries in another way than entries, it also has `encode_query(texts) -> Memory`.
    """

    @property
    def dim(self) -> int:
        """Width e of its vectors."""

    @property
    def fingerprint(self) -> str:
        """What tells its vectors from those of every other encoder."""

    def encode(self, texts: list[str]) -> Memory:
        """The memory of texts: one row each, of one slot; of a slot for each token where an entry has many vectors."""


@dataclass(frozen=True)
class EmbeddingSpace:
    """What the vectors of an index have in common.

    Attributes:
        dim: width e.
        metric: how they are compared.
        encoder: what encodes texts; None where texts cannot be given.
        fingerprint: of the encoder the entries came from; None where nobody said.
    """

    dim: int
    metric: str
    encoder: Encoder | None = None
    fingerprint: str | None = None

    metrics: ClassVar[tuple[str, ...]] = METRICS

    @classmethod
    def of(cls, encoder: Encoder, metric: str) -> EmbeddingSpace:
        """The space of the vectors of an encoder.

        Args:
            encoder: the encoder.
            metric: how its vectors are compared.

        Raises:
            ConfigError: it is no encoder.
        """
        _check_encoder(encoder)
        return cls(encoder.dim, metric, encoder, encoder.fingerprint)

    @classmethod
    def first(cls, items: Any, encoder: Encoder | None, metric: str) -> tuple[EmbeddingSpace, Any]:
        """The space of a new index, and its first items: as they are where an encoder is given, else vectors.

        Args:
            items: texts or vectors.
            encoder: what encodes texts.
            metric: how vectors are compared.

        Raises:
            ConfigError: texts without an encoder, no encoder, or an unknown metric.
            ShapeError: no vectors (b, e).
        """
        check_choice("metric", metric, cls.metrics)
        if encoder is not None:
            return cls.of(encoder, metric), items
        if are_texts(items):
            raise ConfigError("texts need an encoder: give encoder=, or vectors as items and these as texts=")
        vectors = as_vectors("vectors", items)
        return cls(vectors.shape[1], metric), vectors

    def joined(self, encoder: Encoder) -> EmbeddingSpace:
        """The same space with its encoder.

        Args:
            encoder: the encoder that the vectors came from.

        Raises:
            IndexMismatchError: it is another encoder.
        """
        self.check(encoder)
        return replace(self, encoder=encoder, fingerprint=encoder.fingerprint)

    def check(self, encoder: Encoder) -> None:
        """Refuse an encoder whose vectors are of another space.

        Raises:
            IndexMismatchError: its fingerprint or its width is another.
        """
        _check_encoder(encoder)
        if encoder.dim != self.dim:
            raise IndexMismatchError(f"the encoder has width {encoder.dim} and the index has width {self.dim}")
        if self.fingerprint is not None and encoder.fingerprint != self.fingerprint:
            raise IndexMismatchError(
                f"the entries were encoded by {self.fingerprint[:16]}…, and this encoder is "
                f"{encoder.fingerprint[:16]}… (another one, or its weights have changed): their vectors cannot be "
                "compared. Use the encoder of the index, or build the index again with this one"
            )

    def entries(
        self, items: Any, texts: Iterable[str | None] | None
    ) -> tuple[dict[str, Any], Iterable[str | None] | None]:
        """The columns that are computed of the items of new entries, checked, and their texts where there are any.

        Args:
            items: texts or vectors.
            texts: the texts, where items are vectors.

        Returns:
            "vectors" (n, e) float32, a copy on the CPU, and the texts.
        """
        items, texts = self.encoded(items, texts)
        if isinstance(items, (list, tuple)) and not items:
            items = torch.empty(0, self.dim)
        vectors = as_vectors("vectors", items, dim=self.dim).detach()
        check_vectors("vectors", vectors, self.metric)
        return {"vectors": vectors.to("cpu", copy=True)}, texts

    def tokens(self, tokens: Memory, count: int) -> tuple[Tensor, ...]:
        """The encoded tokens that were given beside items, checked and copied to the CPU.

        Args:
            tokens: one row for each entry.
            count: how many entries there are.
        """
        return check_tokens(tokens, count)

    def columns(
        self,
        items: Any,
        ids: Iterable[Id] | None,
        texts: Iterable[str | None] | None,
        metadata: Iterable[Any] | None,
        tokens: Memory | None,
    ) -> dict[str, Any]:
        """The columns of new entries, checked and copied to the CPU; ids are None where they are to be numbered.

        Args:
            items: texts or vectors.
            ids: one for each, no two the same.
            texts: one for each, where items are vectors.
            metadata: a JSON value for each.
            tokens: one row for each.
        """
        computed, texts = self.entries(items, texts)
        count = len(computed["vectors"])
        given = {
            "ids": None if ids is None else check_ids(ids, count),
            "texts": (None,) * count if texts is None else check_texts(texts, count, optional=True),
            "metadata": (None,) * count if metadata is None else check_metadata(metadata, count),
            "tokens": None if tokens is None else self.tokens(tokens, count),
        }
        return given | computed

    def queries(self, given: Any, encoder: Encoder | None, device: torch.device) -> Tensor:
        """The vectors (b, e) of queries, checked; gradients reach the ones that were given.

        Args:
            given: texts or vectors.
            encoder: what encodes texts; by default the one of this space.
            device: where the vectors are wanted.
        """
        given = self.encoded_queries(given, encoder)
        queries = as_vectors("queries", given, dim=self.dim, single=True).to(device)
        check_vectors("queries", queries, self.metric)
        return queries

    def encoded(self, items: Any, texts: Iterable[str | None] | None) -> tuple[Any, Iterable[str | None] | None]:
        """Items, encoded where they are texts, and their texts where there are any.

        Args:
            items: texts or vectors.
            texts: the texts, where items are vectors.
        """
        if not are_texts(items):
            return items, texts
        if texts is not None:
            raise ConfigError("texts= is for items that are vectors; these items are texts themselves")
        texts = check_texts([items] if isinstance(items, str) else items)
        return self._encode(list(texts), self.encoder), texts

    def encoded_queries(self, given: Any, encoder: Encoder | None) -> Any:
        """Queries, encoded where they are texts.

        Args:
            given: texts or vectors.
            encoder: what encodes texts; by default the one of this space.
        """
        if encoder is not None:
            self.check(encoder)
        if not are_texts(given):
            return given
        texts = check_texts([given] if isinstance(given, str) else given)
        for number, text in enumerate(texts):
            if not (text or "").strip():
                raise TextError(f"query {number} is empty: it would find anything; leave it out")
        return self._encode(list(texts), encoder or self.encoder, "encode_query")

    def _encode(self, texts: list[Any], encoder: Encoder | None, verb: str = "encode") -> Memory:
        if encoder is None:
            raise ConfigError(
                "texts need an encoder, and this index has none: give encoder= when building or opening it, or vectors"
            )
        self.check(encoder)  # again: its weights may have changed since
        memory = getattr(encoder, verb, encoder.encode)(texts)
        if not isinstance(memory, Memory) or memory.batch != len(texts):
            raise ShapeError(f"the encoder must give a Memory with one row per text, {len(texts)}; got {memory!r:.200}")
        return memory


def are_texts(items: object) -> bool:
    """Whether items are texts, and not vectors."""
    return isinstance(items, str) or (
        isinstance(items, (list, tuple)) and any(isinstance(item, (str, bytes)) for item in items)
    )


def _check_encoder(encoder: Encoder) -> None:
    lacks = [name for name in ("encode", "dim", "fingerprint") if not hasattr(encoder, name)]
    if lacks:
        raise ConfigError(
            f"an encoder has encode(texts) -> Memory, dim and fingerprint; {type(encoder).__name__} lacks "
            f"{', '.join(lacks)}"
        )


def as_vectors(what: str, given: Any, *, dim: int | None = None, single: bool = False) -> Tensor:
    """Vectors (b, e) in float32 of a tensor, an array, lists of numbers, or a memory with one slot per row.

    Args:
        what: their name in messages.
        given: what was given.
        dim: the width e they must have; None takes any.
        single: whether one vector (e,) stands for a batch of one.

    Raises:
        ShapeError: no numbers, or not (b, e).
        IndexMismatchError: another width.
    """
    if isinstance(given, Memory):
        if given.length != 1 or not all(given.lengths):
            raise ShapeError(
                f"{what} must have one real slot per row to be compared, got {given!r}: use an encoder that pools, and "
                "give memories of several slots as tokens=, beside the vectors"
            )
        given = given.tokens[:, 0]
    vectors = as_numbers(f"{what} must be numbers (b, e)", given)
    if vectors.dtype == torch.bool or vectors.is_complex():
        raise ShapeError(f"{what} must be real numbers, got {vectors.dtype}")
    if single and vectors.dim() == 1:
        vectors = vectors[None]
    if vectors.dim() != 2:
        hint = "; for one vector give vector[None], for none torch.empty(0, e)" if vectors.dim() == 1 else ""
        raise ShapeError(f"{what} must be (b, e), got {tuple(vectors.shape)}{hint}")
    if dim is not None and vectors.shape[1] != dim:
        raise IndexMismatchError(
            f"{what} have width {vectors.shape[1]} and the index has width {dim}: they come from another encoder, or "
            "were cut; encode them as the entries of the index were encoded"
        )
    return vectors.float()


def as_numbers(what: str, given: Any) -> Tensor:
    """A tensor of whatever has numbers: a tensor, an array of any layout and byte order, a table, or lists of these.

    Args:
        what: what is wanted, in messages.
        given: what was given.

    Raises:
        ShapeError: no numbers, rows of different lengths, or an array with masked values.
    """
    try:
        if isinstance(given, (list, tuple)) and any(hasattr(one, "shape") and len(one.shape) for one in given):
            return torch.stack([as_numbers(what, one) for one in given])
        if isinstance(given, Tensor) or not hasattr(given, "__array__"):
            return torch.as_tensor(given)
        numpy = importlib.import_module("numpy")
        if numpy.ma.is_masked(given):
            raise ValueError("some of its values are masked, and every number counts; fill them, or leave the rows out")
        array = numpy.asarray(given)
        kind = numpy.float64 if array.dtype == numpy.longdouble else array.dtype.newbyteorder("=")
        return torch.from_numpy(numpy.array(array, dtype=kind, order="C"))
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ShapeError):
            raise
        raise ShapeError(f"{what}, got {type(given).__name__}: {error}") from error


def check_vectors(what: str, vectors: Tensor, metric: str) -> None:
    """Refuse vectors that cannot be compared.

    Args:
        what: their name in messages.
        vectors: (b, e).
        metric: how they are to be compared.

    Raises:
        NonFiniteError: NaN or infinity, or too large for products in float32, naming the first such row.
        ShapeError: a vector of zeros, which has no direction, under the cosine.
    """
    lengths = lengths_of(vectors.detach())
    wrong = ~(lengths <= LARGEST)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        fault = (
            f"is {float(lengths[row]):.1e} long, and its products do not fit into float32"
            if vectors[row].isfinite().all()
            else "has NaN or infinite values (in float32)"
        )
        raise NonFiniteError(f"{what}: row {row} {fault}; repair it or leave it out. Nothing was changed")
    if metric == "cosine" and (lengths == 0).any():
        row = int((lengths == 0).nonzero()[0])
        raise ShapeError(
            f"{what}: row {row} is all zeros, which has no direction for metric 'cosine'; leave it out, or use 'ip' or "
            "'l2'. Nothing was changed"
        )
