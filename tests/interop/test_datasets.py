"""`transformers.Trainer` and `AdapterTrainer` on a `datasets.Dataset` with a column of memories, in bf16 too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments, default_data_collator

import mmattn
from mmattn import training
from mmattn.errors import ConfigError, ShapeError
from tests import tiny
from tests.interop import tokenised


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    own = {"output_dir": str(folder), "per_device_train_batch_size": 4, "seed": 3}
    return TrainingArguments(**(tokenised.ARGUMENTS | own | changes))


def collator(**settings: Any) -> training.MemoryCollator:
    return training.MemoryCollator(DataCollatorForSeq2Seq(tokenised.make_tokenizer()), **settings)


WAYS = [("llama", ""), ("gpt2", ""), ("llama", "autocast"), ("llama", "host")]
QUICK = (("AdapterTrainer", "llama", ""), ("Trainer", "gpt2", ""))


@pytest.mark.parametrize(
    ("kind", "family", "bf16"),
    [
        pytest.param(kind, *way, marks=() if (kind, *way) in QUICK else pytest.mark.slow)
        for kind in ("Trainer", "AdapterTrainer")
        for way in WAYS
    ],
)
def test_it_trains_and_its_folder_loads(kind: str, family: str, bf16: str, tmp_path: Path) -> None:
    """Both keep the host out of their checkpoints, and both resume from them."""
    host = tiny.make(family, loss_type="ForCausalLM")
    model = tiny.attach(host.bfloat16() if bf16 == "host" else host)
    before, own = tokenised.weights(model), {name: p.clone() for name, p in host.named_parameters()}
    made = (Trainer if kind == "Trainer" else training.AdapterTrainer)(
        model=model,
        args=arguments(tmp_path, bf16=bool(bf16), save_strategy="steps", save_steps=2, max_steps=4),
        train_dataset=tokenised.dataset(),
        data_collator=collator(),
    )
    made.train()
    assert tokenised.unmoved(model, before) == []
    assert {value.dtype for value in model.adapters.parameters()} == {torch.float32}
    assert all(torch.equal(value, own[name]) for name, value in host.named_parameters())
    made.save_model(str(tmp_path / "saved"))
    largest = max(path.stat().st_size for path in (tmp_path / "saved").iterdir())
    assert largest < 6 * sum(value.numel() for value in model.adapters.parameters())
    fresh = tiny.make(family)
    loaded = mmattn.load(fresh.bfloat16() if bf16 == "host" else fresh, tmp_path / "saved")
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.adapters.parameters(), model.adapters.parameters(), strict=True)
    )
    after = tokenised.weights(model)
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(value, after[name]) for name, value in model.adapters.named_parameters()) or bf16


def test_memories_of_one_length_need_no_collator(tmp_path: Path) -> None:
    """The Trainer keeps the column, since `forward` of an adapted model names it."""
    model = tiny.attach(tiny.make("llama"))
    before = tokenised.weights(model)
    Trainer(model=model, args=arguments(tmp_path), train_dataset=tokenised.dataset(lengths=False)).train()
    assert tokenised.unmoved(model, before) == []


def test_rows_without_a_memory(tmp_path: Path) -> None:
    rows = tokenised.rows(4)
    rows[1]["memory"], rows[2]["memory"] = None, []
    batch = collator()(rows)
    assert batch["memory"].lengths == [2, 0, 0, 5] and set(batch) > {"input_ids", "labels", "attention_mask"}
    assert "memory" not in collator()(rows[1:3])
    blank = collator(memory_dim=tiny.MEMORY_DIM)(rows[1:3])
    assert blank["memory"].lengths == [0, 0]
    model = tiny.attach(tiny.make("llama"))
    model(**blank).loss.backward()
    assert all(value.grad is not None and not value.grad.any() for value in model.adapters.parameters())


def test_what_a_memory_may_be(tmp_path: Path) -> None:
    memory = tiny.memory(1)
    memory.save(tmp_path / "memory")
    values = [
        memory,
        memory.tokens[0],
        memory.tokens[0].double().numpy(),
        memory.tokens[0].tolist(),
        tmp_path / "memory",
    ]
    row = tokenised.rows(1)[0]
    ids = {"input_ids": row["input_ids"]}
    batch = training.MemoryCollator(default_data_collator, "seen")([ids | {"seen": value} for value in values])
    assert torch.equal(batch["memory"].tokens, memory.tokens.expand(5, -1, -1))
    for wrong in (torch.ones(2, 3, 4), [1.0, 2.0], tiny.memory(2), [[1.0], [1.0, 2.0]], ["a"]):
        with pytest.raises(ShapeError, match="the memory of a row must"):
            training.MemoryCollator(default_data_collator)([row | {"memory": wrong}])


def test_a_column_that_was_dropped_is_missed() -> None:
    rows = [{"input_ids": [5, 6]}]
    with pytest.raises(ConfigError, match=r"no column 'memory' .* only input_ids: .* remove_unused_columns=False"):
        training.MemoryCollator(default_data_collator)(rows)
