"""The batches of a run as one of its processes learns them: in order, cut into micro-batches, collated ahead."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from mmattn.data.sampling import Batches, EpochBatches, derive_seed, split_between_processes
from mmattn.errors import ConfigError
from mmattn.training.config import Collate, TrainingConfig, TrainingResult
from mmattn.training.distributed import Processes

T = TypeVar("T")


@dataclass(frozen=True)
class MicroBatch:
    """The part of a batch that one process computes at once.

    `is_filler` marks the row of another process, with which a sharded host is called where this one has none.
    """

    number: int
    batch: Any
    seeds: Sequence[int]
    is_filler: bool


@dataclass(frozen=True)
class FetchedBatch:
    """A batch of the run: its place in its epoch, its rows over all processes, the micro-batches of this one."""

    epoch: int
    place: int
    size: int
    micro_batches: Sequence[MicroBatch]


def fetch(
    batches: Batches,
    config: TrainingConfig,
    processes: Processes,
    collate: Collate | None,
    sharded: bool,
    done: TrainingResult,
    steps: int,
) -> Iterator[FetchedBatch]:
    """Yield the batches of the next steps of a run."""
    ordered = itertools.islice(_in_order(batches, done.epoch, done.batch_in_epoch), steps)
    for step, (epoch, place, batch) in enumerate(ordered, start=done.global_step):
        seeded = [(row, derive_seed(config.seed, "row", step, number)) for number, row in enumerate(batch)]
        shares = split_between_processes(seeded, processes.index, processes.count, config.gradient_accumulation_steps)
        micro_batches = []
        for number, share in enumerate(shares):
            if share or sharded:
                rows, seeds = zip(*(share or seeded[:1]), strict=True)
                content = list(rows) if collate is None else collate(rows, seeds)
                micro_batches.append(MicroBatch(number, content, seeds, is_filler=not share))
        yield FetchedBatch(epoch, place, len(batch), micro_batches)


def _in_order(batches: Batches, epoch: int, start: int) -> Iterator[tuple[int, int, Sequence[Any]]]:
    """Yield epoch, place in it and rows of each batch, epoch after epoch."""
    for number in itertools.count(epoch):
        if isinstance(batches, EpochBatches):
            rest: Iterable[Sequence[Any]] = batches.epoch(number, start)
        else:
            rest = itertools.islice(batches, start, None)
        place = start
        for place, batch in enumerate(rest, start=start + 1):
            yield number, place - 1, batch
        if not place:
            raise ConfigError("the data has no rows to train on")
        start = 0


def prefetched(items: Iterator[T], ahead: int) -> Generator[T, None, None]:
    """Yield items that a thread takes from an iterator, some of them ahead; with 0 there is no thread.

    Errors of the iterator are raised where their item would have come.

    >>> list(prefetched(iter(range(3)), ahead=2))
    [0, 1, 2]
    """
    if not ahead:
        yield from items
        return
    end: Any = object()
    pool = ThreadPoolExecutor(1, "mmattn-prefetch")
    try:
        waiting = deque(pool.submit(next, items, end) for _ in range(ahead))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, items, end))
            yield item
    finally:
        pool.shutdown(cancel_futures=True)
