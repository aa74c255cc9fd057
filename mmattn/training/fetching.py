"""The batches of a run as one of its processes learns them: in their order, cut into micro-batches, collated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmattn.data.sampling import Batches, EpochBatches, derive_seed, split_between_processes
from mmattn.errors import ConfigError
from mmattn.training.config import Collate, TrainingConfig
from mmattn.training.distributed import Processes
from mmattn.training.prefetch import on_device, pinned


@dataclass(frozen=True)
class MicroBatch:
    """The part of a batch that one process computes at once.

    Args:
        number: of the micro-batch in its batch.
        batch: the rows, or what was made of them.
        seeds: of each row.
        own: False for another's row, with which a sharded host is called where a process has none of its own.
        collated: whether something was made of the rows, which belongs on the device.
    """

    number: int
    batch: Any
    seeds: Sequence[int]
    own: bool
    collated: bool

    def on(self, device: torch.device) -> Any:
        """The batch, on a device where it was collated."""
        return on_device(self.batch, device) if self.collated else self.batch


@dataclass(frozen=True)
class FetchedBatch:
    """A batch of the run.

    Args:
        epoch: number of the epoch, from 0.
        place: number of the batch in it.
        size: rows of all processes.
        micro_batches: those of this process.
        data_state: of a stateful loader, after this batch.
    """

    epoch: int
    place: int
    size: int
    micro_batches: Sequence[MicroBatch]
    data_state: Any


class Fetcher:
    """Makes batches ready for one process.

    Args:
        batches: as in `train`.
        config: of the run.
        processes: those of the run.
        collate: as in `train`.
        sharded: whether the host is sharded, so that every process is called as often.
    """

    def __init__(
        self, batches: Batches, config: TrainingConfig, processes: Processes, collate: Collate | None, sharded: bool
    ) -> None:
        self.batches, self.config, self.processes = batches, config, processes
        self.collate, self.sharded = collate, sharded
        self.pins = processes.accelerator.device.type == "cuda"

    def fetch(self, step: int, steps: int, epoch: int, place: int, data_state: Any = None) -> Iterator[FetchedBatch]:
        """The batches of some steps."""
        ordered = itertools.islice(self._ordered(epoch, place, data_state), steps)
        for number, (at_epoch, at_place, batch, state) in enumerate(ordered, start=step):
            yield FetchedBatch(at_epoch, at_place, len(batch), self._micro_batches(batch, number), state)

    def _ordered(self, epoch: int, place: int, data_state: Any) -> Iterator[tuple[int, int, Sequence[Any], Any]]:
        """Epoch, place, rows of each batch, and the state of a stateful loader after it, epoch after epoch."""
        loader: Any = self.batches
        stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        if stateful and data_state is not None:
            loader.load_state_dict(data_state)
        for number in itertools.count(epoch):
            first = place if number == epoch else 0
            if isinstance(loader, EpochBatches):
                batches = loader.epoch(number, first)
            else:
                batches = itertools.islice(loader, 0 if stateful and data_state is not None else first, None)
            at = first
            for batch in batches:
                yield number, at, batch, loader.state_dict() if stateful else None
                at += 1
            data_state = None
            if not at:
                raise ConfigError("the data has no rows to train on")

    def _micro_batches(self, batch: Sequence[Any], step: int) -> list[MicroBatch]:
        processes, config = self.processes, self.config
        seeded = [(row, derive_seed(config.seed, "row", step, place)) for place, row in enumerate(batch)]
        shared = (processes.index, processes.count, config.gradient_accumulation_steps)
        found = []
        for number, part in enumerate(split_between_processes(seeded, *shared)):
            if not (part or self.sharded):
                continue
            rows, seeds = zip(*(part or seeded[:1]), strict=True)
            given: Any = list(rows) if self.collate is None else self.collate(rows, seeds)
            if self.collate is not None and self.pins:
                given = pinned(given)
            found.append(MicroBatch(number, given, seeds, bool(part), self.collate is not None))
        return found
