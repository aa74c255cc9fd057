"""Chunks of documents, their neighbours among the chunks of other documents, and windows of text with both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

import mmattn
from mmattn.pipelines import read_passages, searchable

KINDS = ("neighbours", "continuations", "both")


@dataclass
class Passages:
    """Every chunk of s tokens of some documents, in order.

    Args:
        chunks: ids (s,) of each, the last of a document may be shorter. document: which each belongs to.
        vectors: (n, e) by which it is found. states: slots (r, e') of the chunk and then of what follows it, as
        `read_passages` gives them.
    """

    chunks: list[list[int]]
    document: list[int]
    texts: list[str]
    vectors: Tensor = field(default_factory=lambda: torch.empty(0))
    states: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.chunks)

    @classmethod
    def of(cls, documents: Sequence[str], tokenizer: Any, size: int) -> Passages:
        """Cut documents into chunks of `size` tokens."""
        made = cls([], [], [])
        for number, text in enumerate(documents):
            ids = tokenizer(text)["input_ids"]
            for start in range(0, len(ids), size):
                made.chunks.append(ids[start : start + size])
                made.document.append(number)
                made.texts.append(tokenizer.decode(ids[start : start + size]))
        return made

    def encode(self, finder: Any, lm: Any, layer: int, progress: bool) -> None:
        """Vectors to be found by, and states to be read."""
        self.vectors = finder.encode(list(map(searchable, self.texts)), batch_size=128, progress=progress).tokens[:, 0]
        self.states = read_passages(lm, [self.ids(row) for row in range(len(self))], layer)

    def index(self, finder: Any) -> mmattn.Index:
        """Every chunk with its ids and those of what follows it: what `mmattn ask` reads."""
        about = [{"ids": self.ids(row)} for row in range(len(self))]
        return mmattn.Index.build(self.vectors, encoder=finder, texts=self.texts, metadata=about)

    def ids(self, row: int) -> list[int]:
        """A chunk and what follows it."""
        after = self.following(row)
        return self.chunks[row] + ([] if after is None else self.chunks[after])

    def following(self, row: int) -> int | None:
        """The next chunk of the same document."""
        after = row + 1
        return after if after < len(self) and self.document[after] == self.document[row] else None

    def slots(self, row: int, kind: str) -> Tensor:
        """What is read of a found chunk: itself, what follows it, or both (r, e')."""
        size = len(self.chunks[row])
        return self.states[row][slice(size if kind == "continuations" else 0, size if kind == "neighbours" else None)]


def neighbours(asking: Passages, library: Passages, count: int, same: bool) -> list[list[int]]:
    """For each chunk of `asking` the nearest chunks of `library`; where both are the same, of other documents only."""
    index = mmattn.Index.build(library.vectors, metadata=[{"document": number} for number in library.document])
    found: list[list[int]] = []
    for number in sorted(set(asking.document)):
        rows = [row for row, own in enumerate(asking.document) if own == number]
        other = (lambda about, own=number: about["document"] != own) if same else None
        hits = index.search(asking.vectors[rows], count, filter=other)
        found += [[row for row in line if row is not None] for line in hits.ids]
    return found


@dataclass
class Window:
    """Some chunks of one document: ids, and for each chunk the chunks that were found with it."""

    ids: list[int]
    found: list[list[int]]


def windows(passages: Passages, found: Sequence[Sequence[int]], chunks: int) -> list[Window]:
    """Windows of at most `chunks` chunks, one after the other, none across documents."""
    made: list[Window] = []
    start = 0
    while start < len(passages):
        end = start
        while end < min(start + chunks, len(passages)) and passages.document[end] == passages.document[start]:
            end += 1
        ids = [token for row in range(start, end) for token in passages.chunks[row]]
        if len(ids) > 1:
            made.append(Window(ids, [list(found[row]) for row in range(start, end)]))
        start = end
    return made


def memory_of(
    part: Sequence[Window], library: Passages, kind: str, choose: Callable[[list[int]], list[int]]
) -> mmattn.Memory:
    """What the chunks of some windows found, as (b, m, e) with the chunk of each slot as its segment.

    Args:
        choose: the chunks to read, of those that were found.
    """
    rows = []
    for window in part:
        slots, segments = [library.states[0][:0]], [torch.zeros(1, 0, dtype=torch.long)]
        for chunk, found in enumerate(window.found):
            for row in choose(found):
                slots.append(library.slots(row, kind))
                segments.append(torch.full((1, len(slots[-1])), chunk))
        rows.append(mmattn.Memory(torch.cat(slots)[None], segments=torch.cat(segments, 1)))
    return mmattn.Memory.stack(rows)


def some_of(count: int, random: Random) -> Callable[[list[int]], list[int]]:
    """A choice of `count` chunks among those that were found, so that no chunk always reads the same."""
    return lambda found: found if len(found) <= count else random.sample(found, count)


def found_by_nobody(count: int, library: Passages, random: Random) -> Callable[[list[int]], list[int]]:
    """A choice of chunks that nobody found: the control."""
    return lambda found: [random.randrange(len(library)) for _ in found[:count]]
