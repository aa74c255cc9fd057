"""Order and batches of rows: functions of seed and epoch, the same for any number of processes.

A batch is what one step of the optimizer learns from, however many processes and micro-batches it is split into
(`split_between_processes`), so that neither changes what is learned. A resumed run begins an epoch at the batch where
it stopped.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from mmattn.data.readers import Rows
from mmattn.data.rows import Row, Values
from mmattn.errors import ConfigError, check_int

BUCKET = 50
"""Batches whose rows are sorted by length together: enough for little padding, few enough to stay random."""

T = TypeVar("T")


class LengthGroupedSampler:
    """A sampler for a data loader: every row once an epoch in random order, rows of like length in one batch.

    Args:
        lengths: of each row.
        batch_size: rows per batch.
        seed: of the order.

    Raises:
        ConfigError: no rows, or a batch size below 1.

    >>> sampler = LengthGroupedSampler([5, 900, 7, 800], batch_size=2, seed=3)
    >>> sorted(map(sorted, sampler.batches(0)))
    [[0, 2], [1, 3]]
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int = 0) -> None:
        if not len(lengths):
            raise ConfigError("there are no rows to put into an order")
        self.lengths, self.batch_size = list(lengths), check_int("batch_size", batch_size)
        self.seed, self.epoch = check_int("seed", seed, at_least=0), 0

    def batches(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch; the last one is shorter where rows do not divide evenly."""
        rng = random.Random(f"order/{self.seed}/{epoch}")
        return batches_by_length(range(len(self.lengths)), self.lengths.__getitem__, self.batch_size, rng)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self.batches(self.epoch))

    def __len__(self) -> int:
        return len(self.lengths)


class PairSampler:
    """Pairs of an item and one of its texts, every item once an epoch.

    A function of seed and step alone: runs that differ in what they train see the same pairs, and a run resumed at a
    step goes on as if it had never stopped.

    Args:
        choices: for each item the texts that may go with it.
        batch_size: pairs per step.
        seed: of the order.

    Raises:
        ConfigError: no items, or one without texts.

    >>> order = PairSampler([[0], [1, 2], [1, 2]], batch_size=2, seed=7)
    >>> order.pairs(0) == PairSampler([[0], [1, 2], [1, 2]], batch_size=2, seed=7).pairs(0)
    True
    """

    def __init__(self, choices: Sequence[Sequence[int]], batch_size: int, seed: int = 0) -> None:
        if not choices or not all(len(texts) for texts in choices):
            raise ConfigError(f"every item needs at least one text; got {len(choices)} items, or one without")
        self.choices = [list(texts) for texts in choices]
        self.batch_size = check_int("batch_size", batch_size)
        self.seed = check_int("seed", seed, at_least=0)
        self._epoch: tuple[int, list[tuple[int, int]]] | None = None

    def pairs(self, step: int) -> list[tuple[int, int]]:
        """(item, text) of each row of the batch at `step`, counted from 0."""
        first = check_int("step", step, at_least=0) * self.batch_size
        return [self._pair(first + row) for row in range(self.batch_size)]

    def _pair(self, number: int) -> tuple[int, int]:
        epoch, place = divmod(number, len(self.choices))
        if self._epoch is None or self._epoch[0] != epoch:
            rng = random.Random(f"{self.seed}/{epoch}")
            items = list(range(len(self.choices)))
            rng.shuffle(items)
            self._epoch = (epoch, [(item, rng.choice(self.choices[item])) for item in items])
        return self._epoch[1][place]


class RowBatches:
    """Batches of rows, epoch by epoch.

    Args:
        rows: a sequence, or a stream: then the rows of each block of it are shuffled and grouped by length.
        batch_size: rows in a batch, over all processes.
        seed: of the order.

    Raises:
        ConfigError: no rows, or a batch size below 1.
    """

    def __init__(self, rows: Rows | Sequence[Row], batch_size: int, seed: int = 0) -> None:
        self.rows, self.batch_size = rows, check_int("batch_size", batch_size)
        self.seed = check_int("seed", seed, at_least=0)
        self.sampler: LengthGroupedSampler | None = None
        if hasattr(rows, "__len__"):
            self.sampler = LengthGroupedSampler(text_lengths(rows), batch_size, seed)

    @property
    def fingerprint(self) -> str | None:
        """A fingerprint of the order; None for a stream."""
        return None if self.sampler is None else str(derive_seed(*self.sampler.lengths))

    @property
    def batches_per_epoch(self) -> int | None:
        """Number of batches in an epoch; None for a stream."""
        return None if self.sampler is None else -(-len(self.sampler) // self.batch_size)

    def epoch(self, number: int, start: int = 0) -> Iterator[list[Row | Values]]:
        """The batches of an epoch, from batch `start` on."""
        if self.sampler is not None:
            for numbers in self.sampler.batches(number)[start:]:
                yield [self.rows[i] for i in numbers]
            return
        stream = iter(self.rows)
        for block in itertools.count():
            rows = list(itertools.islice(stream, BUCKET * self.batch_size))
            if not rows:
                return
            rng = random.Random(f"order/{self.seed}/{number}/{block}")
            batches = batches_by_length(rows, _text_length, self.batch_size, rng)
            yield from batches[max(0, start - block * BUCKET) :]


@runtime_checkable
class EpochBatches(Protocol):
    """Batches whose order is a function of the epoch, and which can begin anywhere in it, as `RowBatches` are."""

    @property
    def batches_per_epoch(self) -> int | None:
        """Number of batches in an epoch; None where it is not known."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Sequence[Any]]:
        """The batches of an epoch, from batch `start` on."""


Batches: TypeAlias = EpochBatches | Iterable[Sequence[Any]]
"""Batches for `train`."""


def text_lengths(rows: Rows | Sequence[Row]) -> list[int]:
    """Length of the texts of each row, in characters."""
    texts: Any = rows
    if hasattr(texts, "select_columns"):
        texts = texts.select_columns([name for name in ("text", "prompt") if name in texts.column_names])
    return [_text_length(row) for row in texts]


def _text_length(row: Row | Values) -> int:
    if isinstance(row, Row):
        return row.text_length
    return len(row.get("text") or "") + len(row.get("prompt") or "")


def split_between_processes(
    batch: Sequence[T], process_index: int = 0, num_processes: int = 1, gradient_accumulation_steps: int = 1
) -> list[list[T]]:
    """Return the micro-batches of a batch that one of several processes learns; some may be empty."""
    own = list(batch)[process_index::num_processes]
    return [own[number::gradient_accumulation_steps] for number in range(gradient_accumulation_steps)]


def derive_seed(*parts: object) -> int:
    """A seed from what it is for: the same for the same parts, in every process.

    >>> derive_seed(0, "step", 3) == derive_seed(0, "step", 3), derive_seed(0, "step", 3) == derive_seed(0, "step", 4)
    (True, False)
    """
    return random.Random("/".join(map(str, parts))).getrandbits(63)


def batches_by_length(
    rows: Sequence[T], length: Callable[[T], int], batch_size: int, rng: random.Random
) -> list[list[T]]:
    """Return rows in random order, in batches of like length; the last one may be shorter."""
    mixed = list(rows)
    rng.shuffle(mixed)
    batches: list[list[T]] = []
    for start in range(0, len(mixed), BUCKET * batch_size):
        bucket = mixed[start : start + BUCKET * batch_size]
        whole = len(bucket) // batch_size * batch_size
        ordered = sorted(bucket[:whole], key=length)
        parts = [ordered[at : at + batch_size] for at in range(0, whole, batch_size)]
        rng.shuffle(parts)
        batches += parts + [bucket[whole:]] * (whole < len(bucket))
    return batches
