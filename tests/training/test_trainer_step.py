"""A step of the Trainer: its loss in chunks, one compiled graph of host and adapters, batches from workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import TrainingArguments

from mmattn import training
from tests import tiny
from tests.training import small_run

VOCABULARY = 997


def run(folder: Path, model: Any, rows: list[training.Row], **arguments: Any) -> tuple[list[float], Any]:
    """Train for some steps; returns the loss of each, and the trainer."""
    given = {"max_steps": 3, "per_device_train_batch_size": 3, "learning_rate": 1e-2, "logging_steps": 1} | arguments
    trainer = training.AdapterTrainer(
        model=model, args=small_run.arguments(folder, **given),
        data_collator=small_run.collator(), train_dataset=rows, gate_learning_rate=0.1,
    )  # fmt: skip
    trainer.train()
    return [one["loss"] for one in trainer.state.log_history if "loss" in one], trainer


def attach(family: str = "llama", **changes: Any) -> Any:
    return small_run.attach(tiny.make(family, vocab_size=VOCABULARY, **changes))


def long_rows() -> list[training.Row]:
    """Rows of more than one chunk of tokens; one has no memory."""
    letters = ["abcdefgh"[i % 8] for i in range(311)]
    texts = ["".join(letters[i:]) for i in range(9)]
    return [
        training.Row(text, memory=tiny.memory(1, 5, seed=i) if i else None) for i, text in enumerate(texts)
    ]  # fmt: skip


def most_logits(shapes: small_run.Shapes) -> int:
    """The most rows of a tensor whose last dimension is the vocabulary."""
    return max((one.numel() // VOCABULARY for one in shapes.made if len(one) > 1 and one[-1] == VOCABULARY), default=0)


def leave_as_it_is(module: nn.Module, args: Any, output: Any) -> None:
    """A hook, which may change logits for all that is known: they stand whole."""


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="plain"),
        pytest.param({"gradient_accumulation_steps": 2}, id="accumulated", marks=pytest.mark.slow),
        pytest.param({"bf16": True}, id="bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_loss_is_computed_in_chunks(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """Invariant 215: by default, and it is the host's loss but for rounding."""
    found = {}
    for whole in (False, True):
        model = attach()
        if whole:
            model.host.lm_head.register_forward_hook(leave_as_it_is)
        with small_run.Shapes() as shapes:
            found[whole], _ = run(tmp_path, model, long_rows(), **arguments)
        assert (most_logits(shapes) > 600) is whole
    assert found[False] == pytest.approx(found[True], rel=3e-3 if "bf16" in arguments else 1e-5)


def test_a_loss_with_another_term_stands_whole(tmp_path: Path) -> None:
    """Invariant 215: of experts, whose router has a loss, and with labels that are smoothed."""
    rows = long_rows()[1:]
    for model, arguments in (
        (attach("mixtral", output_router_logits=True), {}),
        (attach(), {"label_smoothing_factor": 0.1}),
    ):
        with small_run.Shapes() as shapes:
            run(tmp_path, model, rows, max_steps=1, **arguments)
        assert most_logits(shapes) > 600


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What was compiled before, and what is compiled here, serves nobody else."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.slow
@pytest.mark.usefixtures("forgotten")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_host_and_adapters_are_compiled_together(tmp_path: Path) -> None:
    """Invariant 216: `torch_compile=True` makes one graph of a forward, for texts and memories of any length."""
    rows = [row for row in small_run.rows() if row.has_memory]
    want, _ = run(tmp_path, small_run.attach(), rows, max_steps=7)
    model = small_run.attach()
    got, trainer = run(
        tmp_path, model, rows, max_steps=7, torch_compile=True, torch_compile_backend="eager"
    )  # fmt: skip
    assert got == pytest.approx(want, rel=1e-5)
    assert trainer.model_wrapped is not model and trainer.model is model
    assert not counters["graph_break"], dict(counters["graph_break"])
    # A graph of the first lengths, one of all others.
    assert counters["stats"]["unique_graphs"] <= 2


def test_batches_of_workers_are_copied_while_the_device_works(tmp_path: Path) -> None:
    """Invariant 214: where a loader pins its batches, copies of them are not waited for."""
    for pinned in (False, True):
        arguments = TrainingArguments(output_dir=str(tmp_path), dataloader_pin_memory=pinned)
        trainer = training.AdapterTrainer(model=small_run.attach(), args=arguments)
        assert trainer.accelerator.non_blocking is pinned
