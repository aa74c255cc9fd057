"""Inserted tokens are the host's own call with their embeddings before those of the text, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmattn
from tests import tiny
from tests.adapters.inserted.reference import LENGTHS, attach, embedded, inserted, slots, weighed
from tests.adapters.joined_hosts import CLOSE, LEARNED, ROTARY, answer, distance


@pytest.mark.parametrize("family", [*ROTARY, *LEARNED])
def test_they_are_embeddings_before_the_text(family: str) -> None:
    """Without a gate, each row is the host with its slots in front, within 1e-5; a row without is the host's."""
    model, host = attach(tiny.make(family), gate=False), tiny.make(family)
    ids, memory = tiny.text(4, 13), tiny.memory(4, lengths=LENGTHS)
    result = answer(model, ids, memory=memory)
    for row, length in enumerate(LENGTHS):
        before = slots(model, memory, row)
        assert before.shape[1] == length
        expected = inserted(host, before, ids[[row]])
        assert distance(result[[row]], expected) <= CLOSE
        if length:
            assert distance(answer(host, ids)[[row]], expected) > 100 * CLOSE, "the slots matter, or nothing was shown"
    if family != "mixtral":  # experts mix rows by rounding
        assert torch.equal(result[2], answer(host, ids)[2])


@pytest.mark.parametrize("family", ROTARY)
def test_open_gates_are_the_plain_form(family: str) -> None:
    """With its gates open, the gated form is the plain one, within 1e-5."""
    model, host = attach(tiny.make(family)), tiny.make(family)
    ids, memory = tiny.text(2, 13), tiny.memory(2, lengths=[5, 3])
    result = answer(model, ids, memory=memory)
    for row in range(2):
        assert distance(result[[row]], inserted(host, slots(model, memory, row), ids[[row]])) <= CLOSE


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "gpt2", "opt"])
def test_gates_weigh_what_the_slots_change(family: str) -> None:
    """Half open gates add a part of what the slots change to the attention of each layer, as one call of the host."""
    model, host = attach(tiny.make(family)), tiny.make(family)
    opened = (0.3, 1.1, -0.4)
    with torch.no_grad():
        for layer, value in enumerate(opened):
            model.adapter("default").block(layer).gate.gate.fill_(value)
    ids, memory = tiny.text(1, 13), tiny.memory(1)
    gates = torch.tensor(opened).tanh().tolist()
    expected = weighed(host, slots(model, memory), ids, gates, learned=family in LEARNED)
    assert distance(answer(model, ids, memory=memory), expected) <= CLOSE
    halved = weighed(tiny.make(family), slots(model, memory), ids, [gate / 2 for gate in gates], family in LEARNED)
    assert distance(halved, expected) > 100 * CLOSE
    assert distance(answer(model, ids, memory=memory, adapter_scale=0.5), halved) <= CLOSE


@pytest.mark.parametrize("gate", [True, False])
def test_where_real_slots_lie_is_nothing(gate: bool) -> None:
    """Real slots stand one after the other: what lies between them, NaN too, changes nothing, bit for bit."""
    model, ids = attach(tiny.make("llama"), gate=gate), tiny.text(2, 7)
    memory = tiny.memory(2, m=3)
    expected = answer(model, ids, memory=memory)
    tokens = torch.full((2, 6, tiny.MEMORY_DIM), torch.nan)
    mask = torch.tensor([[0, 1, 0, 0, 1, 1], [1, 1, 0, 1, 0, 0]]).bool()
    tokens[mask] = memory.tokens.flatten(0, 1)
    assert torch.equal(answer(model, ids, memory=mmattn.Memory(tokens, mask)), expected)
    assert distance(answer(model, ids, memory=memory.tokens.flip(1)), expected) > 100 * CLOSE, "their order is read"


@pytest.mark.parametrize("projection", ["mlp", "linear"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "granite"])
def test_slots_begin_as_large_as_embeddings(family: str, projection: str) -> None:
    """A fresh projector gives slots of the size of the host's embeddings."""
    model = attach(tiny.make(family), projection=projection)
    result = slots(model, mmattn.Memory(7 * torch.randn(1, 300, tiny.MEMORY_DIM))).square().mean().sqrt()
    expected = model.host.get_input_embeddings()(torch.arange(tiny.VOCAB)).square().mean().sqrt()
    assert 0.8 < float(result / expected) < 1.25


NEW = 6
GIVEN: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("gate", [False, True])
def test_text_goes_on_in_a_cache_of_the_caller(gate: bool) -> None:
    """Text given in two pieces with a cache of the caller's stands where it stands in one."""
    for family in ("llama", "gpt2", "mistral"):
        model, ids, memory = attach(tiny.make(family), gate=gate), tiny.text(2, 13), tiny.memory(2, lengths=[5, 2])
        expected = answer(model, ids, memory=memory)
        with torch.no_grad():
            first = model(ids[:, :5], memory=memory, use_cache=True)
            second = model(ids[:, 5:], memory=memory, **tiny.going_on(first.past_key_values))
        assert distance(second.logits, expected[:, 5:]) <= CLOSE


def test_the_host_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One memory is read once for many calls and steps of `generate`."""
    model, ids = attach(tiny.make("llama")), tiny.text(1, 7)
    memory = tiny.memory(1)
    prepared, reader = model.prepare(memory), type(model.adapter("default").reader)
    count, original = [0], reader.read

    def read(self: Any, *args: Any) -> Any:
        count[0] += 1
        return original(self, *args)

    monkeypatch.setattr(reader, "read", read)
    for _ in range(2):
        model.generate(ids, memory=prepared, **GIVEN)
        answer(model, ids, memory=prepared)
    assert count == [1] and prepared.nbytes() == 2 * 4 * 5 * 16 * tiny.LAYERS


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_beside_passages(family: str) -> None:
    """Gated tokens stand beside passages, whose positions they leave alone: fresh ones change nothing, bit for bit."""
    model = mmattn.attach(tiny.make(family), mmattn.adapters.PassageAdapter(), "read")
    passages = mmattn.hosts.PassageCache(model)
    passages.add([[5, 6, 7, 8]], progress=False)
    expected = answer(model, tiny.text(1), memory=passages.select([[0]]))
    attach(model, opened=False, name="seen")
    both = {"read": passages.select([[0]]), "seen": tiny.memory(1)}
    assert torch.equal(answer(model, tiny.text(1), memory=both), expected)
    tiny.open_gates(model)
    result = answer(model, tiny.text(1), memory=both)
    assert distance(result, expected) > 100 * CLOSE
    assert distance(result, answer(model, tiny.text(1), memory={"seen": tiny.memory(1)})) > 100 * CLOSE


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


@pytest.mark.parametrize(
    ("family", "gate"), [("llama", False), ("gpt2", False), ("mistral", False), ("gemma3_text", False), ("llama", True)]
)
def test_gradients_are_those_of_the_plain_form(family: str, gate: bool) -> None:
    """Gradients of the projector are those of embeddings before the text."""
    model, ids, memory = attach(tiny.make(family), gate=gate), tiny.text(2, 9), tiny.memory(2)
    expected = {name: one.clone() for name, one in plain_gradients(model, ids, memory).items()}
    result = gradients(model, ids, memory)
    assert {name for name in result if "gate" not in name} == set(expected) and expected
    for name, one in expected.items():
        assert distance(result[name], one) <= CLOSE, name


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
