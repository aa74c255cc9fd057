"""Rows inside `generate`: a row never reads the memory of another row, nor states of a text that is not its own."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from mmattn.errors import ShapeError
from tests import tiny
from tests.adapters.composed import composed_hosts as composing

NEW = 4
ROWS = 2


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
        how = {"max_new_tokens": NEW, "do_sample": False, "logits_processor": [lambda ids, scores: ask() or scores]}
        return model.generate(tiny.text(ROWS), memory=tiny.memory(ROWS), **how | settings)

    def apart():
        """A text of its own has a memory of its own, or none."""
        with model.condition(None):
            assert torch.equal(model.host(text).logits, alone)
        assert torch.equal(model(text, memory=own).logits, seeing)

    want = run(lambda: None)
    if rows in fitting:
        assert torch.equal(run(lambda: model.host(text) and None), want)
    else:
        with pytest.raises(ShapeError, match=f"{rows} rows.*has {ROWS}"):
            run(lambda: model.host(text))
    assert torch.equal(run(apart), want)


# What a model that reads along keeps of a text


@pytest.mark.parametrize("kept", [(2, 5), (5, 2), (0, 5), (3, 3)])
@torch.no_grad()
def test_rows_of_the_next_turn_diverge_at_different_tokens(kept):
    """Only what ALL rows share with the text before is gone on from: a row that diverges earlier is read anew."""
    s = composing.scene("llama")
    ids = s.ids[:ROWS]
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
