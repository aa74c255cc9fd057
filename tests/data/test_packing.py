"""Packed batches: every document once, rows no longer than the longest, and the loss of the padded batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening

import mmattn
from mmattn import training
from mmattn.errors import ShapeError
from tests import tiny
from tests.training import small_run


def collators() -> tuple[training.RowCollator, training.RowCollator]:
    """Of the rows of the small run: padded, and packed."""
    given: dict[str, Any] = {"tokenizer": small_run.Letters()}
    return training.RowCollator(**given), training.RowCollator(**given, packing=True)


def test_rows_cost_what_they_do_padded() -> None:
    """Prompts that are only read, rows without a memory, and memories of unequal length among them."""
    model = tiny.open_gates(small_run.attach())
    rows, (plain, packing) = small_run.rows(), collators()
    padded, packed = plain.batch(rows), packing.batch(rows)
    assert packed.input_ids.shape[0] < len(rows) and packed.input_ids.shape[1] == padded.input_ids.shape[1]
    assert packed.attention_mask is None and packed.position_ids is not None
    assert float((packed.input_ids != 0).sum() / packed.input_ids.numel()) > 0.85, "little is padding"
    found, wanted = training.sum_nats(model, packed), training.sum_nats(model, padded)
    assert found[1] == wanted[1]
    tiny.assert_close(found[0], wanted[0])
    alone = training.sum_nats(model, plain.batch([training.Row(row.text, row.prompt) for row in rows]))
    assert (alone[0] - wanted[0]).abs() > 0.1, "the memories matter"


def test_scores_and_segments_go_with_their_document() -> None:
    tokens = torch.arange(3.0).view(3, 1, 1).expand(3, 2, 5)
    memory = mmattn.Memory(tokens, segments=torch.tensor([[0, 1]] * 3), scores=torch.tensor([[3.0, 5.0]] * 3) * 2)
    memory.scores[1] = 7.0
    batch = training.pack([[5], [6, 7, 8, 9], [4, 3]], memory)
    assert batch.input_ids.tolist() == [[6, 7, 8, 9], [4, 3, 5, 0]]
    assert batch.memory.tokens[:, 0, 0].tolist() == [1, 2, 0, 0] and batch.memory.lengths == [2, 2, 2, 0]
    assert batch.memory.scores[:, 0].tolist() == [7, 6, 6, 6] and batch.memory.segments.tolist() == [[0, 1]] * 4
    of_prompts = training.pack([[5, 6], [7, 8, 9]], unlearned=[4, 2])
    assert of_prompts.labels.tolist() == [[-100, -100, 9], [-100] * 3], "a document may be no longer than its prompt"
    with pytest.raises(ShapeError, match="3 texts need 3 rows of memory, got 1"):
        training.pack([[5], [6], [7]], memory[:1])
    with pytest.raises(ShapeError, match="leave empty texts out"):
        training.pack([[5], []])


@pytest.mark.parametrize("how", ["rows", "flattening"])
def test_the_trainer_learns_as_it_does_padded(how: str, tmp_path: Path) -> None:
    plain, packing = collators()
    rows: Any = small_run.rows()
    if how == "flattening":  # transformers' own collator, beside which the memories are stacked
        table = [{"input_ids": [1, 5 + i % 7, 9, 2], "memory": torch.randn(3, tiny.MEMORY_DIM)} for i in range(12)]
        rows = [{**row, "labels": [-100, *row["input_ids"][1:]]} for row in table]
        plain, packing = (
            training.MemoryCollator(one)
            for one in (_padded, DataCollatorWithFlattening(return_tensors="pt", separator_id=-100))
        )
    losses = []
    for collator in (plain, packing):
        made = training.AdapterTrainer(
            model=small_run.attach(),
            args=small_run.arguments(
                tmp_path / "out", max_steps=5, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
                seed=3, remove_unused_columns=False,
            ),
            data_collator=collator,
            train_dataset=rows,
        )  # fmt: skip
        made.train()
        losses.append([line["loss"] for line in made.state.log_history if "loss" in line])
    assert len(losses[0]) == 5 and losses[1] == pytest.approx(losses[0], rel=1e-3)


def _padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }
