"""Rows with each other's memories: what a shuffled memory is worth, beside the own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

import torch

from mmattn.data.encoded_dataset import EncodedRow
from mmattn.data.rows import Row

_SHIFTS = 1000
"""Shifts that are tried, at most."""


class ShuffledMemories(Sequence[Row]):
    """Rows, each with the memory of another one; see `shuffle_memories`.

    Args:
        rows: as many, which are read when they are asked for.
        sources: for each row the number of the row whose memory it gets.
    """

    def __init__(self, rows: Sequence[Row], sources: Sequence[int]) -> None:
        self.rows, self.sources = rows, sources

    def __len__(self) -> int:
        return len(self.sources)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row, other = self.rows[index], self.rows[self.sources[index]]
        return replace(row, images=other.images, passages=other.passages, memory=other.memory)

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))


def shuffle_memories(rows: Sequence[Row]) -> Sequence[Row]:
    """Each row with the memory of another one that, where there is one, has another text and another memory.

    Rows without a memory stay as they are. The memories move by one number of rows, the smallest that leaves the fewest
    rows with their own text or memory: of class folders by as many as a class has, of pictures with five captions each
    by five.

    Args:
        rows: of any number.

    Returns:
        As many rows; none where fewer than two have a memory.

    >>> [row.passages for row in shuffle_memories([Row("a", passages=("x",)), Row("b"), Row("c", passages=("z",))])]
    [('z',), (), ('x',)]
    """
    having: list[int] = []
    texts, memories = _Numbers(), _Numbers()
    for number in range(len(rows)):
        row = rows[number]
        if row.has_memory:
            having.append(number)
            texts.add((row.prompt, row.text))
            memories.add(_memory_key(row, number))
    if len(having) < 2:
        return []
    kinds = [torch.tensor(one.numbers) for one in (texts, memories)]
    left_best, best = len(having) + 1, 1
    for shift in range(1, min(len(having) - 1, _SHIFTS) + 1):
        left = int(torch.stack([one == one.roll(-shift) for one in kinds]).any(0).sum())
        if left < left_best:
            left_best, best = left, shift
        if not left:
            break
    sources = list(range(len(rows)))
    for place, number in enumerate(having):
        sources[number] = having[(place + best) % len(having)]
    return ShuffledMemories(rows, sources)


class _Numbers:
    """Numbers that are equal where the things are."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}
        self.numbers: list[int] = []

    def add(self, thing: Any) -> None:
        self.numbers.append(self.known.setdefault(thing, len(self.known)))


def _memory_key(row: Row, number: int) -> Any:
    """What tells memories apart without encoding them: paths, contents and texts; anything else is one of its own."""

    def key(part: Any) -> Any:
        if isinstance(part, (bytes, bytearray)):
            return hashlib.sha256(part).digest()
        return part if isinstance(part, str) else number

    if isinstance(row, EncodedRow) and row.contents:
        return row.contents
    return (*map(key, row.images), row.passages, key(row.memory) if row.memory is not None else None)
