"""Gradients of inserted tokens: those of the plain form, through the host's own reading, whatever recomputes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmattn
from mmattn.errors import ConditionError
from tests import tiny
from tests.adapters.inserted.reference import CLOSE, attach, distance, embedded

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


@pytest.mark.parametrize("recompute", [False, True])
def test_beside_a_lora(recompute: bool) -> None:
    """A LoRA on the host gets the gradients of the plain form, those through what the host reads included."""
    from peft import LoraConfig, get_peft_model

    host: Any = get_peft_model(tiny.make("llama"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for name, parameter in host.named_parameters():
            if "lora" in name:
                parameter.normal_(0.0, 0.1)
    model = attach(host.eval(), gate=False)
    ids, memory = tiny.text(2, 9), tiny.memory(2)
    expected = {name: one.clone() for name, one in plain_gradients(model, ids, memory).items()}
    assert sum("lora" in name for name in expected) == 4 * tiny.LAYERS
    if recompute:
        model.train()
        tiny.checkpoint(host, use_reentrant=False)
    result = gradients(model, ids, memory)
    for name, one in expected.items():
        assert distance(result[name], one) <= CLOSE, name
    # The adapter frozen, a LoRA is still trained by what the host reads with it.
    model.adapters.requires_grad_(False)
    again = gradients(model, ids, memory)
    lora = [name for name in expected if "lora" in name]
    assert set(again) == set(lora) and all(distance(again[name], expected[name]) <= CLOSE for name in lora)


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
        prepared = model.prepare(memory)
        model.train()(ids, memory=prepared)
        assert not prepared.nbytes(), "what is read with dropout is read once"
        model.eval()(ids, memory=prepared)
        assert prepared.nbytes()
    assert not torch.equal(first, second)
    assert torch.equal(*calm) and torch.equal(model(ids, memory=memory).logits.detach(), calm[0])


@pytest.mark.parametrize("gate", [True, False])
def test_it_learns_a_table(gate: bool) -> None:
    """A fresh adapter learns to have a frozen host name what a slot says; with another row's slot it is wrong."""
    torch.manual_seed(0)
    model = mmattn.attach(tiny.make("llama"), mmattn.adapters.InsertedAdapter(tiny.MEMORY_DIM, gate=gate)).train()
    said, names = torch.randn(8, 1, tiny.MEMORY_DIM), torch.arange(20, 28)
    optimiser = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    ids = torch.full((8, 1), 5)
    for _ in range(200):
        logits = model(ids, memory=mmattn.Memory(said + 0.1 * torch.randn_like(said))).logits[:, -1]
        loss = torch.nn.functional.cross_entropy(logits, names)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.eval()
    with torch.no_grad():
        right = (model(ids, memory=mmattn.Memory(said)).logits[:, -1].argmax(-1) == names).float().mean()
        shuffled = model(ids, memory=mmattn.Memory(said.roll(1, 0))).logits[:, -1].argmax(-1)
    assert right >= 0.99 and (shuffled == names).float().mean() <= 0.2
    assert torch.equal(model(ids).logits.detach(), tiny.make("llama")(ids).logits.detach())
