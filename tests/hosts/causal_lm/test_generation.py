"""Every family through every way of generating: the tokens are those of one row at a time, each with its own memory."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from tests import tiny
from tests.tiny import assert_close

ROWS, LENGTH, NEW = 3, 7, 5

families = pytest.mark.parametrize("family", tiny.FAMILIES)


@functools.cache
def scene(family: str) -> SimpleNamespace:
    """A host with open adapters, an untouched twin, and the greedy continuation of each row made alone."""
    ids, memory = tiny.text(ROWS, LENGTH), tiny.memory(ROWS, lengths=[5, 2, 3])
    s = SimpleNamespace(model=tiny.attach(tiny.make(family)), twin=tiny.make(family), ids=ids, memory=memory)
    s.rows = torch.cat([generate(s.model, ids[i : i + 1], memory=memory[i]) for i in range(ROWS)])
    s.own = generate(s.twin, ids)
    return s


@torch.no_grad()
def generate(model, ids, **kwargs):
    """New tokens only (b, NEW)."""
    out = model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False} | kwargs)
    return out[:, ids.shape[1] :]


@families
def test_greedy_batches_equal_single_rows(family):
    s = scene(family)
    assert torch.equal(generate(s.model, s.ids, memory=s.memory), s.rows)
    assert not torch.equal(s.rows, s.own)
    order = torch.tensor([2, 0, 1])
    assert torch.equal(generate(s.model, s.ids[order], memory=s.memory[order]), s.rows[order])
    with s.model.condition(s.memory):
        assert torch.equal(generate(s.model.host, s.ids), s.rows)
    assert torch.equal(generate(s.model, s.ids, memory=s.model.prepare(s.memory)), s.rows)


@families
@torch.no_grad()
def test_token_by_token_equals_one_pass(family):
    s = scene(family)
    out = s.model.generate(
        s.ids, memory=s.memory, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    full = s.model(out.sequences, memory=s.memory).logits[:, LENGTH - 1 : -1]
    assert_close(torch.stack(out.logits, 1), full)


@families
def test_beams_read_the_memory_of_their_row(family):
    s, memory = scene(family), tiny.memory(ROWS, lengths=[5, 0, 3])
    how = {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True}
    how |= {"max_new_tokens": NEW, "do_sample": False}
    with torch.no_grad():
        out = s.model.generate(s.ids, memory=memory, **how)
        rows = [s.model.generate(s.ids[i : i + 1], memory=memory[i], **how) for i in range(ROWS)]
        own = s.twin.generate(s.ids, **how)
    assert torch.equal(out.sequences, torch.cat([row.sequences for row in rows]))
    assert_close(out.sequences_scores, torch.cat([row.sequences_scores for row in rows]))
    silent = torch.tensor([False, False, True, True, False, False])
    assert torch.equal(out.sequences[silent], own.sequences[silent])
    assert not torch.equal(out.sequences[:2], own.sequences[:2])
    assert not torch.equal(out.sequences[4:], own.sequences[4:])


@pytest.mark.parametrize("beams", [2, 3])
def test_beams_see_the_slots_that_had_arrived_in_their_row(beams):
    """Invariant 189."""
    model, ids, memory = tiny.attach(tiny.make("llama")), tiny.text(3), tiny.memory(3)
    arrived = torch.stack([torch.arange(7), torch.arange(7).clamp(max=1), torch.full((7,), 5)]).clamp(max=5)
    options = {"num_beams": beams, "max_new_tokens": 5, "do_sample": False}
    found = model.generate(ids, memory=memory, arrived=arrived, **options)
    for row in range(3):
        alone = model.generate(ids[[row]], memory=memory[row], arrived=arrived[[row]], **options)
        assert torch.equal(found[[row]], alone)
    assert not torch.equal(found, model.generate(ids, memory=memory, **options))


@families
def test_left_padding_changes_nothing(family):
    s = scene(family)
    rows = [tiny.text(1, length, seed=length)[0] for length in (3, 7, 5)]
    memory = tiny.memory(3, lengths=[5, 2, 0])
    ids, keep = tiny.left_padded(rows)
    kwargs = {"attention_mask": keep, "output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    with torch.no_grad():
        got = s.model.generate(ids, memory=memory, max_new_tokens=NEW, **kwargs)
        for i, row in enumerate(rows):
            kwargs["attention_mask"] = torch.ones(1, len(row), dtype=torch.long)
            want = s.model.generate(row[None], memory=memory[i], max_new_tokens=NEW, **kwargs)
            assert torch.equal(got.sequences[i, ids.shape[1] :], want.sequences[0, len(row) :])
            assert_close(got.logits[0][i], want.logits[0][0])


CACHES = {
    "off": {"use_cache": False},
    "static": {"cache_implementation": "static"},
    "chunked": {"prefill_chunk_size": 3},
}
# The assistant reads no memory; one is right about the host without adapters, the other about nothing.
DRAFTS = {
    "assistant": {"assistant": 0},
    "another tongue": {"assistant": 1},
    "prompt lookup": tiny.PROMPT_LOOKUP,
}


@pytest.mark.parametrize(("family", "how"), tiny.cache_settings(tiny.FAMILIES, CACHES))
def test_caches_agree(family, how):
    s = scene(family)
    assert torch.equal(generate(s.model, s.ids, memory=s.memory, **how), s.rows)


@pytest.mark.parametrize(("family", "how"), tiny.cache_settings(tiny.FAMILIES, DRAFTS))
def test_drafts_do_not_change_the_answer(family, how):
    s = scene(family)
    if "assistant" in how:
        how = {"assistant_model": tiny.make(family, seed=how["assistant"])}
    for i in range(2):
        assert torch.equal(generate(s.model, s.ids[i : i + 1], memory=s.memory[i], **how), s.rows[i : i + 1])
