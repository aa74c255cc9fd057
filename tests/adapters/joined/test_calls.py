"""A memory that is joined belongs to the call: ways to generate, packed rows, requests, training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import mmattn
from mmattn.errors import ConditionError
from tests import tiny
from tests.adapters.joined.reference import CLOSE, answer, distance
from tests.adapters.joined.test_adapter import LENGTHS, adapted

NEW = 6
#: Beams have a test of their own.
WAYS = {name: given for name, given in tiny.WAYS.items() if name not in ("greedy", "beams")}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "mistral"])
def test_generate(family: str, way: str) -> None:
    """Each way to generate writes what plain decoding writes, which is what forwards of the whole text say."""
    model, ids, memory = adapted(family), tiny.text(1), tiny.memory(1)
    inputs: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "memory": memory}
    expected = ids
    for _ in range(NEW):
        expected = torch.cat([expected, answer(model, expected, memory=memory)[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(ids, **inputs), expected)
    assert torch.equal(model.generate(ids, **inputs, **WAYS[way]), expected)
    plain = tiny.make(family).generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    assert not torch.equal(plain, expected)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_beams_and_padding(family: str) -> None:
    """Rows of several lengths, padded on the left, write what each writes alone, by one or three beams."""
    model, memory = adapted(family), tiny.memory(3, lengths=LENGTHS)
    rows = [tiny.text(1, length, seed=length)[0] for length in (7, 3, 5)]
    ids, keep = tiny.left_padded(rows)
    for beams, cache in ((1, "dynamic"), (3, "dynamic"), (1, "static")):
        inputs: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
        inputs["cache_implementation"] = cache
        result = model.generate(ids, attention_mask=keep, memory=memory, **inputs)
        for number, row in enumerate(rows):
            alone = model.generate(row[None], memory=memory[[number]], **inputs)
            assert torch.equal(result[number, -NEW - len(row) :], alone[0])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_continuous_batching(family: str) -> None:
    """Requests that transformers schedules together write what each writes alone; one without a memory, as the host."""
    model = adapted(family)
    prompts = [tiny.text(1, length, seed=length)[0].tolist() for length in (4, 9, 6, 4)]
    memories = [tiny.memory(1, lengths=[3]), tiny.memory(1, seed=1), None, tiny.memory(1, seed=2, lengths=[0])]
    settings = {
        "generation_config": GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=64, page_size=16, max_batch_tokens=64),
    }
    result = [one.generated_tokens for one in model.generate_batch(prompts, memory=memories, **settings).values()]
    for ids, memory, written in zip(prompts, memories, result, strict=True):
        alone = model.generate(torch.tensor([ids]), memory=memory, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        assert written == alone[0, len(ids) :].tolist()


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
