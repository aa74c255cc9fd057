"""Cached hidden states in whole runs: nothing that is learned depends on what was in the cache."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from mmattn import training
from tests import tiny
from tests.training import small_run

SETTINGS: dict[str, Any] = {"every": None, "layers": [1, 2]}


def run(folder: Path, states: Path, **settings: Any) -> str:
    """A run of `train` whose states are cached; the sha256 of its adapter."""
    small_run.run(folder, hidden_states=states, adapter=SETTINGS, **settings)
    return small_run.sha256(folder)


def test_cold_and_warm_runs_are_equal_bit_for_bit(tmp_path: Path) -> None:
    """Invariant 76: what was in the cache changes nothing that is learned."""
    cold = run(tmp_path / "a", tmp_path / "states")
    assert run(tmp_path / "b", tmp_path / "states") == cold
    files = sorted((tmp_path / "states").rglob("*.safetensors"))
    assert run(tmp_path / "c", tmp_path / "states", max_steps=3) != cold
    assert sorted((tmp_path / "states").rglob("*.safetensors")) == files, "nothing was computed again"


@pytest.mark.slow
def test_killed_and_taken_up_it_ends_bit_for_bit_the_same(tmp_path: Path) -> None:
    """Killed while nothing was on the disk, and while all was; the whole run had another cache."""
    want = run(tmp_path / "whole", tmp_path / "others")
    given = {"hidden_states": str(tmp_path / "states"), "adapter": SETTINGS}
    for kill in ({"at_loss": 10}, {"at_save": 2}):
        found = small_run.start(tmp_path / "run", kill=kill, **given)
        assert found.returncode == -signal.SIGKILL, found.stderr
    assert run(tmp_path / "run", tmp_path / "states") == want


def test_by_the_trainer_of_transformers(tmp_path: Path) -> None:
    """The same block around `AdapterTrainer`: every row is computed once in three epochs."""
    from transformers import TrainingArguments

    model = tiny.attach(tiny.make("llama"), layers=(2,), opened=False)
    model.train()
    rows = [{"input_ids": text, "labels": text} for text in tiny.text(7, 5).tolist()]
    for row, own in zip(rows, tiny.memory(7).tokens, strict=True):
        row["memory"] = own.tolist()
    arguments = TrainingArguments(
        str(tmp_path / "run"), num_train_epochs=3, per_device_train_batch_size=3, use_cpu=True, report_to=[]
    )
    collator = training.MemoryCollator(lambda given: {k: torch.tensor([r[k] for r in given]) for k in given[0]})
    trainer = training.AdapterTrainer(model, arguments, train_dataset=rows, data_collator=collator)
    with training.cached_hidden_states(model, tmp_path / "states") as cache:
        trainer.train()
    assert (cache.computed, cache.found) == (7, 14)
