"""A step of training reads no value of a tensor that a device may still compute, but the sum of its losses, once."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from mmattn import training
from mmattn.training import losses, trainer
from tests import tiny
from tests.training import small_run


class Waits(TorchDispatchMode):
    """Notes where values are read, and where a mask of unknown count chooses.

    AdamW counts its steps on the CPU, and collators make batches there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        chosen = args[1] if func.__name__.startswith("index") and isinstance(args[1], (list, tuple)) else ()
        masked = any(torch.is_tensor(one) and one.dtype is torch.bool for one in chosen)
        if masked or func.__name__.startswith(("_local_scalar_dense", "nonzero", "equal", "unique", "masked_select")):
            frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()]
            if not any("torch/optim/" in frame or "mmattn/data/" in frame for frame in frames):
                self.found.append(" ".join(frames[-9:]))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels and losses are not read, as if they were on a device."""
    for module in (losses, trainer):
        monkeypatch.setattr(module, "may_read", lambda tensor: False)


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("chunk_size", [None, 4, "auto"])
def test_the_loss(chunk_size: Any) -> None:
    """Invariant 214: padding and prompts are not counted out, in chunks or not; value and gradients stay."""
    host = tiny.make("llama").requires_grad_(False)
    host.model.layers[1].requires_grad_(True)
    ids = tiny.text(3, 11)
    labels = ids.clone()
    labels[1, :7], labels[2, 5:] = -100, -100
    batch = training.TextBatch(ids, None, labels)
    want = training.token_nats(host, batch, None).double()
    training.token_nats(host, batch, 4)  # the head is compared with the logits once
    with Waits() as waits:
        total, count = training.sum_nats(host, batch, chunk_size)
        (training.mean_nats(host, batch, chunk_size) + total).backward()
    assert waits.found == []
    assert torch.is_tensor(count) and int(count) == 10 + 4 + 4
    got = {name: one.grad for name, one in host.named_parameters() if one.grad is not None}
    host.zero_grad()
    (want.sum() + want.sum() / 18).backward()
    tiny.assert_close(total.detach(), want.sum().detach().float(), 1e-5)
    for name, one in host.named_parameters():
        if one.grad is not None:
            tiny.assert_close(got[name], one.grad, 2e-4)


@pytest.mark.usefixtures("as_on_a_device")
def test_what_padding_holds_stays_out_of_the_loss() -> None:
    """Invariant 214: where padding is computed on, NaN in its hidden states reaches neither loss nor gradients."""
    host = tiny.make("llama").requires_grad_(False)
    ids = tiny.text(2, 7)
    labels = ids.clone()
    labels[1, 4:] = -100
    wide = torch.zeros(2, 7, 32)
    wide[1, 4:] = torch.nan
    wide.requires_grad_(True)
    with host.model.norm.register_forward_hook(lambda module, args, out: out + wide if len(out) == 2 else out):
        loss, _ = training.sum_nats(host, training.TextBatch(ids, None, labels), 4)
        loss.backward()
    assert loss.isfinite() and wide.grad is not None and wide.grad[0].any()
    assert wide.grad.isfinite().all() and not wide.grad[1, 4:].any()


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_of_the_trainer(tmp_path: Path, accumulation: int) -> None:
    """Invariant 214: it reads nothing beyond what forward and backward of its batches do."""
    whole, inside = Waits(), Waits()

    class Second(TrainerCallback):
        """Notes the waits of the second step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                whole.__enter__()
            elif state.global_step == 2:
                whole.__exit__(None, None, None)

    model = small_run.attach()
    given = {"max_steps": 3, "per_device_train_batch_size": 3, "logging_steps": 7}
    arguments = small_run.arguments(tmp_path, gradient_accumulation_steps=accumulation, **given)
    made = training.AdapterTrainer(
        model=model, args=arguments, data_collator=small_run.collator(),
        train_dataset=[row for row in small_run.rows() if row.has_memory], callbacks=[Second()],
    )  # fmt: skip
    made.train()
    (batch, *_) = made.get_train_dataloader()
    with inside:
        for _ in range(accumulation):
            model(**batch).loss.backward()
    assert len(whole.found) <= len(inside.found), whole.found
