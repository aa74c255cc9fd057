"""A fused cache changes what a prompt's keys and values are, by what another model has read of the same tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mmattn
from mmattn.adapters import FusedCacheAdapter, JoinedAdapter, PassageAdapter
from mmattn.errors import AttachError, ConditionError, ConfigError, NonFiniteError, ShapeError
from mmattn.testing.case import stir
from tests import tiny
from tests.adapters.composed import composed_hosts as composing
from tests.adapters.fused_cache.fused_hosts import PROJECTED, adapted, fused, read
from tests.adapters.joined_hosts import CLOSE, answer, distance


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of 5, 0 and 2 tokens, padded on the right."""
    ids = tiny.text(3, 5)
    return ids, (torch.arange(5) < torch.tensor([5, 0, 2])[:, None]).long()


@pytest.mark.parametrize("family", PROJECTED)
def test_against_the_slow_definition(family: str) -> None:
    """Keys are fused before they are turned, token by token, in each layer after the layers before it."""
    lengths, ids = [5, 0, 2], tiny.text(3, 11)
    mask = torch.arange(11) < torch.tensor(lengths)[:, None]
    model = adapted(family, gate="head")
    host = tiny.make(family)
    with fused(host, model.adapter("default"), composing.augmenting(), ids, lengths):
        expected = answer(host, ids)
    result = answer(model, ids, memory=read(ids, mask.long()))
    assert distance(result, expected) <= CLOSE
    assert distance(result, answer(host, ids)) > 100 * CLOSE


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "qwen3"])
def test_a_text_at_later_positions(family: str) -> None:
    """What is fused does not depend on where a text stands, but in hosts that learned their positions."""
    model, ids = adapted(family), tiny.text(2, 7)
    memory, later = read(ids), torch.arange(7)[None] + 19
    here, there = answer(model, ids, memory=memory), answer(model, ids, memory=memory, position_ids=later)
    assert (distance(there, here) <= 10 * CLOSE) == (family != "gpt2")
    alone = distance(answer(model, ids, position_ids=later), answer(model, ids))
    assert (alone <= 10 * CLOSE) == (family != "gpt2")


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "mixtral"])
def test_what_is_cached_of_a_prompt(family: str) -> None:
    """Keys at position 0 and values of each token, wherever it stands, whatever is padding beside it."""
    lm = mmattn.AugmentingModel(tiny.make(family, seed=5))
    rows = [tiny.text(1, length, seed=length)[0] for length in (7, 3)]
    ids, mask = tiny.left_padded(rows)
    together = lm.prefill(ids, mask).left_aligned()
    with torch.no_grad():
        cache = lm.lm(rows[0][None], use_cache=True).past_key_values
    for layer, states in enumerate(together.states):
        keys, values = cache.layers[layer].keys[0], cache.layers[layer].values[0]
        first = torch.cat([keys.transpose(0, 1).flatten(1)[0], values.transpose(0, 1).flatten(1)[0]])
        assert distance(states[0, 0], first) <= CLOSE  # nothing was turned there
        for row, alone in enumerate(rows):
            apart = lm.prefill(alone[None]).states[layer][0]
            assert distance(states[row, : len(alone)], apart) <= CLOSE
            assert not states[row, len(alone) :].any()
    if family != "gpt2":
        again = lm.prefill(rows[0][:1].expand(1, 4)).states[0][0]
        assert distance(again[3], again[0]) <= CLOSE  # of the first layer, where all states are those of the token
    assert together.batch == 2 and together.nbytes() == 3 * 2 * 7 * lm.cache_dim * 4


def test_beside_what_is_joined() -> None:
    """Slots beside a fused cache and passages before the text beside a fused cache, in any order."""
    model, ids, slots = adapted("llama", name="fused"), tiny.text(2, 7), tiny.memory(2)
    model.add_adapter("joined", JoinedAdapter(tiny.MEMORY_DIM, every=1))
    stir(model.adapter("joined"))
    model.set_adapter(["fused", "joined"])
    inputs = {"fused": read(ids), "joined": slots}
    result = answer(model, ids, memory=inputs)
    assert distance(answer(model, ids, memory={name: inputs[name] for name in ("joined", "fused")}), result) <= CLOSE
    assert distance(result, answer(model, ids, memory={"fused": inputs["fused"]})) > 100 * CLOSE
    model = mmattn.attach(tiny.make("llama"), PassageAdapter(), "read")
    passages = mmattn.hosts.PassageCache(model)
    passages.add([[5, 6, 7], [9, 11]], progress=False)
    model.add_adapter("fused", FusedCacheAdapter(composing.along().cache_dim, hidden_dim=5))
    model.set_adapter(["read", "fused"])
    inputs = {"fused": read(ids), "read": passages.select([[0, 1], []])}
    alone = answer(model, ids, memory={"read": inputs["read"]})
    assert torch.equal(answer(model, ids, memory=inputs), alone)
    stir(model.adapter("fused"))
    assert distance(answer(model, ids, memory=inputs), alone) > 100 * CLOSE
    reordered = {name: inputs[name] for name in ("read", "fused")}
    assert distance(answer(model, ids, memory=reordered), answer(model, ids, memory=inputs)) <= CLOSE


def test_what_lies_in_padding_changes_nothing() -> None:
    """NaN in the padding of a prompt changes no answer and no gradient; in a token it is refused."""
    model, (ids, mask) = adapted("llama"), prompts()
    clean = read(ids, mask)
    dirty = replace(clean, states=tuple(one.masked_fill(mask[..., None] == 0, torch.nan) for one in clean.states))
    grads = []
    for memory in (clean, dirty):
        model.adapters.zero_grad()
        model(ids, memory=memory).logits.sum().backward()
        grads.append(torch.cat([one.grad.flatten() for one in model.adapters.parameters()]))
    assert torch.equal(answer(model, ids, memory=dirty), answer(model, ids, memory=clean))
    assert torch.isfinite(grads[0]).all() and torch.equal(*grads)
    broken = mmattn.AugmentingModel(tiny.make("llama", seed=3))
    with torch.no_grad():
        broken.lm.model.layers[1].self_attn.v_proj.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError):
        broken.prefill(ids)


def test_what_is_refused() -> None:
    """Other memories, models and texts are refused in words, and so is what the text of a request does not tell."""
    model, ids, lm = adapted("llama"), tiny.text(2, 7), composing.along()
    memory, other, mamba = read(ids), ids.clone(), mmattn.AugmentingModel(tiny.make("mamba"))
    other[1, 3] += 1
    few, narrow = (
        replace(memory, states=states) for states in (memory.states[:3], tuple(one[..., :5] for one in memory.states))
    )
    one_row = {"inputs": [ids[0].tolist()], "memory": [read(ids[:1])]}
    in_two_layers = {"layers": (0, 1), "augmenting_layers": (0,)}
    in_all_layers = FusedCacheAdapter(24, augmenting_layers=(0,))
    for call, error, words in (
        (lambda: model(ids, memory=composing.along()), ShapeError, "prefill"),
        (lambda: model(ids, memory=torch.zeros(2, 3, 4)), ShapeError, "prefill"),
        (lambda: model(ids, memory=few), ShapeError, "layer 4"),
        (lambda: model(ids, memory=narrow), ShapeError, "memory_dim"),
        (lambda: model(other, memory=memory), ConditionError, "token 3 of row 1"),
        (lambda: model.generate_batch(**one_row), ConditionError, "use generate"),
        (lambda: FusedCacheAdapter(24).example_memory(torch.Generator()), ConfigError, "it has no example"),
        (lambda: FusedCacheAdapter(24, **in_two_layers), ConfigError, "one layer for each"),
        (lambda: mmattn.attach(tiny.make("llama"), in_all_layers), AttachError, "name one for each"),
        (lambda: lm.prefill(torch.zeros(2, 3)), ShapeError, "input_ids"),
        (lambda: lm.prefill(ids, torch.ones(2, 3)), ShapeError, "attention_mask"),
        (lambda: mamba.prefill(ids), ConditionError, "ComposedAdapter"),
    ):
        with pytest.raises(error, match=words):
            call()


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
