"""Batches of a store: their order, where they may begin, what is in memory, and the threads that read."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn import training
from mmattn.data.encoded_files import Block
from mmattn.data.row import Row
from mmattn.errors import AdapterFileError, ConfigError
from tests.data.encoded_rows import flip
from tests.training import small_run

ROWS = 307
SLOTS, WIDTH = 3, 7
BLOCK = 11  # rows, about


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of very different lengths in some thirty blocks of three shards."""
    folder = tmp_path_factory.mktemp("store")
    rows = [
        Row(f"{n}:" + "x" * (n * 37 % 101), memory=mmattn.Memory(torch.full((1, SLOTS, WIDTH), float(n))))
        for n in range(ROWS)
    ]
    training.encode_rows(rows, folder, contents_per_shard=113, block_bytes=BLOCK * SLOTS * WIDTH * 2)
    return folder


@pytest.fixture
def store(folder: Path) -> training.EncodedDataset:
    return training.EncodedDataset(folder)


def numbers(batches: Any) -> list[list[int]]:
    """Of the rows of each batch, whose memories are looked at too."""
    found = []
    for batch in batches:
        found.append([int(row.text.split(":")[0]) for row in batch])
        assert all(
            torch.equal(row.memory.tokens, torch.full((1, SLOTS, WIDTH), float(n)).half())
            for row, n in zip(batch, found[-1], strict=True)
        )
    return found


def mixing(
    store: training.EncodedDataset, batch_size: int = 5, seed: int = 3, **options: Any
) -> training.EncodedBatches:
    """Batches whose window is about a sixth of the store."""
    return training.EncodedBatches(store, batch_size, seed, **{"buffer_bytes": int(store.row_bytes * 50), **options})


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mmattn-read-ahead")]


class TestOrder:
    @pytest.mark.parametrize("batch_size", [1, 5, 64, 1000])
    def test_every_row_once_an_epoch(self, store: training.EncodedDataset, batch_size: int) -> None:
        batches = mixing(store, batch_size)
        for epoch in range(2):
            found = numbers(batches.epoch(epoch))
            assert sorted(n for batch in found for n in batch) == list(range(ROWS))
            assert len(found) == batches.batches_per_epoch == -(-ROWS // batch_size)
            assert [len(batch) for batch in found[:-1]] == [batch_size] * (len(found) - 1)

    def test_a_function_of_seed_and_epoch(self, store: training.EncodedDataset, folder: Path) -> None:
        """Invariant 112."""
        first = numbers(mixing(store).epoch(0))
        assert numbers(mixing(training.EncodedDataset(folder)).epoch(0)) == first
        assert numbers(mixing(store).epoch(1)) != first and numbers(mixing(store, seed=4).epoch(0)) != first

    @pytest.mark.parametrize("shuffle", [True, False])
    def test_it_may_begin_at_any_batch(self, store: training.EncodedDataset, shuffle: bool) -> None:
        """Invariant 112."""
        batches = mixing(store, shuffle=shuffle)
        whole = numbers(batches.epoch(2))
        assert shuffle or [n for batch in whole for n in batch] == list(range(ROWS)), "in the order of the blocks"
        for start in (0, 1, 9, 10, 11, 23, len(whole) - 1, len(whole), len(whole) + 5):
            assert numbers(batches.epoch(2, start)) == whole[start:], start

    def test_nothing_before_its_window_is_read(
        self, store: training.EncodedDataset, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Invariant 112."""
        read: list[int] = []
        plain = training.EncodedDataset.read_block

        def counted(self: training.EncodedDataset, number: int) -> Block:
            read.append(number)
            return plain(self, number)

        monkeypatch.setattr(training.EncodedDataset, "read_block", counted)
        batches = mixing(store)
        numbers(batches.epoch(0))
        blocks = len(read)
        assert len(set(read)) == blocks > 25
        read.clear()
        numbers(batches.epoch(0, 50))
        assert len(read) == len(set(read)) < blocks / 4

    def test_of_some_rows(self, store: training.EncodedDataset) -> None:
        chosen = store.select([n for n in range(ROWS) if n % 3])
        found = numbers(mixing(chosen).epoch(0))
        assert sorted(n for batch in found for n in batch) == [n for n in range(ROWS) if n % 3]
        assert numbers(mixing(chosen).epoch(0, 11)) == found[11:]


class TestMemory:
    def test_it_stays_within_its_buffer(self, store: training.EncodedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
        """Invariant 112: at most the blocks of two windows, and four, at any time; rows that are kept keep none."""
        alive: weakref.WeakSet[Block] = weakref.WeakSet()
        plain = training.EncodedDataset.read_block
        most = 0

        def counted(self: training.EncodedDataset, number: int) -> Block:
            nonlocal most
            block = plain(self, number)
            alive.add(block)
            most = max(most, len(alive))
            return block

        monkeypatch.setattr(training.EncodedDataset, "read_block", counted)
        monkeypatch.setattr(Block, "__hash__", object.__hash__)
        monkeypatch.setattr(Block, "__eq__", object.__eq__)
        kept = []
        batches = mixing(store)
        for batch in batches.epoch(0):
            assert all(row.memory is not None for row in batch)
            kept += batch
        window = batches._window * batches.batch_size // BLOCK + 2
        assert window < most <= 2 * window + 4
        gc.collect()
        assert len(kept) == ROWS and not alive


class TestThreads:
    def test_they_end_with_the_epoch(self, store: training.EncodedDataset) -> None:
        list(mixing(store).epoch(0))
        assert not readers()

    def test_they_end_when_it_is_closed(self, store: training.EncodedDataset) -> None:
        epoch: Any = mixing(store).epoch(0)
        next(epoch)
        assert readers()
        epoch.close()
        assert not readers()

    def test_they_end_with_an_error(self, folder: Path, tmp_path: Path) -> None:
        copied = Path(shutil.copytree(folder, tmp_path / "store"))
        flip(copied, 1, 4)
        with pytest.raises(AdapterFileError, match=r"vectors-000001.arrow' was changed"):
            list(mixing(training.EncodedDataset(copied)).epoch(0))
        assert not readers()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of `small_run` as a store."""
    folder = tmp_path_factory.mktemp("data")
    training.encode_rows(small_run.rows(), folder, contents_per_shard=9, block_bytes=700)
    return folder


class TestTraining:
    def train(self, data: Path, out: Path, steps: int, **settings: Any) -> Any:
        """Train a tiny host on a store, as `small_run` does on other rows."""
        model = small_run.attach(dropout=0.2)
        collator = small_run.collator(out)
        store = training.EncodedDataset(data)
        batches = training.EncodedBatches(store, 5, seed=1, buffer_bytes=int(store.row_bytes * 10))

        def loss(rows: Any, seeds: Any) -> Any:
            return training.sum_nats(model, collator.batch(rows))

        chosen = {"learning_rate": 1e-2, "save_steps": 1, "eval_steps": 2, "logging_steps": 1} | settings
        done = training.train(
            model,
            loss,
            batches,
            training.TrainingConfig(max_steps=11, **chosen),
            training.make_accelerator(device="cpu"),
            eval_rows=store.select(range(4)),
            folder=out / "checkpoints",
            progress=False,
            log=lambda **figures: stop(figures["step"], steps),
        )
        return done, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    def test_it_goes_on_where_it_was(self, data: Path, tmp_path: Path) -> None:
        """Invariant 112: interrupted in the middle of an epoch, it learns the same batches after that, bit for bit."""
        whole, weights = self.train(data, tmp_path / "whole", 11)
        half, _ = self.train(data, tmp_path / "half", 7)
        assert half.interrupted and half.global_step < 11 and whole.global_step == 11
        again, same = self.train(data, tmp_path / "half", 11)
        assert again.resumed_from_step >= 6 and again.epoch == whole.epoch
        assert weights and all(torch.equal(weights[name], same[name]) for name in weights)
        assert not readers()

    def test_other_rows_are_refused(self, data: Path, tmp_path: Path) -> None:
        self.train(data, tmp_path, 3)
        training.encode_rows(small_run.rows()[:17], tmp_path / "other", contents_per_shard=9, block_bytes=700)
        with pytest.raises(ConfigError, match="lengths of the rows"):
            self.train(tmp_path / "other", tmp_path, 11)


def stop(step: int, steps: int) -> None:
    """Interrupt a run as Ctrl-C does."""
    if step == steps < 11:
        raise KeyboardInterrupt
