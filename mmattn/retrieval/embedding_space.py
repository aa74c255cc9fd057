"""The vectors that an index compares: one width, metric and encoder, and the checks of items and queries."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from mmattn.errors import ConfigError, IndexMismatchError, ShapeError, TextError, check_choice
from mmattn.memory import Memory
from mmattn.retrieval.entries import Columns, check_metadata, check_texts, check_tokens
from mmattn.retrieval.scoring import METRICS, check_vectors
from mmattn.tokenization import check_text


class Encoder(Protocol):
    """Encodes texts to vectors.

    An encoder that encodes queries in another way than entries also has `encode_query(texts) -> Memory`, and one that
    encodes entries in another way than texts `encode_document(texts) -> Memory`.
    """

    @property
    def dim(self) -> int:
        """Width e of the vectors."""

    @property
    def fingerprint(self) -> str:
        """Identifies the encoder and its weights."""

    def encode(self, texts: list[str], *, batch_size: int = ...) -> Memory:
        """Return a memory of one row per text, with one slot."""


@dataclass(frozen=True)
class EmbeddingSpace:
    """Width, metric and encoder that the vectors of an index have in common."""

    dim: int
    metric: str
    encoder: Encoder | None = None
    fingerprint: str | None = None  # of the encoder of the entries; None where it is unknown

    @classmethod
    def of_items(cls, items: object, encoder: Encoder | None, metric: str) -> tuple[EmbeddingSpace, object]:
        """Return the space of a new index, and its items: unchanged with an encoder, otherwise as vectors."""
        check_choice("metric", metric, METRICS)
        if encoder is not None:
            return cls(encoder.dim, metric, encoder, encoder.fingerprint), items
        if are_texts(items):
            raise ConfigError("texts need an encoder: give encoder=, or vectors as items and these as texts=")
        vectors = as_vectors("vectors", items)
        return cls(vectors.shape[1], metric), vectors

    def with_encoder(self, encoder: Encoder) -> EmbeddingSpace:
        """Return the space with the encoder of its vectors."""
        self.check(encoder)
        return replace(self, encoder=encoder, fingerprint=encoder.fingerprint)

    def check(self, encoder: Encoder) -> None:
        """Refuse an encoder of another width or fingerprint."""
        if encoder.dim != self.dim:
            raise IndexMismatchError(f"the encoder has width {encoder.dim} and the index has width {self.dim}")
        if self.fingerprint is not None and encoder.fingerprint != self.fingerprint:
            raise IndexMismatchError(
                f"the entries were encoded by {self.fingerprint[:16]}…, and this encoder is "
                f"{encoder.fingerprint[:16]}… (another encoder, or its weights have changed). Use the encoder of the "
                "index, or build the index again"
            )

    def columns(
        self,
        items: object,
        texts: Iterable[str | None] | None,
        metadata: Iterable[object] | None,
        tokens: Memory | None,
        count: int | None = None,
    ) -> Columns:
        """Return the columns that are given of `count` entries, checked and copied to the CPU."""
        columns: Columns = {}
        if items is not None:
            if are_texts(items):
                if texts is not None:
                    raise ConfigError("texts= is for items that are vectors; these items are texts themselves")
                new = check_text(items)
                columns["texts"] = tuple(new)
                items = self._encode(new)
            if isinstance(items, (list, tuple)) and not items:
                items = torch.empty(0, self.dim)
            vectors = as_vectors("vectors", items, dim=self.dim).detach()
            check_vectors("vectors", vectors, self.metric)
            columns["vectors"], rows = vectors.to("cpu", copy=True), len(vectors)
            if count not in (None, rows):
                raise IndexMismatchError(f"each entry needs one item: got {rows} items for {count} ids")
            count = rows
        assert count is not None
        if texts is not None:
            columns["texts"] = check_texts(texts, count)
        if metadata is not None:
            columns["metadata"] = check_metadata(metadata, count)
        if tokens is not None:
            columns["tokens"] = check_tokens(tokens, count)
        return columns

    def queries(self, queries: object, device: torch.device) -> Tensor:
        """Return the vectors (b, e) of queries, checked; gradients reach vectors that are given."""
        if are_texts(queries):
            texts = check_text(queries)
            for number, text in enumerate(texts):
                if not text.strip():
                    raise TextError(f"query {number} is empty: it would find anything; leave it out")
            queries = self._encode(texts, "encode_query")
        vectors = as_vectors("queries", queries, dim=self.dim, single=True).to(device)
        check_vectors("queries", vectors, self.metric)
        return vectors

    def _encode(self, texts: list[str], verb: str = "encode_document") -> Memory:
        if (encoder := self.encoder) is None:
            raise ConfigError(
                "texts need an encoder, and this index has none: give encoder= when building or opening it, or vectors"
            )
        self.check(encoder)  # its weights may have changed since it was given
        memory = getattr(encoder, verb, encoder.encode)(texts)
        if not isinstance(memory, Memory) or memory.batch != len(texts):
            raise ShapeError(f"the encoder must give a Memory with one row per text, {len(texts)}; got {memory!r:.200}")
        return memory


def are_texts(items: object) -> TypeGuard[str | list[str]]:
    """Tell texts from vectors."""
    return isinstance(items, str) or (
        isinstance(items, (list, tuple)) and any(isinstance(item, (str, bytes)) for item in items)
    )


def as_vectors(what: str, values: object, *, dim: int | None = None, single: bool = False) -> Tensor:
    """Return float32 vectors (b, e) of a tensor, array, lists of numbers, or memory with one slot per row.

    `what` names them in messages; `dim` is the width they must have; with `single`, (e,) is a batch of one.
    """
    if isinstance(values, Memory):
        if values.length != 1 or not all(values.lengths):
            raise ShapeError(
                f"{what} must have one real slot per row to be compared, got {values!r}: use an encoder that pools, "
                "and give memories of several slots as tokens=, beside the vectors"
            )
        values = values.tokens[:, 0]
    if isinstance(values, (list, tuple)) and any(isinstance(row, dict) for row in values):
        raise ShapeError(f"{what} are dicts: give their texts, [row['text'] for row in rows], and metadata=rows")
    vectors = as_numbers(f"{what} must be numbers (b, e)", values)
    if vectors.dtype == torch.bool or vectors.is_complex():
        raise ShapeError(f"{what} must be real numbers, got {vectors.dtype}")
    if single and vectors.dim() == 1:
        vectors = vectors[None]
    if vectors.dim() != 2:
        hint = "; for one vector give vector[None], for none torch.empty(0, e)" if vectors.dim() == 1 else ""
        raise ShapeError(f"{what} must be (b, e), got {tuple(vectors.shape)}{hint}")
    if dim is not None and vectors.shape[1] != dim:
        raise IndexMismatchError(
            f"{what} have width {vectors.shape[1]} and the index has width {dim}: encode them as the entries of the "
            "index were encoded"
        )
    return vectors.float()


def as_numbers(what: str, values: object) -> Tensor:
    """Return a tensor of a tensor, an array of any layout and byte order, a table, or lists of these."""
    try:
        if isinstance(values, (list, tuple)) and any(hasattr(row, "shape") and len(row.shape) for row in values):
            return torch.stack([as_numbers(what, row) for row in values])
        if isinstance(values, Tensor) or not hasattr(values, "__array__"):
            return torch.as_tensor(values)
        numpy = importlib.import_module("numpy")
        if numpy.ma.is_masked(values):
            raise ValueError("some of its values are masked; fill them, or leave the rows out")
        array = numpy.asarray(values)
        kind = numpy.float64 if array.dtype == numpy.longdouble else array.dtype.newbyteorder("=")
        return torch.from_numpy(numpy.array(array, dtype=kind, order="C"))
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ShapeError):
            raise
        raise ShapeError(f"{what}, got {type(values).__name__}: {error}") from error
