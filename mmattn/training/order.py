"""In which order rows are learned: batches of like length, a function of seed and epoch, the same for any processes.

A batch is what one step of the optimiser learns from, however many processes and pieces it is cut into (`share`), so
that neither changes what is learned. A run taken up again begins an epoch at the batch where it stopped.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from mmattn.errors import ConfigError, check_int
from mmattn.training.rows import Row
from mmattn.training.sources import DatasetRows, Rows, StreamRows

BUCKET = 50
"""Batches whose rows are sorted by length together: enough for little padding, few enough to stay random."""

T = TypeVar("T")


class LengthOrder:
    """Numbers of rows, once each in an epoch, rows of like length near each other: a sampler for any data loader.

    Args:
        lengths: of each row. batch: how many are learned at once. seed: of the order; so is `set_epoch`.

    >>> order = LengthOrder([5, 900, 7, 800], batch=2, seed=3)
    >>> sorted(map(sorted, order.batches(0)))
    [[0, 2], [1, 3]]
    """

    def __init__(self, lengths: Sequence[int], batch: int, seed: int = 0) -> None:
        if not len(lengths):
            raise ConfigError("there are no rows to put into an order")
        self.lengths, self.batch = list(lengths), check_int("batch", batch)
        self.seed, self.epoch = check_int("seed", seed, at_least=0), 0

    def batches(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch; the last one is shorter where rows do not divide evenly."""
        rng = random.Random(f"order/{self.seed}/{epoch}")
        numbers = list(range(len(self.lengths)))
        rng.shuffle(numbers)
        size = BUCKET * self.batch
        blocks = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        return [part for block in blocks for part in _cut(block, [self.lengths[i] for i in block], self.batch, rng)]

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self.batches(self.epoch))

    def __len__(self) -> int:
        return len(self.lengths)


class RowBatches:
    """Batches of rows, epoch by epoch.

    Args:
        rows: a sequence, or a stream: then rows of a block of it are shuffled and sorted among each other.
        batch: rows in a batch, over all processes. seed: of the order.
    """

    def __init__(self, rows: Rows, batch: int, seed: int = 0) -> None:
        self.rows, self.batch, self.seed = rows, check_int("batch", batch), check_int("seed", seed, at_least=0)
        self.order = None if isinstance(rows, StreamRows) else LengthOrder(row_letters(rows), batch, seed)

    @property
    def per_epoch(self) -> int | None:
        """Batches in an epoch; None for a stream."""
        return None if self.order is None else -(-len(self.order) // self.batch)

    def epoch(self, number: int, start: int = 0) -> Iterator[list[Row]]:
        """The batches of an epoch, from batch `start` on."""
        if self.order is not None:
            rows: Any = self.rows
            for numbers in self.order.batches(number)[start:]:
                yield [rows[i] for i in numbers]
            return
        stream = iter(self.rows)
        for block in itertools.count():
            taken = list(itertools.islice(stream, BUCKET * self.batch))
            if not taken:
                return
            rng = random.Random(f"order/{self.seed}/{number}/{block}")
            rng.shuffle(taken)
            parts = _cut(taken, [row.letters for row in taken], self.batch, rng)
            yield from parts[max(0, start - block * BUCKET) :]


def row_letters(rows: Sequence[Row]) -> list[int]:
    """How long the texts of each row are."""
    return rows.letters() if isinstance(rows, DatasetRows) else [row.letters for row in rows]


def share(batch: Sequence[T], rank: int = 0, processes: int = 1, pieces: int = 1) -> list[list[T]]:
    """What one of several processes learns of a batch, in so many pieces one after another; a piece may be empty.

    >>> share([0, 1, 2, 3, 4], rank=1, processes=2, pieces=2)
    [[1], [3]]
    """
    own = list(batch)[rank::processes]
    return [own[piece::pieces] for piece in range(pieces)]


def seed_of(*parts: Any) -> int:
    """A seed made of what it is for.

    >>> seed_of(0, "step", 3) == seed_of(0, "step", 3), seed_of(0, "step", 3) == seed_of(0, "step", 4)
    (True, False)
    """
    return random.Random("/".join(map(str, parts))).getrandbits(63)


def _cut(block: Sequence[T], lengths: Sequence[int], batch: int, rng: random.Random) -> list[list[T]]:
    """Batches of like length in any order, and what is left over from them at the end."""
    whole = len(block) // batch * batch
    ordered = [block[i] for i in sorted(range(whole), key=lambda i: lengths[i])]
    parts = [ordered[start : start + batch] for start in range(0, whole, batch)]
    rng.shuffle(parts)
    return parts + ([list(block[whole:])] if whole < len(block) else [])
