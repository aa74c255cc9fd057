"""Batches are fetched and collated in a thread ahead of the training, and nothing that is learned depends on it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mmattn import training
from mmattn.errors import ConfigError
from mmattn.memory import Memory
from mmattn.training import checkpoints
from mmattn.training.prefetch import Prefetched, pinned
from tests.training import small_run


def test_items_come_in_their_order_and_errors_where_they_are() -> None:
    """With a thread and without, what is raised comes after the items before it, and then there are no more."""

    def items() -> Iterator[int]:
        yield from (3, 5, 7)
        raise KeyError("eleven")

    for ahead in (0, 1, 2, 50):
        found = []
        with contextlib.closing(Prefetched(items(), ahead)) as given:
            with pytest.raises(KeyError, match="eleven"):
                for one in given:
                    found.append(one)
            assert list(given) == []
        assert found == [3, 5, 7]
        assert list(Prefetched(iter(()), ahead)) == []


def test_an_item_is_made_before_it_is_asked_for() -> None:
    """The thread is ahead by as many as it was told, and no more."""
    made, asked = [], threading.Event()

    def items() -> Iterator[int]:
        for number in range(11):
            made.append(number)
            if len(made) == 4:
                asked.set()
            yield number

    with contextlib.closing(Prefetched(items(), 3)) as given:
        assert asked.wait(10), "four are made where three may wait: the fourth has no place yet"
        assert not threading.Event().wait(0.2) and made == [0, 1, 2, 3]
        assert next(given) == 0 and given.waited >= 0
    assert not [one for one in threading.enumerate() if one.name == "mmattn-prefetch"]


def test_left_early_the_thread_ends_and_what_it_read_is_closed() -> None:
    """A generator is closed, in which files may be open."""
    closed = []

    def items() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            closed.append(True)

    for ahead in (0, 2):
        with contextlib.closing(Prefetched(items(), ahead)) as given:
            assert next(given) == 0
    assert closed == [True, True]
    assert not [one for one in threading.enumerate() if one.name == "mmattn-prefetch"]


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


def test_what_collate_gives_is_moved_and_seeds_are_those_of_the_rows(tmp_path: Path) -> None:
    """The collated batch is on the device of the run, and each row has the seed that the loss is given for it."""
    given: list[tuple[int, ...]] = []
    model = small_run.attach()

    def collate(rows: Any, seeds: Any) -> dict[str, Any]:
        given.append(tuple(seeds))
        return {"ids": torch.zeros(len(rows), 2, dtype=torch.long), "count": len(rows)}

    def loss(batch: dict[str, Any], seeds: Any) -> tuple[torch.Tensor, int]:
        assert tuple(seeds) in given and batch["count"] == len(seeds) == len(batch["ids"])
        return model(batch["ids"]).logits.sum() * 0, 1

    config = training.TrainingConfig(max_steps=3, gradient_accumulation_steps=2)
    batches = training.RowBatches(small_run.rows(), 6, seed=3)
    training.train(
        model, loss, batches, config, training.make_accelerator(device="cpu"), collate=collate, progress=False
    )
    assert len(given) >= 6 and len({seed for some in given for seed in some}) == sum(map(len, given))


def test_an_error_of_the_thread_ends_the_run_in_its_words(tmp_path: Path) -> None:
    """A row that cannot be collated stops the training with its own error, and no thread stays."""
    data = [*small_run.rows()[:11], training.Row("")]
    with pytest.raises(Exception, match="without tokens"):
        small_run.run(tmp_path, data=data)
    assert not [one for one in threading.enumerate() if one.name == "mmattn-prefetch"]


class Stateful:
    """A loader with a state, in which a tensor is, as that of torchdata with a shuffled sampler."""

    batch_size = 6

    def __init__(self) -> None:
        self.seed, self.at, self.loaded = torch.tensor([3]), 0, False
        self.asked = 0

    def __iter__(self) -> Iterator[list[training.Row]]:
        if not self.loaded:
            self.at = 0
        self.loaded = False
        rows = small_run.rows(24)
        order = torch.randperm(24, generator=torch.Generator().manual_seed(int(self.seed))).tolist()
        while self.at < 4:
            self.at += 1
            self.asked += 1
            yield [rows[number] for number in order[6 * self.at - 6 : 6 * self.at]]
        self.seed = self.seed + 1

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {"at": self.at, "seed": self.seed.clone(), "more": [None, {"name": "one"}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        assert state["more"] == [None, {"name": "one"}]
        self.at, self.seed, self.loaded = state["at"], state["seed"], True


@pytest.mark.parametrize("first", [2, 4, 6], ids=["in an epoch", "at its end", "in the next"])
def test_a_stateful_loader_goes_on_by_its_state(tmp_path: Path, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read again, however far the thread was ahead, and the run ends as one that was not stopped."""
    settings: dict[str, Any] = {"save_steps": 1, "dataloader_prefetch_factor": 3}
    small_run.run(tmp_path / "whole", batches=Stateful(), **settings)
    own = checkpoints.save_checkpoint

    def save_and_stop(folder: Path, step: int, *args: Any, **kwargs: Any) -> Path:
        found = own(folder, step, *args, **kwargs)
        if step == first:
            raise InterruptedError
        return found

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(checkpoints, "save_checkpoint", save_and_stop)
        small_run.run(tmp_path / "stopped", batches=Stateful(), **settings)
    again = Stateful()
    done, _ = small_run.run(tmp_path / "stopped", batches=again, **settings)
    assert done.resumed_from_step == first and again.asked == 9 - first
    assert small_run.sha256(tmp_path / "stopped") == small_run.sha256(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_the_state_of_a_loader_of_torchdata_fits_into_a_checkpoint() -> None:
    """As it is with a shuffled sampler and a worker process: what is left of the epoch comes in the same order."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return loaders.StatefulDataLoader(list(range(23)), batch_size=5, shuffle=True, collate_fn=list, num_workers=1)

    given = loader()
    iterator = iter(given)
    next(iterator)
    state, tensors = checkpoints.without_tensors(given.state_dict())
    other = loader()
    other.load_state_dict(checkpoints.with_tensors(json.loads(json.dumps(state)), tensors))
    assert list(other) == list(iterator) != []


def test_a_state_that_no_checkpoint_can_hold_is_refused() -> None:
    """Neither a JSON value nor a tensor: named, with what to do."""
    with pytest.raises(ConfigError, match="set in it"):
        checkpoints.without_tensors({"seen": {1, 2}})
    with pytest.raises(ConfigError, match="dict in it"):
        checkpoints.without_tensors({"seen": {1: 2}})


def test_pinned() -> None:
    """Whatever can pin itself is asked to, inside dicts, lists and tuples; the rest stays as it is."""

    class Pins:
        def pin_memory(self) -> str:
            return "pinned"

    assert pinned({"a": [Pins(), 3], "b": (Pins(),)}) == {"a": ["pinned", 3], "b": ("pinned",)}
    assert pinned("text") == "text"
    if torch.cuda.is_available():
        batch = training.collate([[1, 5, 2]], Memory(torch.randn(1, 3, 5)), 0).pin_memory()
        assert batch.input_ids.is_pinned() and batch.memory is not None and batch.memory.tokens.is_pinned()
