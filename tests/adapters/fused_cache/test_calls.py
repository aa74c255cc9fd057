"""What was read of a prompt belongs to the call: ways to generate, caches of the host, beams, windows, training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import tiny
from tests.adapters.fused_cache.fused_hosts import adapted, read
from tests.adapters.joined.reference import CLOSE, answer, distance

NEW = 6
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


def written(model: Any, ids: torch.Tensor, memory: Any) -> torch.Tensor:
    """What forwards of the whole text write, one after the other."""
    for _ in range(NEW):
        ids = torch.cat([ids, answer(model, ids, memory=memory)[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("way", [way for way in tiny.WAYS if way not in ("greedy", "beams")])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "mistral"])
def test_generate(family: str, way: str) -> None:
    """Each way to generate writes what forwards of the whole text say, also where a window has passed the prompt."""
    model, ids = adapted(family), tiny.text(1, 8)
    memory = read(ids)
    expected = written(model, ids, memory)
    assert torch.equal(model.generate(ids, memory=memory, **GREEDY), expected)
    assert torch.equal(model.generate(ids, memory=memory, **GREEDY, **tiny.WAYS[way]), expected)
    assert not torch.equal(tiny.make(family).generate(ids, **GREEDY), expected)


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_beams_and_padding(family: str, cache: dict[str, Any]) -> None:
    """Rows of several lengths, padded on the left, write what each writes alone, by one or three beams."""
    model = adapted(family)
    rows = [tiny.text(1, length, seed=length)[0] for length in (7, 3, 5)]
    ids, keep = tiny.left_padded(rows)
    for beams in (1, 3):
        inputs = GREEDY | {"num_beams": beams, **cache}
        result = model.generate(ids, attention_mask=keep, memory=read(ids, keep), **inputs)
        for number, row in enumerate(rows):
            alone = model.generate(row[None], memory=read(row[None]), **inputs)
            assert torch.equal(result[number, -NEW - len(row) :], alone[0])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_texts_in_turn(family: str) -> None:
    """Two texts of one block, each with a cache of the host's, go on in turn; and one goes on in a call of its own."""
    model, ids = adapted(family), tiny.text(2, 6)
    memory, ends = read(ids), [tiny.text(2, 3, seed=seed) for seed in (8, 9)]
    expected = [answer(model, torch.cat([ids, end], 1), memory=memory)[:, 6:] for end in ends]
    with torch.no_grad(), model.condition(memory):
        caches = [model.host(ids, use_cache=True).past_key_values for _ in ends]
        result: list[list[torch.Tensor]] = [[], []]
        for token in range(3):
            for number, (cache, end) in enumerate(zip(caches, ends, strict=True)):
                logits = model.host(end[:, token : token + 1], **tiny.going_on(cache)).logits
                result[number].append(logits)
    for parts, one in zip(result, expected, strict=True):
        assert distance(torch.cat(parts, 1), one) <= CLOSE
    with torch.no_grad():
        cache = model(ids, memory=memory, use_cache=True).past_key_values
        later = [model(ends[0][:, [token]], memory=memory, **tiny.going_on(cache)).logits for token in range(3)]
    assert distance(torch.cat(later, 1), expected[0]) <= CLOSE


def test_fused_once() -> None:
    """Keys and values are fused once for all tokens that are written, and again when a weight was changed."""
    model, ids, counts = adapted("llama"), tiny.text(2, 6), [0]
    memory = model.prepare(read(ids))
    for layer in (0, 2):
        model.adapter("default").block(layer).in_proj.register_forward_hook(
            lambda *_: counts.__setitem__(0, counts[0] + 1)
        )
    model.generate(ids, memory=memory, **GREEDY)
    assert counts == [2]
    with torch.no_grad(), model.condition(memory):
        cache = model.host(ids, use_cache=True).past_key_values
        token = tiny.text(2, 1, seed=4)
        for _ in range(2):
            before = model.host(token, **tiny.going_on(cache)).logits
            cache.crop(-1)
        assert counts == [6]
        model.adapter("default").block(2).gate.gate.zero_()
        model.adapter("default").block(0).out_proj.bias.add_(1.0)
        after = model.host(token, **tiny.going_on(cache)).logits
        assert counts == [8] and distance(after, before) > 100 * CLOSE
