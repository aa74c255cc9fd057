"""Drafts, beams and rows inside `generate`: a row reads its own memory and its own text."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from mmattn.errors import ShapeError
from tests import tiny
from tests.adapters.composed import composed_hosts as composing

ROWS, LENGTH, NEW = 3, 7, 5


@functools.cache
def scene(family: str) -> SimpleNamespace:
    """A host with open adapters, and the greedy continuation of each row made alone."""
    ids, memory = tiny.text(ROWS, LENGTH), tiny.memory(ROWS, lengths=[5, 2, 3])
    s = SimpleNamespace(model=tiny.attach(tiny.make(family)), ids=ids, memory=memory)
    s.rows = torch.cat([generate(s.model, ids[i : i + 1], memory=memory[i]) for i in range(ROWS)])
    assert not torch.equal(s.rows, generate(s.model.host, ids))
    return s


@torch.no_grad()
def generate(model, ids, **kwargs):
    """New tokens only (b, NEW)."""
    out = model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False} | kwargs)
    return out[:, ids.shape[1] :]


# The assistant reads no memory; one is right about the host without adapters, the other about nothing.
DRAFTS = {
    "assistant": {"assistant": 0},
    "another tongue": {"assistant": 1},
    "prompt lookup": tiny.PROMPT_LOOKUP,
}


@pytest.mark.parametrize(("family", "how"), tiny.cache_settings(list(tiny.DISTINCT), DRAFTS))
def test_drafts_do_not_change_the_answer(family, how):
    """Invariant 53."""
    s = scene(family)
    if "assistant" in how:
        how = {"assistant_model": tiny.make(family, seed=how["assistant"])}
    for i in range(2):
        assert torch.equal(generate(s.model, s.ids[i : i + 1], memory=s.memory[i], **how), s.rows[i : i + 1])


@pytest.mark.parametrize("beams", [2, 3])
def test_beams_see_the_slots_that_had_arrived_in_their_row(beams):
    """Invariant 189."""
    model, ids, memory = tiny.attach(tiny.make("llama")), tiny.text(3), tiny.memory(3)
    arrived = torch.stack([torch.arange(7), torch.arange(7).clamp(max=1), torch.full((7,), 5)]).clamp(max=5)
    found = generate(model, ids, memory=memory, arrived=arrived, num_beams=beams)
    for row in range(3):
        alone = generate(model, ids[[row]], memory=memory[row], arrived=arrived[[row]], num_beams=beams)
        assert torch.equal(found[[row]], alone)
    assert not torch.equal(found, generate(model, ids, memory=memory, num_beams=beams))


# Rows inside `generate`: a row never reads the memory of another row, nor states of a text that is not its own


WRITTEN = 4
PAIR = 2


WAYS = {
    "greedy": ({}, {2}),
    "sampling": ({"do_sample": True}, {2}),
    "beams": ({"num_beams": 3}, {2, 6}),
    "beams and answers": ({"num_beams": 3, "num_return_sequences": 2}, {2, 6}),
    "answers": ({"do_sample": True, "num_return_sequences": 2}, {2, 4}),
}


@pytest.mark.parametrize("rows", [1, 3, 4, 6, 8])
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_call_with_other_rows_inside_generate_is_refused(way, rows):
    """Rows of memory are repeated for the beams that were asked for, and for nothing else."""
    settings, fitting = WAYS[way]
    model, text, own = tiny.attach(tiny.make("llama")), tiny.text(rows, 3), tiny.memory(rows, seed=4)
    alone, seeing = model(text).logits, model(text, memory=own).logits

    def run(ask):
        """Generate, and call the host on another text before each token."""
        torch.manual_seed(3)
        how = {"max_new_tokens": WRITTEN, "do_sample": False, "logits_processor": [lambda ids, scores: ask() or scores]}
        return model.generate(tiny.text(PAIR), memory=tiny.memory(PAIR), **how | settings)

    def apart():
        """A text of its own has a memory of its own, or none."""
        with model.condition(None):
            assert torch.equal(model.host(text).logits, alone)
        assert torch.equal(model(text, memory=own).logits, seeing)

    want = run(lambda: None)
    if rows in fitting:
        assert torch.equal(run(lambda: model.host(text) and None), want)
    else:
        with pytest.raises(ShapeError, match=f"{rows} rows.*has {PAIR}"):
            run(lambda: model.host(text))
    assert torch.equal(run(apart), want)


# What a model that reads along keeps of a text


@pytest.mark.parametrize("kept", [(2, 5), (5, 2), (0, 5), (3, 3)])
@torch.no_grad()
def test_rows_of_the_next_turn_diverge_at_different_tokens(kept):
    """Invariant 57: only what ALL rows share with the text before is gone on from: a row that diverges earlier is
    read anew.
    """
    s = composing.scene("llama")
    ids = s.ids[:PAIR]
    how = {"max_new_tokens": 6, "do_sample": False}
    with s.model.condition(composing.along()):
        cache = DynamicCache()
        first = s.model.host.generate(ids, **tiny.going_on(cache), **how)
        texts = []
        for row, count in zip(first, kept, strict=True):
            own = row[: composing.LENGTH + count]
            texts.append(torch.cat([own, tiny.text(1, 13 - len(own), seed=8)[0]]))
        text = torch.stack(texts)
        # The host's own cache holds what both rows share with it.
        cache.crop(composing.LENGTH + min(kept) - cache.get_seq_length())
        second = s.model.host.generate(text, **tiny.going_on(cache), **how)
    want = s.model.generate(text, memory=composing.along(), use_cache=False, **how)
    assert torch.equal(second, want)
    assert not torch.equal(second, s.model.generate(text, **how))
