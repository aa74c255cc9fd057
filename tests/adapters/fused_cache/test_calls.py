"""What was read of a prompt belongs to the call: caches of the host, and fused once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import tiny
from tests.adapters.fused_cache.fused_hosts import adapted, read
from tests.adapters.joined_hosts import CLOSE, answer, distance

NEW = 6
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


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
