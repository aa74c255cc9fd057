"""Fresh neighbours while text is generated: asked for once per chunk, in every way of generating."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from tests import tiny
from tests.adapters.chunked.chunks import LENGTH, ROWS, SIZE, Library, attach, complete_chunks
from tests.tiny import assert_close

NEW = 13  # two chunks are completed on the way

FAMILIES = ["llama", "gemma3_text", "gpt2", "bloom", "mamba"]
families = pytest.mark.parametrize("family", FAMILIES)


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


@pytest.mark.parametrize(("family", "how"), tiny.cache_settings(FAMILIES, CACHES))
def test_caches_agree(family, how):
    s, library = scene(family), Library()
    assert torch.equal(generate(s.model, s.ids, memory=library, **how), s.rows)
    assert set(library.chunks) == complete_chunks(torch.cat([s.ids, s.rows], 1)[:, :-1])
    assert len(set(library.chunks)) == len(library.chunks)


@pytest.mark.parametrize(("family", "how"), tiny.cache_settings(FAMILIES, DRAFTS))
def test_drafts_do_not_change_the_answer(family, how):
    s, library = scene(family), Library()
    if "assistant" in how:
        how = {"assistant_model": tiny.make(family)}
    got = generate(s.model, s.ids[:1], memory=library, **how)
    assert torch.equal(got, s.rows[:1])
    # A draft that is refused may have completed a chunk, which is then asked for in vain.
    assert complete_chunks(torch.cat([s.ids[:1], got], 1)[:, :-1]) <= set(library.chunks)
