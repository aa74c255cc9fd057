"""Batches of an encoded dataset: an order that depends on seed and epoch alone, read in whole blocks, some ahead."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from operator import attrgetter
from typing import TypeVar

from mmattn.data.encoded_dataset import EncodedDataset, EncodedRow
from mmattn.data.rows import Row
from mmattn.data.sampling import batches_by_length, derive_seed
from mmattn.errors import ConfigError, check_int

BUFFER_BYTES = 256 << 20
_MOST_ROWS = 1 << 16
"""Rows that are mixed at a time at most, where their vectors are small."""

K = TypeVar("K")
T = TypeVar("T")


class EncodedBatches:
    """Batches of the rows of an encoded dataset, epoch by epoch, like `RowBatches`.

    Blocks are read whole, in random order and ahead, and the rows of a window of blocks are mixed: as many as fill
    `buffer_bytes`. Rows of similar length share a batch. A run that resumes at a batch reads from the window of that
    batch on. At most the blocks of two windows and some more are in memory; rows that are kept keep none.

    Args:
        dataset: all rows of an encoded dataset, or some.
        batch_size: rows in a batch, over all processes.
        seed: of the order.
        shuffle: False gives the rows in the order of their blocks.
        buffer_bytes: size of the window.
        threads: number of threads that read blocks.

    Raises:
        ConfigError: no rows, or a size below 1.
    """

    def __init__(
        self,
        dataset: EncodedDataset,
        batch_size: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        buffer_bytes: int = BUFFER_BYTES,
        threads: int = 4,
    ) -> None:
        if not len(dataset):
            raise ConfigError(f"{dataset!r} has no rows to put into an order")
        self.dataset, self.batch_size, self.shuffle = dataset, check_int("batch_size", batch_size), shuffle
        self.seed, self.threads = check_int("seed", seed, at_least=0), check_int("threads", threads)
        self._block_rows = dataset.block_rows()
        rows = min(check_int("buffer_bytes", buffer_bytes) / dataset.row_bytes, _MOST_ROWS)
        # Whole batches, so that each comes from one window; in order there is nothing to mix.
        self._window = max(1, round(rows / batch_size)) if shuffle else 1
        blocks = -(-self._window * batch_size * sum(len(one) > 0 for one in self._block_rows) // len(dataset))
        self._ahead = max(blocks, 2 * threads)

    @property
    def fingerprint(self) -> str:
        """A fingerprint of the order."""
        return str(derive_seed(self.dataset.sha256, self._window, self.shuffle))

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in an epoch."""
        return -(-len(self.dataset) // self.batch_size)

    def epoch(self, number: int, start: int = 0) -> Iterator[list[Row]]:
        """Iterate over the batches of an epoch, from batch `start` on. Closing the iterator ends its threads.

        Raises:
            AdapterFileError: a block was changed after it was written, or a file is missing.
            OSError: a file cannot be reached.
        """
        order = [block for block, rows in enumerate(self._block_rows) if len(rows)]
        if self.shuffle:
            random.Random(f"blocks/{self.seed}/{number}").shuffle(order)
        ends = list(itertools.accumulate(len(self._block_rows[block]) for block in order))
        window, skipped = divmod(start, self._window)
        size = self._window * self.batch_size
        first = bisect.bisect_right(ends, window * size)
        position = ends[first - 1] if first else 0  # in the epoch, of the first row of the next block
        waiting: list[EncodedRow] = []
        with contextlib.closing(read_ahead(self._read, order[first:], self._ahead, self.threads)) as blocks:
            for begin in range(window * size, len(self.dataset), size):
                end = min(begin + size, len(self.dataset))
                while position < end:
                    rows = next(blocks)
                    waiting += rows[max(0, begin - position) :]
                    position += len(rows)
                rows, waiting = waiting[: end - begin], waiting[end - begin :]
                batches = deque(self._batches(rows, number, begin // size)[skipped:])
                skipped = 0
                del rows  # so that used rows are freed while the next window is read
                while batches:
                    yield [row.copied() for row in batches.popleft()]

    def _read(self, block: int) -> list[EncodedRow]:
        return self.dataset.read_rows(block, self._block_rows[block])

    def _batches(self, rows: list[EncodedRow], epoch: int, window: int) -> list[list[EncodedRow]]:
        """Return the rows of a window, mixed, in batches of similar length."""
        if not self.shuffle:
            return [list(rows)]
        rng = random.Random(f"order/{self.seed}/{epoch}/{window}")
        return batches_by_length(rows, attrgetter("text_length"), self.batch_size, rng)


def read_ahead(read: Callable[[K], T], keys: Iterable[K], ahead: int, threads: int) -> Generator[T, None, None]:
    """Iterate over `read(key)` in the order of the keys; threads read up to `ahead`, until the iterator is closed."""
    pool, pending = ThreadPoolExecutor(threads, thread_name_prefix="mmattn-read-ahead"), deque[Future[T]]()
    try:
        for key in keys:
            pending.append(pool.submit(read, key))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
