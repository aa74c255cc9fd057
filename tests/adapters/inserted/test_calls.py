"""Inserted tokens belong to the call: caches of the caller, other adapters, edits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmattn
from tests import tiny
from tests.adapters.inserted.reference import attach
from tests.adapters.joined_hosts import CLOSE, answer, distance

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
    """One memory is read once for many calls and steps of `generate`, and again after an edit of what it depends on."""
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
    edited = [
        memory.tokens,
        model.adapter("default").projector[2].weight,
        model.adapter("default").memory_norm.bias,
        model.host.model.layers[1].self_attn.v_proj.weight,
    ]
    random = torch.Generator().manual_seed(0)
    with model.condition(prepared):
        before = answer(model, ids)
        for number, tensor in enumerate(edited, 2):
            with torch.no_grad():
                tensor.add_(torch.randn(tensor.shape, generator=random))
            result = answer(model, ids)
            assert count == [number] and distance(result, before) > 100 * CLOSE
            assert torch.equal(answer(model, ids, memory=mmattn.Memory(memory.tokens.clone())), result)
            count[0], before = number, result


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_another_lora_reads_anew() -> None:
    """What the host has read with a LoRA is not used without it, and is there again with it."""
    from peft import LoraConfig, get_peft_model

    host = get_peft_model(tiny.make("llama"), LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    model, ids = attach(host.eval()), tiny.text(1, 7)
    prepared = model.prepare(tiny.memory(1))
    with_lora = answer(model, ids, memory=prepared)
    with host.disable_adapter():
        without = answer(model, ids, memory=prepared)
        assert torch.equal(without, answer(model, ids, memory=tiny.memory(1)))
    assert distance(without, with_lora) > 100 * CLOSE
    assert torch.equal(answer(model, ids, memory=prepared), with_lora)


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
