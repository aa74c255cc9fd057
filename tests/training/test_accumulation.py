"""Gradient accumulation of the AdapterTrainer: a step is that of its whole batch, however it is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput

import mmattn
from mmattn import training
from tests import tiny
from tests.families.building import tiny_model
from tests.training import small_run

#: Targets of each row: those of a micro-batch are never as many as those of another.
LENGTHS = (7, 2, 5, 3, 11)


class WithItsOwnLoss(LlamaForCausalLM):
    """A head that takes no further arguments, and whose loss is a mean."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> CausalLMOutput:  # type: ignore[override]
        logits = super().forward(input_ids, attention_mask).logits
        loss = None if labels is None else cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss, logits)


def host_of(kind: str) -> PreTrainedModel:
    if kind == "its own loss":
        host = WithItsOwnLoss(tiny.config("llama")).eval()
        host.load_state_dict(tiny.make("llama").state_dict())
        return host
    if kind == "llama":
        return tiny.make(kind)
    of_rows = kind.endswith("of rows")
    host = tiny_model(kind.split()[0], AutoModelForSequenceClassification if of_rows else AutoModelForSeq2SeqLM)
    host.config.decoder_start_token_id, host.config.eos_token_id = 0, 2  # BART reads a row at its end
    return host


def collated(kind: str, rows: list[int]) -> dict[str, Any]:
    """Texts and labels of these rows, padded on the right, with a memory."""
    made: dict[str, Any] = {}
    if kind == "llama" or kind == "its own loss":
        texts = [tiny.text(1, LENGTHS[row] + 1, seed=row)[0] for row in rows]
        made["labels"] = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-100)
        made["input_ids"] = made["labels"].clamp(min=0)
    else:
        made["input_ids"] = torch.cat([tiny.text(1, 6, seed=row) % 20 + 3 for row in rows])
        if kind.endswith("of rows"):
            made["input_ids"][:, -1] = 2
            made["labels"] = torch.tensor(rows) % 2
        else:
            texts = [tiny.text(1, LENGTHS[row], seed=10 + row)[0] % 20 + 3 for row in rows]
            made["labels"] = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-100)
            made["decoder_input_ids"] = torch.nn.functional.pad(made["labels"].clamp(min=0)[:, :-1], (1, 0))
    made["memory"] = torch.cat([tiny.memory(1, seed=row).tokens for row in rows])
    return made


def weights_after_a_step(kind: str, folder: Path, size: int, accumulation: int, **more: Any) -> torch.Tensor:
    torch.manual_seed(0)
    host = host_of(kind)
    model = tiny.open_gates(mmattn.attach(host, mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, every=1, num_heads=2)))
    before = torch.cat([one.detach().flatten().clone() for one in model.adapters.parameters()])
    given: dict[str, Any] = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
    given |= {"num_train_epochs": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0} | more
    trainer = training.AdapterTrainer(
        model=model,
        args=small_run.arguments(folder, lr_scheduler_type="constant", **given),
        train_dataset=list(range(len(LENGTHS))),
        data_collator=lambda rows: collated(kind, rows),
        optimizers=(torch.optim.SGD(model.adapters.parameters(), lr=1.0), None),
    )
    model.eval()
    for module in host.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    trainer.train()
    assert trainer.state.global_step == 1
    return torch.cat([one.detach().flatten() for one in model.adapters.parameters()]) - before


FAMILIES = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "bart", "marian", "bert of rows")]


@pytest.mark.parametrize("kind", ["t5", "its own loss", *FAMILIES])
def test_a_step_is_that_of_its_whole_batch(kind: str, tmp_path: Path) -> None:
    """Invariant 154."""
    whole = weights_after_a_step(kind, tmp_path / "whole", 5, 1)
    assert whole.norm() > 0
    for size, accumulation in ((2, 3), (1, 5)):
        tiny.assert_close(weights_after_a_step(kind, tmp_path / f"{size}", size, accumulation), whole, 1e-4)
    if kind in ("t5", "llama"):
        smooth = {"label_smoothing_factor": 0.1}
        whole = weights_after_a_step(kind, tmp_path / "smooth", 5, 1, **smooth)
        tiny.assert_close(weights_after_a_step(kind, tmp_path / "cut", 2, 3, **smooth), whole, 1e-4)


@pytest.mark.parametrize("kind", ["llama", "t5", "bert of rows", "its own loss"])
@pytest.mark.parametrize("outputs", [False, True], ids=["loss alone", "with outputs"])
def test_a_loss_of_evaluation_is_that_of_all_targets(kind: str, outputs: bool, tmp_path: Path) -> None:
    """Invariant 154: however rows are cut into batches, of 2 and of 5."""
    model = mmattn.attach(host_of(kind), mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, every=1, num_heads=2))
    tiny.open_gates(model)
    found = []
    for size in (2, 5):
        args = small_run.arguments(tmp_path, per_device_eval_batch_size=size)
        metrics = (lambda prediction: {}) if outputs else None
        trainer = training.AdapterTrainer(
            model, args, data_collator=lambda rows: collated(kind, rows), compute_metrics=metrics
        )
        found.append(trainer.evaluate(list(range(len(LENGTHS))))["eval_loss"])
    with torch.no_grad():
        want = float(model(**collated(kind, list(range(len(LENGTHS))))).loss)
    assert found == pytest.approx([want, want], rel=1e-5)
