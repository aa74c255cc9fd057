"""Gradients of inserted tokens: those of the plain form, through the host's own reading, whatever recomputes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmattn
from mmattn.errors import ConditionError
from tests import tiny
from tests.adapters.inserted.reference import attach, embedded
from tests.adapters.joined_hosts import CLOSE, distance

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def gradients(model: Any, ids: Tensor, memory: mmattn.Memory) -> dict[str, Tensor]:
    """The gradients of a call with labels, of all that is trained."""
    model.zero_grad()
    model(ids, labels=ids, memory=memory).loss.backward()
    return {name: one.grad for name, one in model.named_parameters() if one.requires_grad and one.grad is not None}


def plain_gradients(model: Any, ids: Tensor, memory: mmattn.Memory) -> dict[str, Tensor]:
    """The same of the plain form: the host alone, with the slots before the text."""
    model.zero_grad()
    before = model.adapter("default").read(memory).tokens
    x = embedded(model.host, before, ids)
    labels = torch.cat([torch.full(before.shape[:2], -100), ids], 1)
    labels[:, before.shape[1]] = -100  # the first token of a text is predicted by nothing
    model.host(inputs_embeds=x, labels=labels, use_cache=False).loss.backward()
    return {name: one.grad for name, one in model.named_parameters() if one.requires_grad and one.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("family", "gate"), [("llama", False), ("gpt2", False), ("mistral", False), ("gemma3_text", False), ("llama", True)]
)
def test_gradients_are_those_of_the_plain_form(family: str, gate: bool, recompute: bool) -> None:
    """Gradients of the projector are those of embeddings before the text, with recomputed layers too."""
    model, ids, memory = attach(tiny.make(family), gate=gate), tiny.text(2, 9), tiny.memory(2)
    expected = {name: one.clone() for name, one in plain_gradients(model, ids, memory).items()}
    if recompute:
        model.train()
        tiny.checkpoint(model.host, use_reentrant=False)
    result = gradients(model, ids, memory)
    assert {name for name in result if "gate" not in name} == set(expected) and expected
    for name, one in expected.items():
        assert distance(result[name], one) <= CLOSE, name


def test_reentrant_checkpointing_is_refused() -> None:
    """Reentrant checkpointing would lose gradients of what the host reads, and is refused in words."""
    model = attach(tiny.make("llama")).train()
    tiny.checkpoint(model.host, use_reentrant=True)
    with pytest.raises(ConditionError, match="use_reentrant"):
        model(tiny.text(1), labels=tiny.text(1), memory=tiny.memory(1))
    with torch.no_grad():
        model.eval()(tiny.text(1), memory=tiny.memory(1))


def test_dropout_acts_on_what_is_read() -> None:
    """In training mode the host's dropout acts on its reading, too; evaluation is the same each time."""
    model = attach(tiny.make("llama", attention_dropout=0.5), gate=False)
    ids, memory = tiny.text(1), tiny.memory(1)
    with torch.no_grad():
        calm = [model(ids, memory=memory).logits for _ in range(2)]
        reader = model.adapter("default").reader
        model.train()
        inputs = torch.ones(1, 3, 32), torch.ones(1, 3).bool(), torch.arange(3)[None]
        first, second = (reader.read("default", *inputs)[1][2] for _ in range(2))
        model.eval()
        prepared = model.prepare(tiny.memory(1))
        model.train()(ids, memory=prepared)
        assert not prepared.nbytes(), "what is read with dropout is read once"
        model.eval()(ids, memory=prepared)
        assert prepared.nbytes()
    assert not torch.equal(first, second)
    assert torch.equal(*calm) and torch.equal(model(ids, memory=memory).logits.detach(), calm[0])
