"""A cache that was read without a memory does not go on with one in silence, nor one that was read with it without."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    DynamicCache,
    EncoderDecoderCache,
    StaticCache,
)

import mmattn
from mmattn.errors import ConditionError
from tests import tiny
from tests.families.building import tiny_model

WITHOUT, WITH = "read without a memory, or put together", "read with a memory, and this call has none"
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


# Without a cache none is returned, and a static one has no room for more.
@pytest.mark.parametrize("way", [way for way in tiny.WAYS if way not in ("without a cache", "static cache")])
def test_turns_of_generate(model: Any, way: str) -> None:
    """The cache that `generate` returns goes on with a memory, and is refused without one."""
    memory = tiny.memory(1)
    inputs = GREEDY | tiny.WAYS[way] | {"return_dict_in_generate": True}
    first = model.generate(tiny.text(1, 6), memory=memory, **inputs)
    cache, ids = cache_of(first), torch.cat([first.sequences, tiny.text(1, 2, seed=3)], 1)
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


@pytest.mark.parametrize(
    "kind", ["static", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("of the host", "dynamic"))]
)
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


SOUNDS = torch.randn(2, 16, 60, generator=torch.Generator().manual_seed(1))


def made(family: str) -> Any:
    """A tiny host of any kind."""
    if family == "whisper":
        return tiny_model(family, AutoModelForSpeechSeq2Seq)
    return tiny_model(family, AutoModelForSeq2SeqLM) if family in ("t5", "bart") else tiny.make(family)


def seeing(host: Any, **settings: Any) -> Any:
    adapter = mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, every=1, num_heads=2, **settings)
    return tiny.open_gates(mmattn.attach(host, adapter))


def write(model: Any, count: int, memory: Any = None, **more: Any) -> Any:
    settings = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True} | more
    return model.generate(SOUNDS, memory=memory, max_new_tokens=count, **settings)


@pytest.mark.parametrize("where", ["decoder", "encoder"])
def test_whisper_goes_on_from_the_cache_that_its_generate_puts_together(where: str) -> None:
    """Invariant 151: of the caches of its rows; also as a copy, reordered, shortened, and made of its two parts."""
    model, memory = seeing(made("whisper"), where=where), tiny.memory(2)
    whole = write(model, 6, memory).sequences
    assert not torch.equal(whole, write(model, 6).sequences)

    def parts(cache: Any) -> Any:
        return EncoderDecoderCache(cache.self_attention_cache, cache.cross_attention_cache)

    for change in (lambda cache: cache, copy.deepcopy, copy.copy, parts):
        first = write(model, 3, memory)
        cache = change(cache_of(first))
        with pytest.raises(ConditionError, match=WITH):
            write(model, 3, decoder_input_ids=first.sequences, **tiny.going_on(cache))
        rest = write(model, 3, memory, decoder_input_ids=first.sequences, **tiny.going_on(cache)).sequences
        assert torch.equal(rest[:, -3:], whole[:, -3:])
    cache, order = cache_of(write(model, 4, memory)), torch.tensor([1, 0])
    cache.crop(-1)
    cache.reorder_cache(order)
    with pytest.raises(ConditionError, match=WITH):
        model(SOUNDS[order], decoder_input_ids=whole[order, 3:4], **tiny.going_on(cache))
    model(SOUNDS[order], decoder_input_ids=whole[order, 3:4], memory=memory[order], **tiny.going_on(cache))
    for more in ({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
        first = write(model, 3, memory, **more)
        with pytest.raises(ConditionError, match=WITH):
            model(SOUNDS, decoder_input_ids=first.sequences[:, -1:], **tiny.going_on(cache_of(first)))


def test_a_cache_of_tensors_says_what_is_not_known_of_it() -> None:
    """Invariant 151: it is refused in true words, and goes on where `arrived` says what the tokens see."""
    model, memory = seeing(made("whisper")), tiny.memory(2)
    first = write(model, 3, memory)
    ids = first.sequences[:, -1:]
    given = {"decoder_input_ids": ids, "memory": memory}
    wanted = model(SOUNDS, **given, **tiny.going_on(copy.deepcopy(cache_of(first)))).logits
    cache = EncoderDecoderCache(tuple(cache_of(first)))
    with pytest.raises(ConditionError, match="arrived="):
        model(SOUNDS, **given, **tiny.going_on(cache))
    got = model(SOUNDS, **given, arrived=torch.full_like(ids, 5), **tiny.going_on(cache)).logits
    tiny.assert_close(got, wanted)


@pytest.mark.parametrize("family", ["whisper", "t5", "bart", "llama", "gpt2"])
@pytest.mark.parametrize("assistant", ["the model", "its host", "the bare host"])
def test_a_model_is_its_own_assistant(family: str, assistant: str) -> None:
    """Invariant 151: drafts change no answer."""
    model, memory = seeing(made(family)), tiny.memory(1, seed=4)
    drafts = {"the model": model, "its host": model.host, "the bare host": made(family)}[assistant]
    inputs = SOUNDS[:1] if family == "whisper" else tiny.text(1, 6) % 20 + 2
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 8}
    wanted = model.generate(inputs, memory=memory, **settings)
    assert not torch.equal(wanted, model.generate(inputs, **settings))
    for more in ({"assistant_model": drafts}, tiny.PROMPT_LOOKUP):
        got = model.generate(inputs, memory=memory, **settings | more)
        assert torch.equal(got[:, -8:], wanted[:, -8:])  # Whisper leaves its first token there, as the bare one does
