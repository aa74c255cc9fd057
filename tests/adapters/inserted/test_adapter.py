"""Inserted tokens are the host's own call with their embeddings before those of the text."""

from __future__ import annotations

import pytest
import torch

import mmattn
from mmattn.errors import AttachError
from tests import tiny
from tests.adapters.inserted.reference import LENGTHS, attach, inserted, slots, weighed
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


@pytest.mark.parametrize("family", [*ROTARY, *LEARNED])
def test_fresh_gates_are_the_host(family: str) -> None:
    """A fresh adapter with gates is the host bit for bit, also after padding on the left and in `generate`."""
    model, host = attach(tiny.make(family), opened=False), tiny.make(family)
    ids, mask = tiny.left_padded([tiny.text(1, length)[0] for length in (13, 6)])
    memory = tiny.memory(2, lengths=[5, 2])
    assert torch.equal(answer(model, ids, memory=memory), answer(host, ids))
    inputs = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "output_logits": True}
    inputs |= {"return_dict_in_generate": True, "pad_token_id": 0}
    result, expected = model.generate(ids, memory=memory, **inputs), host.generate(ids, **inputs)
    assert torch.equal(torch.stack(result.logits), torch.stack(expected.logits))


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


def test_embeddings_of_another_width_are_refused() -> None:
    """A host whose embeddings are projected to its hidden states is refused in words."""
    with pytest.raises(AttachError, match="have width 24, and its hidden states 32"):
        attach(tiny.make("opt", word_embed_proj_dim=24))


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
