"""Training on a card: a step waits once at most, batches come from pinned memory and from workers, a card is known."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmattn import training
from mmattn.errors import NonFiniteError
from mmattn.training.metrics import PEAKS
from tests.training import small_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
]


ON_A_CARD = {"use_cpu": False, "dataloader_pin_memory": True}


def rows() -> list[training.Row]:
    """Rows with a memory, of one length each: a host reads whether its text is padded."""
    return [training.Row("abcdefgh", memory=row.memory) for row in small_run.rows() if row.has_memory]


def waits_of(folder: Path, steps: int) -> int:
    """Train for some steps; returns how often torch warns of a wait."""
    arguments = small_run.arguments(
        folder, max_steps=steps, per_device_train_batch_size=4, logging_steps=100, **ON_A_CARD
    )
    trainer = training.AdapterTrainer(
        small_run.attach(), arguments, data_collator=small_run.collator(), train_dataset=rows()
    )
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.train()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in warned)


def test_a_step_waits_once_at_most(tmp_path: Path) -> None:
    """Invariant 214: beyond what a run does once, whatever the number of its steps."""
    waits_of(tmp_path, 1)
    assert waits_of(tmp_path, 9) - waits_of(tmp_path, 3) <= 6


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_batches_of_workers(tmp_path: Path) -> None:
    """Invariant 214: workers make them, the loader pins them, and they are copied while the card works."""
    pinned = training.TextBatch(torch.ones(2, 3), None, torch.ones(2, 3), rows()[0].memory).pin_memory()
    assert pinned.input_ids.is_pinned() and pinned.labels.is_pinned() and pinned.memory.tokens.is_pinned()  # type: ignore[union-attr]
    arguments = small_run.arguments(
        tmp_path, max_steps=5, per_device_train_batch_size=3, logging_steps=2, dataloader_num_workers=2, bf16=True,
        **ON_A_CARD,
    )  # fmt: skip
    trainer = training.AdapterTrainer(
        model=small_run.attach(), args=arguments, data_collator=small_run.collator(),
        train_dataset=small_run.rows(),
    )  # fmt: skip
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 2 and all(line["tokens_per_second"] > 0 for line in lines)
    known = torch.cuda.get_device_name() in PEAKS
    assert all(("mfu" in line) is known for line in lines)


def test_a_memory_that_is_not_finite(tmp_path: Path) -> None:
    """Invariant 214: it is refused in the step that reads it, and nothing is learned from it."""
    model = small_run.attach().cuda()
    before = {name: one.detach().clone() for name, one in model.adapters.named_parameters()}
    ids = torch.full((2, 5), 7, device="cuda")
    memory = torch.full((2, 3, model.adapter("default").config.memory_dim), torch.nan, device="cuda")

    class Given(training.AdapterTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            return model(ids, labels=ids, memory=memory).loss  # type: ignore[no-any-return]

    arguments = training.OptimSettings(max_steps=2).arguments(training.RunSettings(out=str(tmp_path)))
    trainer = Given(
        model, arguments, data_collator=lambda rows: {"rows": rows}, train_dataset=range(7), calibrate=False
    )
    with pytest.raises(NonFiniteError):
        trainer.train()
    assert all(torch.equal(one, before[name]) for name, one in model.adapters.named_parameters())
