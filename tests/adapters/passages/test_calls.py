"""Invariant 106: passages belong to the call: rows, ways to generate, other adapters, and no trace after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmattn
from mmattn.errors import ConditionError
from tests import tiny
from tests.adapters.joined_hosts import CLOSE, answer, distance
from tests.kv_store.passage_hosts import PASSAGES, TEXT, reader, text

NEW = 6


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "mistral"])
def test_each_row_has_its_own(family: str) -> None:
    """Invariant 106: rows answer as each does alone, and a row without passages as the host does, bit for bit."""
    model, passages = reader(family)
    rows = [[0, 1], [], [2], [1, 1, 0]]
    ids = torch.stack([torch.tensor(TEXT).roll(row) for row in range(4)])
    result = answer(model, ids, memory=passages.select(rows))
    for number, row in enumerate(rows):
        alone = answer(model, ids[[number]], memory=passages.select([row]))
        assert distance(result[[number]], alone) <= CLOSE
    host = answer(tiny.make(family), ids)
    assert torch.equal(result[1], host[1])
    assert torch.equal(answer(model, ids, memory=passages.select([[]] * 4)), host)
    assert torch.equal(answer(model, ids), host)
    for number in (0, 2, 3):
        assert distance(result[[number]], host[[number]]) > 100 * CLOSE
    some = passages.select(rows)[[3, 0]]
    assert some.batch == 2 and torch.equal(
        answer(model, ids[[3, 0]], memory=some)[1:],
        answer(model, ids[[3, 0]], memory=passages.select([rows[3], rows[0]]))[1:],
    )


WAYS = tiny.WAYS | {"several beams": {"num_beams": 4, "num_return_sequences": 2}}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "cohere"])
def test_generate(family: str, way: str) -> None:
    """Invariant 106: `generate` after a leading passage writes what it writes with the passage in the prompt."""
    model, passages = reader(family)
    inputs = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | WAYS[way]
    whole = torch.tensor([[*PASSAGES[0], *TEXT]])
    expected = tiny.make(family).generate(whole, **inputs)[:, len(PASSAGES[0]) :]
    result = model.generate(text(), memory=passages.select([[0]]), **inputs)
    assert torch.equal(result, expected)
    with model.condition(passages.select([[0]])):
        assert torch.equal(model.host.generate(text(), **inputs), expected)
    plain = tiny.make(family).generate(text(), **inputs)
    assert torch.equal(model.generate(text(), **inputs), plain) and not torch.equal(plain, expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mistral"])
def test_padded_prompts(family: str) -> None:
    """Invariant 106: prompts of several lengths, padded on the left, write what each writes alone."""
    model, passages = reader(family)
    inputs: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    short = 5
    ids = torch.tensor([TEXT, [0] * (len(TEXT) - short) + list(TEXT[:short])])
    result = model.generate(ids, attention_mask=ids != 0, memory=passages.select([[2, 0], [1]]), **inputs)
    first = model.generate(ids[:1], memory=passages.select([[2, 0]]), **inputs)
    second = model.generate(ids[1:, -short:], memory=passages.select([[1]]), **inputs)
    assert torch.equal(result[:1], first) and torch.equal(result[1:, -NEW - short :], second)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_continuous_batching(family: str) -> None:
    """Invariant 106: requests that transformers schedules together write what each writes alone; one without
    passages, as the host.
    """
    model, passages = reader(family)
    prompts = [list(TEXT[:4]), list(TEXT), list(TEXT[2:9]), list(TEXT[:4])]
    memories = [passages.select([[0]]), passages.select([[2, 1]]), None, passages.select([[1, 0, 2]])]
    answers = model.generate_batch(prompts, memory=memories, **tiny.paged(NEW))
    result = [one.generated_tokens for one in answers.values()]
    for ids, memory, written in zip(prompts, memories, result, strict=True):
        alone = model.generate(torch.tensor([ids]), memory=memory, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        assert written == alone[0, len(ids) :].tolist()
    assert result[0] != result[3]


def test_layers_that_lost_their_hook_are_noticed() -> None:
    """A layer whose config was replaced raises instead of answering without its passages."""
    model, passages = reader("llama")
    model.host.model.layers[1].self_attn.config = model.host.config
    with pytest.raises(ConditionError, match="did not run or lost"):
        model(text(), memory=passages.select([[0]]))


@pytest.mark.parametrize("family", ["llama", "gpt2", "glm", "mistral"])
def test_recorded_weights(family: str) -> None:
    """What is recorded are the weights of the host's own softmax: those of a prompt, and the answer is as it was."""
    model, passages = reader(family)
    memory = passages.select([[0]])
    plain = answer(model, text(), memory=memory)
    with mmattn.inspect.record(model) as weights:
        assert torch.equal(answer(model, text(), memory=memory), plain)
    host = tiny.make(family)
    host.set_attn_implementation("eager")
    begin = len(PASSAGES[0])
    with torch.no_grad():
        expected = host(torch.tensor([[*PASSAGES[0], *TEXT]]), output_attentions=True).attentions
    for layer in range(tiny.LAYERS):
        (result,) = weights["default", layer]
        assert distance(result, expected[layer][:, :, begin:, :begin]) <= CLOSE
