"""Batches of a store: an order that is a function of seed and epoch, read in whole blocks, some of them ahead."""

from __future__ import annotations

import bisect
import itertools
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mmattn.data.encoded.blocks import Block
from mmattn.data.encoded.read_ahead import ReadAhead
from mmattn.data.encoded.store import MemoryStore
from mmattn.data.rows import Row
from mmattn.data.sampling import BUCKET, batches_by_length, derive_seed
from mmattn.errors import ConfigError, check_int

BUFFER_BYTES = 256 << 20


class StoreBatches:
    """Batches of the rows of a store, epoch by epoch, as `RowBatches` gives them of other rows.

    The blocks of the store are read in a random order, whole and ahead, and the rows of a window of them are mixed: as
    many as fill the buffer. Rows of like length share a batch. Nothing before the window of the first batch is read.

    The rows of a window are in memory, and while they are used those of the next are read: at most about twice
    `buffer_bytes`, and four blocks.

    Args:
        store: whole, or some of its rows.
        batch_size: rows in a batch, over all processes.
        seed: of the order.
        shuffle: False gives the rows in the order of the store.
        buffer_bytes: of the rows that are mixed.
        threads: that read blocks ahead.

    Raises:
        ConfigError: no rows, or a size below 1.
    """

    def __init__(
        self,
        store: MemoryStore,
        batch_size: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        buffer_bytes: int = BUFFER_BYTES,
        threads: int = 4,
    ) -> None:
        if not len(store):
            raise ConfigError(f"{store!r} has no rows to put into an order")
        self.store, self.batch_size, self.shuffle = store, check_int("batch_size", batch_size), shuffle
        self.seed, self.threads = check_int("seed", seed, at_least=0), check_int("threads", threads)
        self._rows = store.block_rows()
        row_bytes = store.row_bytes
        # Whole batches, so that each is of one window; in order there is nothing to mix.
        batches = max(1, round(check_int("buffer_bytes", buffer_bytes) / row_bytes / batch_size))
        self._window = batches if shuffle else 1
        blocks = -(-self._window * batch_size * sum(map(bool, self._rows)) // len(store))
        self._ahead = max(blocks, 2 * threads)

    @property
    def fingerprint(self) -> str:
        """What tells the order of these rows from any other."""
        return str(derive_seed(self.store.sha256, self._window, self.shuffle))

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in an epoch."""
        return -(-len(self.store) // self.batch_size)

    def epoch(self, number: int, start: int = 0) -> Iterator[list[Row]]:
        """The batches of an epoch, from batch `start` on. Closing the iterator ends its threads.

        Args:
            number: of the epoch, from 0.
            start: number of the first batch.

        Raises:
            AdapterFileError: a block that was changed after it was written, or a shard that is not there any more.
            OSError: a file that cannot be reached.
        """
        order = [block for block, rows in enumerate(self._rows) if rows]
        if self.shuffle:
            random.Random(f"blocks/{self.seed}/{number}").shuffle(order)
        ends = list(itertools.accumulate(len(self._rows[block]) for block in order))
        window, skipped = divmod(start, self._window)
        size = self._window * self.batch_size
        first = bisect.bisect_right(ends, window * size)
        position = ends[first - 1] if first else 0  # of the first row of the next block, in the epoch
        held: deque[tuple[int, _Rows]] = deque()
        with ReadAhead(self._read, order[first:], self._ahead, self.threads) as blocks:
            for begin in range(window * size, len(self.store), size):
                end = min(begin + size, len(self.store))
                while position < end:
                    held.append((position, next(blocks)))
                    position += len(held[-1][1])
                rows = _Rows.of(some.cut(max(0, begin - place), max(0, end - place)) for place, some in held)
                while held and held[0][0] + len(held[0][1]) <= end:
                    held.popleft()
                batches = deque(self._batches(rows, number, begin // size)[skipped:])
                skipped = 0
                while batches:
                    batch = [rows[i] for i in batches.popleft()]
                    if not batches:
                        del rows  # what was used is to be freed while the next window is read
                    yield batch

    def _read(self, number: int) -> _Rows:
        block, numbers = self.store.read_block(number), self._rows[number]
        lengths = block.columns.text_lengths
        return _Rows([block] * len(numbers), list(numbers), [lengths[i] for i in numbers])

    def _batches(self, rows: _Rows, epoch: int, window: int) -> list[list[int]]:
        """The rows of a window, mixed, as batches of like length."""
        order = list(range(len(rows)))
        if not self.shuffle:
            return [order]
        rng = random.Random(f"order/{self.seed}/{epoch}/{window}")
        rng.shuffle(order)
        size = BUCKET * self.batch_size
        groups = (order[start : start + size] for start in range(0, len(order), size))
        return [
            batch
            for group in groups
            for batch in batches_by_length(group, [rows.lengths[i] for i in group], self.batch_size, rng)
        ]


@dataclass(frozen=True)
class _Rows:
    """Rows of some blocks, each made when it is asked for: a million of them at once would keep Python busy.

    Args:
        blocks: of each row.
        numbers: of each row in its block.
        lengths: `Row.text_length` of each row.
    """

    blocks: list[Block]
    numbers: list[int]
    lengths: list[int]

    @classmethod
    def of(cls, parts: Iterable[_Rows]) -> _Rows:
        """The rows of all parts."""
        found = cls([], [], [])
        for part in parts:
            found.blocks.extend(part.blocks)
            found.numbers.extend(part.numbers)
            found.lengths.extend(part.lengths)
        return found

    def cut(self, start: int, end: int) -> _Rows:
        """Some of the rows."""
        return _Rows(self.blocks[start:end], self.numbers[start:end], self.lengths[start:end])

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, number: int) -> Row:
        return self.blocks[number].row(self.numbers[number])
