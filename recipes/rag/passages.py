"""Chunks of documents, their neighbours among the chunks of other documents, and windows of text with both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

import mmattn

KINDS = ("neighbours", "continuations", "both")


@dataclass
class Passages:
    """Every chunk of s tokens of some documents, in order.

    Args:
        chunks: ids (s,) of each, the last of a document may be shorter. document: which each belongs to.
        vectors: (n, e) by which it is found. states: its encoded tokens (r, e').
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

    def encode(self, finder: Any, reader: Any, progress: bool) -> None:
        """Vectors to be found by, and states to be read; a text of blanks alone is as good as a full stop."""
        texts = [text if text.strip() else "." for text in self.texts]
        self.vectors = finder.encode(texts, batch_size=128, progress=progress).tokens[:, 0]
        read = reader.encode(texts, batch_size=128, progress=progress)
        self.states = [tokens[: int(length)] for tokens, length in zip(read.tokens, read.lengths, strict=True)]

    def index(self, finder: Any) -> mmattn.Index:
        """Every chunk as a text with what follows it: what `mmattn ask` reads."""
        after = [self.following(row) for row in range(len(self))]
        about = [{} if row is None else {"following": self.texts[row]} for row in after]
        return mmattn.Index.build(self.vectors, encoder=finder, texts=self.texts, metadata=about)

    def following(self, row: int) -> int | None:
        """The next chunk of the same document."""
        after = row + 1
        return after if after < len(self) and self.document[after] == self.document[row] else None

    def slots(self, row: int, kind: str) -> Tensor:
        """What is read of a found chunk: itself, what follows it, or both (r, e')."""
        after = self.following(row)
        parts = [self.states[row]] if kind != "continuations" else []
        parts += [self.states[after]] if kind != "neighbours" and after is not None else []
        return torch.cat(parts) if parts else self.states[row][:0]


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
    """Windows of at most `chunks` chunks, one behind the other, none across documents."""
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


def memory_of(part: Sequence[Window], library: Passages, kind: str, random: Random | None = None) -> mmattn.Memory:
    """What the chunks of some windows found, as (b, m, e) with the chunk of each slot as its segment.

    Args:
        random: exchange every found chunk for one found by nobody.
    """
    rows = []
    for window in part:
        slots, segments = [], []
        for chunk, found in enumerate(window.found):
            for row in found:
                read = library.slots(row if random is None else random.randrange(len(library)), kind)
                slots.append(read)
                segments.append(torch.full((1, len(read)), chunk))
        tokens = torch.cat(slots)[None]
        rows.append(mmattn.Memory(tokens, segments=torch.cat(segments, 1)))
    return mmattn.Memory.stack(rows)
