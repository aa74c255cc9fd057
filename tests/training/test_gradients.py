"""Gradient checkpointing of adapter blocks."""

from __future__ import annotations

import contextlib

import pytest

from mmattn import training
from tests import tiny
from tests.training import small_run


@pytest.mark.parametrize("on", [False, True])
def test_gradient_checkpointing_runs_each_block_again_in_the_backward_pass(on: bool) -> None:
    """What it gives back no figure shows: the activations of a block are not held until then."""
    model, ran = tiny.open_gates(small_run.attach(dropout=0.0)).train(), []
    blocks = model.adapter("default").blocks
    for name, block in blocks.items():
        block.attention.register_forward_hook(lambda *_, name=name: ran.append(name))
    with training.gradient_checkpointing(model) if on else contextlib.nullcontext():
        loss = model(tiny.text(2), memory=tiny.memory(2)).logits.sum()
        assert sorted(ran) == sorted(blocks)
        loss.backward()
    assert sorted(ran) == sorted([*blocks, *(blocks if on else ())])
    assert not any("forward" in vars(block) for block in blocks.values())
