"""A memory that is joined belongs to the call: packed rows, slots that arrive, training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmattn
from mmattn.errors import ConditionError
from tests import tiny
from tests.adapters.joined.test_adapter import adapted
from tests.adapters.joined_hosts import CLOSE, answer, distance


def test_packed_rows() -> None:
    """Documents of packed rows answer as each does alone with its own row of memory."""
    model, memory = adapted("llama"), tiny.memory(4, lengths=[5, 2, 0, 4])
    ids, lengths = tiny.text(2, 9), ((4, 5), (3, 6))
    positions = torch.stack([torch.cat([torch.arange(one) for one in row]) for row in lengths])
    result = answer(model, ids, position_ids=positions, memory=memory)
    number = 0
    for row, document_lengths in enumerate(lengths):
        start = 0
        for length in document_lengths:
            alone = answer(model, ids[[row], start : start + length], memory=memory[[number]])
            assert distance(result[[row], start : start + length], alone) <= CLOSE
            start, number = start + length, number + 1


def test_slots_that_arrive() -> None:
    """A token sees the slots that had arrived at it."""
    model, ids, memory = adapted("llama", length_norm=2.0), tiny.text(1, 6), tiny.memory(1)
    arrived = torch.tensor([[0, 0, 2, 2, 5, 5]])
    result = answer(model, ids, memory=memory, arrived=arrived)
    assert torch.equal(result[:, :2], answer(model, ids)[:, :2])
    assert distance(result[:, :4], answer(model, ids[:, :4], memory=memory, arrived=arrived[:, :4])) <= CLOSE
    whole = answer(model, ids, memory=memory)
    assert distance(result, whole) > 100 * CLOSE


def _loss(model: Any, ids: torch.Tensor, memory: mmattn.Memory) -> torch.Tensor:
    loss: torch.Tensor = model(ids, labels=ids, memory=memory).loss
    return loss


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_recomputed_layers(family: str) -> None:
    """With recomputed layers the gradients are the same, also of the memory; reentrant ones are refused in words."""
    ids, grads = tiny.text(2), {}
    for recompute in (False, True):
        model, tokens = adapted(family), tiny.memory(2).tokens.requires_grad_()
        if recompute:
            model.train()
            tiny.checkpoint(model.host, use_reentrant=False)
        _loss(model, ids, mmattn.Memory(tokens)).backward()
        grads[recompute] = {name: one.grad for name, one in model.adapters.named_parameters()} | {"": tokens.grad}
    for name, one in grads[False].items():
        assert one.any() and distance(grads[True][name], one) <= CLOSE
    tiny.checkpoint(model.host, use_reentrant=True)
    with pytest.raises(ConditionError, match="reentrant"):
        _loss(model, ids, tiny.memory(2))
    model.eval()
    assert torch.isfinite(answer(model, ids, memory=tiny.memory(2))).all()
