"""Gradients of a step are those of the mean over all targets of its batch; averaged weights follow their formula."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmattn import training
from mmattn.training.checkpoints import load_checkpoint, with_prefix
from tests import tiny
from tests.tiny import assert_close
from tests.training import small_run


def opened() -> Any:
    """A model whose gates are open, so that every parameter has a gradient."""
    model = small_run.attach(dropout=0.0)
    with torch.no_grad():
        for name, parameter in model.adapters.named_parameters():
            if name.endswith("gate"):
                parameter.fill_(0.6)
    return model


def first_batch() -> list[training.Row]:
    return next(training.RowBatches(small_run.rows(), 6, seed=3).epoch(0))


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Of the mean over all targets of the first batch, without the loop."""
    model = opened().train()
    total, count = training.sum_nats(model, small_run.collator(tmp_path_factory.mktemp("m")).batch(first_batch()))
    (total / count).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def norm_of(tensors: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([value.flatten() for value in tensors.values()]).norm())


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("clipped", [False, True])
def test_of_a_step(tmp_path: Path, gradients: dict[str, torch.Tensor], micro_batches: int, clipped: bool) -> None:
    """As AdamW's first moments have them, a tenth of the gradient, and as the logged norm says."""
    norm = norm_of(gradients)
    small_run.run(
        tmp_path,
        model=opened(),
        max_steps=1,
        eval_steps=0,
        gradient_accumulation_steps=micro_batches,
        max_grad_norm=norm / 3 if clipped else None,
    )
    (line,) = [json.loads(one) for one in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-4), "the norm before it is clipped"
    tensors, _ = load_checkpoint(tmp_path / "checkpoints" / "step-00000001")
    moments = with_prefix(tensors, "moments")
    model = opened()
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [names[p] for group in training.parameter_groups(model, 1.0) for p in group["params"]]
    for number, name in enumerate(order):
        want = gradients[name] / (3 if clipped else 1)
        assert_close(moments[f"{number}.exp_avg"] * 10, want, 1e-4)


def test_averaged_weights_follow_the_formula(tmp_path: Path) -> None:
    """average ← decay · average + (1 - decay) · weights, from the weights at the beginning on."""
    model = opened()
    average = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    settings = {"ema_decay": 0.875, "max_steps": 4, "save_steps": 1, "save_total_limit": 9, "eval_steps": 0}
    small_run.run(tmp_path, model=model, **settings)
    for step in range(1, 5):
        tensors, _ = load_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}")
        weights, averaged = with_prefix(tensors, "weights"), with_prefix(tensors, "averaged")
        average = {name: 0.875 * value + 0.125 * weights[name] for name, value in average.items()}
        for name, value in average.items():
            assert torch.allclose(averaged[name], value, rtol=1e-5, atol=1e-7), (step, name)
            assert not torch.allclose(averaged[name], weights[name], rtol=1e-4, atol=1e-6), "or nothing is shown"
    after = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(torch.equal(after[name], value) for name, value in averaged.items()), "they are what the run leaves"


@pytest.mark.parametrize("on", [False, True])
def test_gradient_checkpointing_runs_each_block_again_in_the_backward_pass(on: bool) -> None:
    """What it gives back no figure shows: the activations of a block are not held until then."""
    model, ran = opened().train(), []
    blocks = model.adapter("default").blocks
    for name, block in blocks.items():
        block.attention.register_forward_hook(lambda *_, name=name: ran.append(name))
    with training.gradient_checkpointing(model) if on else contextlib.nullcontext():
        loss = model(tiny.text(2), memory=tiny.memory(2)).logits.sum()
        assert sorted(ran) == sorted(blocks)
        loss.backward()
    assert sorted(ran) == sorted([*blocks, *(blocks if on else ())])
    assert not any("forward" in vars(block) for block in blocks.values())
