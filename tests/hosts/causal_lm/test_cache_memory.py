"""A cache that was read without a memory does not go on with one in silence, nor one that was read with it without."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, DynamicCache, StaticCache

import mmattn
from mmattn.errors import ConditionError
from tests import tiny
from tests.families.building import tiny_model

WITHOUT, WITH = "read without a memory: read them with memory=", "read with a memory, and this call has none"
FAMILIES = ("llama", "gpt2", "gemma3_text", "mamba")
pytestmark = pytest.mark.usefixtures("without_gradients")
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}


def going_on(family: str, cache: Any) -> dict[str, Any]:
    return {"cache_params": cache} if family == "mamba" and not tiny.IS_5_24 else tiny.going_on(cache)


def cache_of(output: Any) -> Any:
    """The cache in an output, by whichever name."""
    return next(output[name] for name in ("cache", "past_key_values", "cache_params") if name in output)


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def model() -> Any:
    return tiny.attach(tiny.make("llama"))


@pytest.mark.parametrize("family", FAMILIES)
def test_read_without_a_memory(family: str) -> None:
    """Invariant 141: refused, also as a copy, in a block and by `generate`; without one it goes on."""
    model, ids, memory = tiny.attach(tiny.make(family)), tiny.text(2, 6), tiny.memory(2)
    cache = cache_of(model(ids[:, :4], use_cache=True))
    copies = [copy.deepcopy(cache), copy.copy(cache)]
    for one in (cache, *copies):
        with pytest.raises(ConditionError, match=WITHOUT):
            model(ids[:, 4:5], memory=memory, **going_on(family, one))
    with pytest.raises(ConditionError, match=WITHOUT), model.condition(memory):
        model.host(ids[:, 4:5], **going_on(family, cache))
    with pytest.raises(ConditionError, match=WITHOUT):
        model.generate(ids, memory=memory, **going_on(family, cache), **GREEDY)
    expected = model(ids).logits[:, 4:5]
    tiny.assert_close(model(ids[:, 4:5], **going_on(family, copies[0])).logits, expected)


def test_read_before_the_adapter_came() -> None:
    lm, ids = tiny.make("llama"), tiny.text(1, 6)
    cache = cache_of(lm(ids[:, :4], use_cache=True))
    model = tiny.attach(lm)
    with pytest.raises(ConditionError, match=WITHOUT):
        model(ids[:, 4:], memory=tiny.memory(1), **tiny.going_on(cache))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "gpt_neox"])
def test_arrived_says_that_earlier_tokens_saw_nothing(family: str) -> None:
    """Invariant 141: the answer is that of the whole text with it; later turns need no `arrived=`."""
    model, ids, memory = tiny.attach(tiny.make(family)), tiny.text(2, 7), tiny.memory(2)
    counts = torch.tensor([[0, 0, 0, 0, 5, 5, 5]]).expand(2, -1)
    whole = model(ids, memory=memory, arrived=counts).logits
    cache = cache_of(model(ids[:, :4], use_cache=True))
    second = model(ids[:, 4:6], memory=memory, arrived=counts[:, 4:6], **tiny.going_on(cache)).logits
    third = model(ids[:, 6:], memory=memory, **tiny.going_on(cache)).logits
    tiny.assert_close(torch.cat([second, third], 1), whole[:, 4:], 1e-4)
    cache = cache_of(model(ids[:, :6], use_cache=True))
    counts = torch.tensor([[0, 0, 0, 0, 0, 0, 5]]).expand(2, -1)
    tokens = model.generate(ids, memory=memory, arrived=counts, **tiny.going_on(cache), **GREEDY)
    assert torch.equal(tokens, model.generate(ids, memory=memory, arrived=counts, **GREEDY))


@pytest.mark.parametrize("family", FAMILIES)
def test_read_with_a_memory(family: str) -> None:
    """Invariant 141: turns with a memory pass, the same or another; one without is refused, unless a block says so."""
    model, ids, memory = tiny.attach(tiny.make(family)), tiny.text(2, 7), tiny.memory(2)
    cache = cache_of(model(ids[:, :3], memory=memory, use_cache=True))
    for token, read in ((3, memory), (4, tiny.memory(2, seed=1))):
        model(ids[:, token : token + 1], memory=read, **going_on(family, cache))
    for one in (cache, copy.deepcopy(cache)):
        with pytest.raises(ConditionError, match=WITH):
            model(ids[:, 5:6], **going_on(family, one))
    with model.disable_adapter():
        model(ids[:, 5:6], **going_on(family, cache))
    with pytest.raises(ConditionError, match=WITHOUT):
        model(ids[:, 6:], memory=memory, **going_on(family, cache))


def test_a_cache_by_its_place_and_outputs_that_are_tuples(model: Any) -> None:
    ids, memory = tiny.text(1, 6), tiny.memory(1)
    _, cache = model(ids[:, :4], memory=memory, use_cache=True, return_dict=False)
    with pytest.raises(ConditionError, match=WITH):
        model(ids[:, 4:], None, None, cache)
    model(ids[:, 4:], None, None, cache, memory=memory)


@pytest.mark.parametrize("way", tiny.WAYS)
def test_turns_of_generate(model: Any, way: str) -> None:
    """The cache that `generate` returns goes on with a memory, and is refused without one."""
    if way == "without a cache":
        pytest.skip("it returns none")
    memory = tiny.memory(1)
    inputs = GREEDY | tiny.WAYS[way] | {"return_dict_in_generate": True}
    first = model.generate(tiny.text(1, 6), memory=memory, **inputs)
    cache, ids = cache_of(first), torch.cat([first.sequences, tiny.text(1, 2, seed=3)], 1)
    if way == "static cache":
        pytest.skip("it has no room for more")
    rows = {"num_beams": 1} if way == "beams" else {}
    if way == "beams":
        cache.batch_select_indices(torch.tensor([0]))
    with pytest.raises(ConditionError, match=WITH):
        model.generate(ids, **tiny.going_on(cache), **GREEDY | rows)
    model.generate(ids, memory=memory, **tiny.going_on(cache), **GREEDY | rows)


def test_no_trace_without_a_memory(model: Any) -> None:
    """Nothing is noted on caches of the bare host."""
    cache = cache_of(model(tiny.text(1, 4), use_cache=True))
    assert vars(cache).keys() == vars(cache_of(tiny.make("llama")(tiny.text(1, 4), use_cache=True))).keys()


@pytest.mark.parametrize("kind", ["of the host", "dynamic", "static"])
def test_caches_of_a_compiled_host(kind: str) -> None:
    """Invariant 141: what a graph has read with a memory goes on outside of it."""
    model, ids, memory = tiny.attach(tiny.make("llama")), tiny.text(2, 6), tiny.memory(2)
    expected = model(ids, memory=memory).logits[:, 5:]
    config = model.host.config
    cache: Any = {"dynamic": DynamicCache(config=config), "static": StaticCache(config=config, max_cache_len=16)}.get(
        kind
    )
    compiled = torch.compile(model.host, backend="eager", fullgraph=True)
    with model.condition(model.prepare(memory)):
        output = compiled(ids[:, :4], use_cache=True, **({} if cache is None else tiny.going_on(cache)))
        cache = cache_of(output)
        compiled(ids[:, 4:5], use_cache=True, **tiny.going_on(cache))
    tiny.assert_close(model(ids[:, 5:], memory=memory, **tiny.going_on(cache)).logits, expected, 1e-4)
    with pytest.raises(ConditionError, match=WITH):
        model(ids[:, 5:], **tiny.going_on(cache))


@pytest.mark.parametrize("where", ["decoder", "encoder"])
def test_an_encoder_decoder(where: str) -> None:
    host = tiny_model("t5", AutoModelForSeq2SeqLM)
    model = mmattn.attach(
        host, mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, layers=(0, 2), num_heads=2, where=where)
    )
    ids, memory = tiny.text(1, 5) % 20 + 2, tiny.memory(1)
    for first, second, message in (({}, {"memory": memory}, WITHOUT), ({"memory": memory}, {}, WITH)):
        cache = cache_of(model(ids, decoder_input_ids=ids[:, :2], use_cache=True, **first))
        with pytest.raises(ConditionError, match=message):
            model(ids, decoder_input_ids=ids[:, 2:3], **tiny.going_on(cache), **second)
        model(ids, decoder_input_ids=ids[:, 2:3], **tiny.going_on(cache), **first)
