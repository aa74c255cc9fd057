"""Gradient checkpointing of adapter blocks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from mmattn import training
from tests import tiny
from tests.training import small_run


def opened() -> Any:
    """A model whose gates are open, so that every parameter has a gradient."""
    model = small_run.attach(dropout=0.0)
    with torch.no_grad():
        for name, parameter in model.adapters.named_parameters():
            if name.endswith("gate"):
                parameter.fill_(0.6)
    return model


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
