"""Fresh neighbours while text is generated: asked for once per chunk, in every way of generating."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import peft
import pytest
import torch

import mmattn
from mmattn.errors import ConditionError, ShapeError
from tests import tiny
from tests.adapters.chunked.chunks import LENGTH, ROWS, SIZE, SLOTS, Library, attach, complete_chunks, neighbours
from tests.tiny import assert_close, differs

NEW = 13  # two chunks are completed on the way

families = pytest.mark.parametrize("family", tiny.FAMILIES)
few_families = pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "bloom", "mamba"])


@functools.cache
def scene(family: str) -> SimpleNamespace:
    """A host with an open chunked adapter, and the greedy continuation of each row made alone and without a cache."""
    s = SimpleNamespace(model=attach(tiny.make(family)), ids=tiny.text(ROWS, LENGTH))
    rows = [generate(s.model, s.ids[i : i + 1], memory=Library(), use_cache=False) for i in range(ROWS)]
    s.rows = torch.cat(rows)
    s.own = generate(tiny.make(family), s.ids)
    return s


@torch.no_grad()
def generate(model, ids, **kwargs):
    """New tokens only (b, NEW)."""
    out = model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False} | kwargs)
    return out[:, ids.shape[1] :]


@families
def test_with_a_cache_as_without(family):
    s, library = scene(family), Library()
    got = generate(s.model, s.ids, memory=library)
    assert torch.equal(got, s.rows) and not torch.equal(got, s.own)
    # Each chunk was asked for once, as soon as it was complete: all those of the prompt, then those that followed.
    text = torch.cat([s.ids, got], 1)
    assert set(library.chunks) == complete_chunks(text[:, :-1]) and len(set(library.chunks)) == len(library.chunks)
    assert len(library.asked) == 3 and len(library.asked[0]) == 3 * ROWS
    for number, chunks in enumerate(library.asked[1:], 3):
        assert set(map(tuple, chunks.tolist())) == complete_chunks(text[:, number * SIZE : (number + 1) * SIZE])
    again = Library()
    assert torch.equal(generate(s.model, s.ids, memory=again, use_cache=False), s.rows)
    assert again.chunks == library.chunks


@families
@torch.no_grad()
def test_token_by_token_equals_one_pass(family):
    s = scene(family)
    how = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = s.model.generate(s.ids, memory=Library(), **how)
    full = s.model(out.sequences, memory=Library()).logits[:, LENGTH - 1 : -1]
    assert_close(torch.stack(out.logits, 1), full)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
@torch.no_grad()
def test_before_its_layer_token_by_token_equals_one_pass(family):
    settings = {"position": "before", "layout": {"norm": "rms", "activation": "swiglu", "memory_norm": False}}
    model, ids = attach(tiny.make(family), **settings), tiny.text(ROWS, LENGTH)
    how = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, memory=Library(), **how)
    full = model(out.sequences, memory=Library()).logits
    assert_close(torch.stack(out.logits, 1), full[:, LENGTH - 1 : -1])
    host_output = tiny.own(out.sequences, family)
    assert differs(full, host_output) and torch.equal(full[:, : SIZE - 1], host_output[:, : SIZE - 1])


@families
def test_neighbours_are_fresh(family):
    """What was found for the prompt alone gives other tokens than what is found on the way, and later."""
    s = scene(family)
    result = Library()(s.ids[:, : 3 * SIZE].reshape(-1, SIZE))
    memory = mmattn.Memory.cat([result[[3 * row + chunk for row in range(ROWS)]] for chunk in range(3)])
    segments = torch.arange(3).repeat_interleave(result.length).expand(ROWS, -1)
    memory = mmattn.Memory(memory.tokens, memory.mask, segments)
    with torch.no_grad():
        stale = s.model.generate(
            s.ids,
            memory=memory,
            max_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        fresh = s.model(torch.cat([s.ids, stale.sequences[:, LENGTH:]], 1), memory=Library()).logits
    logits, upto = torch.stack(stale.logits, 1), 4 * SIZE - LENGTH
    assert_close(logits[:, :upto], fresh[:, LENGTH - 1 : LENGTH - 1 + upto])
    assert differs(logits[:, upto], fresh[:, LENGTH - 1 + upto])


@families
def test_keys_and_values_are_made_once_per_chunk(family):
    s, rows = scene(family), []
    hooks = [
        s.model.adapters["default"]
        .attention(layer)
        .kv_proj.k_proj.register_forward_hook(lambda _, args, out: rows.append(args[0].shape[0]))
        for layer in (0, 2)
    ]
    library = Library()
    generate(s.model, s.ids, memory=library)
    for hook in hooks:
        hook.remove()
    assert sum(rows) == 2 * len(library.chunks) and len(library.chunks) > 3 * ROWS


@families
def test_beams_read_what_their_own_words_found(family):
    s, how = scene(family), {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True}
    how |= {"output_scores": True, "max_new_tokens": NEW, "do_sample": False}
    library = Library()
    with torch.no_grad():
        out = s.model.generate(s.ids, memory=library, **how)
        slow = s.model.generate(s.ids, memory=Library(), use_cache=False, **how)
        rows = [s.model.generate(s.ids[i : i + 1], memory=Library(), **how) for i in range(ROWS)]
        text = out.sequences
        full = s.model(text, memory=Library()).logits[:, LENGTH - 1 : -1].log_softmax(-1)
    assert torch.equal(text, slow.sequences)
    assert torch.equal(text, torch.cat([row.sequences for row in rows]))
    assert_close(out.sequences_scores, torch.cat([row.sequences_scores for row in rows]))
    # The score of a beam is what one pass over its text gives: no beam read what another one found.
    said = full.gather(-1, text[:, LENGTH:, None])[..., 0].mean(1)
    assert_close(out.sequences_scores, said)
    assert complete_chunks(text[:, :-1]) <= set(library.chunks) and len(set(library.chunks)) == len(library.chunks)
    assert len(library.chunks) > 5 * ROWS, "the beams were never of different minds"


@families
def test_sampling(family):
    s = scene(family)

    def sample(seed, **kwargs):
        torch.manual_seed(seed)
        return generate(s.model, s.ids, memory=Library(), do_sample=True, **kwargs)

    first = sample(3)
    assert torch.equal(first, sample(3)) and not torch.equal(first, sample(4))
    assert torch.equal(first, sample(3, use_cache=False))
    with torch.no_grad():
        text = torch.cat([s.ids, first], 1)
        out = s.model.generate(
            text[:, :-1],
            attention_mask=torch.ones_like(text[:, :-1]),
            memory=Library(),
            max_new_tokens=1,
            return_dict_in_generate=True,
            output_logits=True,
        )
        assert_close(out.logits[0], s.model(text[:, :-1], memory=Library()).logits[:, -1])
    assert torch.equal(sample(5, top_k=1, num_return_sequences=2), s.rows.repeat_interleave(2, 0))


@families
def test_left_padding_changes_nothing(family):
    """Rows complete their chunks at different steps."""
    s, library = scene(family), Library()
    rows = [tiny.text(1, length, seed=length)[0] for length in (3, 17, 9)]
    ids, keep = tiny.left_padded(rows)
    got = generate(s.model, ids, attention_mask=keep, memory=library)
    want = [generate(s.model, row[None], memory=Library()) for row in rows]
    assert torch.equal(got, torch.cat(want))
    texts = [torch.cat([row, new])[None] for row, new in zip(rows, got, strict=True)]
    assert set(library.chunks) == set().union(*(complete_chunks(text[:, :-1]) for text in texts))
    assert len(set(library.chunks)) == len(library.chunks) and len(library.asked) > 4


CACHES = {"static": {"cache_implementation": "static"}, "chunked": {"prefill_chunk_size": 4}}
DRAFTS = {"assistant": {"assistant": 0}, "prompt lookup": tiny.PROMPT_LOOKUP}


@pytest.mark.parametrize(("family", "how"), tiny.cache_settings(tiny.FAMILIES, CACHES))
def test_caches_agree(family, how):
    s, library = scene(family), Library()
    assert torch.equal(generate(s.model, s.ids, memory=library, **how), s.rows)
    assert set(library.chunks) == complete_chunks(torch.cat([s.ids, s.rows], 1)[:, :-1])
    assert len(set(library.chunks)) == len(library.chunks)


@pytest.mark.parametrize(("family", "how"), tiny.cache_settings(tiny.FAMILIES, DRAFTS))
def test_drafts_do_not_change_the_answer(family, how):
    s, library = scene(family), Library()
    if "assistant" in how:
        how = {"assistant_model": tiny.make(family)}
    got = generate(s.model, s.ids[:1], memory=library, **how)
    assert torch.equal(got, s.rows[:1])
    # A draft that is refused may have completed a chunk, which is then asked for in vain.
    assert complete_chunks(torch.cat([s.ids[:1], got], 1)[:, :-1]) <= set(library.chunks)


@few_families
def test_a_memory_with_segments(family):
    """The neighbours of the chunks to come may be given with those of the prompt."""
    s, memory = scene(family), neighbours(chunks=7)
    rows = torch.cat([generate(s.model, s.ids[i : i + 1], memory=memory[i], use_cache=False) for i in range(ROWS)])
    prepared = s.model.prepare(memory)
    for how in ({"memory": memory}, {"memory": prepared}, {"memory": prepared, "prefill_chunk_size": 4}):
        if family not in tiny.RUNNING_STATE or "prefill_chunk_size" not in how:
            assert torch.equal(generate(s.model, s.ids, **how), rows)
    with s.model.condition(memory):
        assert torch.equal(generate(s.model.host, s.ids), rows)
    beams = generate(s.model, s.ids, memory=memory, num_beams=3)
    alone = [generate(s.model, s.ids[i : i + 1], memory=memory[i], num_beams=3) for i in range(ROWS)]
    assert torch.equal(beams, torch.cat(alone))
    with pytest.raises(ShapeError, match="2 .*3|3 .*2"):
        generate(s.model, s.ids, memory=neighbours(2))


@pytest.mark.parametrize("use_cache", [True, False])
@torch.no_grad()
def test_guidance_reads_twice(use_cache):
    """The pass without the prompt is a text of its own, whose chunks are counted from its first token."""
    s, memory, text = scene("llama"), neighbours(1, chunks=7), tiny.text(1, LENGTH)
    got = generate(s.model, text, memory=memory, guidance_scale=1.7, use_cache=use_cache)
    for token in got[0]:
        whole, bare = (
            s.model(ids, memory=memory).logits[:, -1].log_softmax(-1) for ids in (text, text[:, LENGTH - 1 :])
        )
        assert (bare + 1.7 * (whole - bare)).argmax() == token
        text = torch.cat([text, token.view(1, 1)], 1)
    assert differs(bare, tiny.own(text[:, LENGTH - 1 : -1])[:, -1].log_softmax(-1)), "the bare text read nothing"
    if use_cache:
        with pytest.raises(ConditionError, match="whole text"):
            generate(s.model, s.ids[:1], memory=Library(), guidance_scale=1.7)


@few_families
def test_the_hosts_own_generate(family):
    s, library = scene(family), Library()
    with s.model.condition(library):
        assert torch.equal(generate(s.model.host, s.ids), s.rows)
        assert torch.equal(generate(s.model.host, s.ids), s.rows)
        with s.model.disable_adapter():
            assert torch.equal(generate(s.model.host, s.ids), s.own)
    assert len(library.chunks) == 5 * ROWS, "what was found belongs to the block"
    assert torch.equal(generate(s.model, s.ids), s.own)
    assert torch.equal(generate(s.model, s.ids, memory=Library(lambda total: 0)), s.own)


@torch.no_grad()
def test_rows_that_find_nothing_are_the_hosts_own():
    """Neighbours for some chunks only: a row reads its own, or nothing until its next chunk."""
    s = scene("llama")
    silent = set(complete_chunks(s.ids[1:2])) | complete_chunks(torch.cat([s.ids, s.own], 1)[1:2])
    library = Library()

    def some(ids):
        result = library(ids)
        there = torch.tensor([[tuple(row) not in silent] for row in ids.tolist()])
        return mmattn.Memory(result.tokens, there & (result.mask if result.mask is not None else True))

    got = generate(s.model, s.ids, memory=some)
    assert torch.equal(got[1], s.own[1])
    assert torch.equal(got[[0, 2]], s.rows[[0, 2]])


@torch.no_grad()
def test_finding_may_ask_the_host_itself():
    """Neighbours made of the host's own hidden states, by the host whose text is being written."""
    model, ids = attach(tiny.make("llama"), memory_dim=32), tiny.text(ROWS, LENGTH)
    twin = tiny.make("llama")
    for condition in (model, model.host):

        def find(chunks, lm=condition):
            return mmattn.Memory(lm(chunks, output_hidden_states=True).hidden_states[-1])

        want = model(ids, memory=lambda chunks: find(chunks, twin)).logits
        assert torch.equal(model(ids, memory=find).logits, want)
        got = generate(model, ids, memory=find)
        assert torch.equal(got, generate(model, ids, memory=lambda chunks: find(chunks, twin)))


@pytest.mark.parametrize("family", ["llama", "mamba"])  # mamba does not say how much text it has read
@torch.no_grad()
def test_embeddings_have_no_chunks_to_ask_for(family):
    s = scene(family)
    embeddings = s.model.host.get_input_embeddings()(s.ids)
    memory = neighbours(chunks=7)
    out = s.model.generate(inputs_embeds=embeddings, memory=memory, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out, generate(s.model, s.ids, memory=memory))
    with pytest.raises(ConditionError, match="whole text"):
        s.model.generate(inputs_embeds=embeddings, memory=Library(), max_new_tokens=NEW, do_sample=False)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("order", ["adapter, lora", "lora, adapter", "lora, adapter on the peft model"])
@torch.no_grad()
def test_beside_a_lora(order):
    ids, lm = tiny.text(ROWS, LENGTH), tiny.make("llama")
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    if order == "adapter, lora":
        model = attach(lm)
        guest = peft.get_peft_model(lm, config)
    else:
        guest = peft.get_peft_model(lm, config)
        model = attach(lm if order == "lora, adapter" else guest)
    for writer in (model, guest):
        library = Library()
        with model.condition(library):
            out = writer.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)
        assert set(library.chunks) == complete_chunks(out[:, :-1])
        full = model(out, memory=Library()).logits[:, LENGTH - 1 : -1]
        assert torch.equal(full.argmax(-1), out[:, LENGTH:])
    model.unload()
    assert "prepare_inputs_for_generation" not in lm.__dict__


def test_each_thread_finds_its_own():
    s = scene("llama")
    libraries = [Library(lambda total, more=more: SLOTS + more) for more in range(4)]
    want = [generate(s.model, s.ids, memory=library) for library in libraries]
    assert len({tuple(out.flatten().tolist()) for out in want}) > 1
    with ThreadPoolExecutor(4) as pool:
        for got, expected in zip(
            pool.map(lambda library: generate(s.model, s.ids, memory=library), libraries * 3), want * 3, strict=True
        ):
            assert torch.equal(got, expected)
