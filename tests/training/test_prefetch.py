"""Batches are fetched and collated in a thread ahead of the training, and nothing that is learned depends on it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mmattn import training
from mmattn.training.distributed import prefetched
from tests.training import small_run


def test_items_come_in_their_order_and_errors_where_they_are() -> None:
    """With a thread and without, what is raised comes after the items before it, and then there are no more."""

    def items() -> Iterator[int]:
        yield from (3, 5, 7)
        raise KeyError("eleven")

    for ahead in (0, 1, 2, 50):
        found = []
        with pytest.raises(KeyError, match="eleven"):
            for one in prefetched(items(), ahead):
                found.append(one)
        assert found == [3, 5, 7]
        assert list(prefetched(iter(()), ahead)) == []


def test_left_early_the_thread_ends_and_what_it_read_is_closed() -> None:
    """A generator is closed, in which files may be open."""
    closed = []

    def items() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            closed.append(True)

    for ahead in (0, 2):
        with contextlib.closing(prefetched(items(), ahead)) as given:
            assert next(given) == 0
        del given
    assert closed == [True, True]
    assert not [one for one in threading.enumerate() if one.name.startswith("mmattn-prefetch")]


@pytest.mark.parametrize(
    "changes",
    [{"dataloader_prefetch_factor": 0}, {"dataloader_prefetch_factor": 7}, {"collated": False}],
    ids=["no thread", "far ahead", "rows given to the loss"],
)
def test_nothing_that_is_learned_depends_on_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The weights are the same bit for bit, and a checkpoint of the one goes on as the other."""
    whole, other = tmp_path / "whole", tmp_path / "other"
    small_run.run(whole, max_steps=5)
    small_run.run(other, max_steps=5, **changes)
    assert small_run.sha256(other) == small_run.sha256(whole)
    assert small_run.losses(other) == small_run.losses(whole)


class Meeting:
    """Rows whose second batch is given out once the first is being learned: only one who is ahead can wait for it."""

    batch_size = 6

    def __init__(self) -> None:
        self.learning = threading.Event()
        self.met: list[bool] = []

    @property
    def batches_per_epoch(self) -> int:
        """Two."""
        return 2

    def epoch(self, number: int, start: int = 0) -> Iterator[list[training.Row]]:
        """Both."""
        rows = small_run.rows()
        yield rows[:6]
        self.met.append(self.learning.wait(20))
        yield rows[6:12]


def test_the_next_batch_is_fetched_while_one_is_learned(tmp_path: Path) -> None:
    """What fetches the second batch goes on while the first step is under way."""
    batches, model = Meeting(), small_run.attach()
    collator = small_run.collator(tmp_path)

    def loss(batch: training.TextBatch, seeds: Any) -> tuple[torch.Tensor, int]:
        batches.learning.set()
        return training.sum_nats(model, batch)

    config = training.TrainingConfig(max_steps=2, logging_steps=1)
    seen: list[dict[str, Any]] = []
    training.train(
        model, loss, batches, config, training.make_accelerator(device="cpu"), progress=False,
        collate=lambda rows, seeds: collator.batch(rows), log=lambda **figures: seen.append(figures),
    )  # fmt: skip
    assert batches.met == [True]
    assert [0 <= one["waiting"] <= 1 for one in seen] == [True, True]
