"""The ways in which a call can come: embeddings, images inside the text, drafts, beams, and other calls inside."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

import mmattn
from mmattn.errors import ConditionError, ShapeError
from tests import tiny
from tests.adapters.composed import composed_hosts as composing
from tests.tiny import assert_close, differs

ROWS, LENGTH, NEW = 3, 7, 5
IMAGE = 1  # tiny.text never draws it

families = pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "bloom"])


# None of the new tokens is that of an image.
generate = functools.partial(tiny.written, new=NEW, suppress_tokens=[IMAGE])


@families
@torch.no_grad()
def test_embeddings_instead_of_ids(family, ids):
    model, memory = tiny.attach(tiny.make(family)), tiny.memory(ROWS, lengths=[5, 0, 3])
    embeddings = model.host.get_input_embeddings()(ids)
    assert_close(model(inputs_embeds=embeddings, memory=memory).logits, model(ids, memory=memory).logits)
    out = model.generate(inputs_embeds=embeddings, memory=memory, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out, model.generate(ids, memory=memory, max_new_tokens=NEW, do_sample=False)[:, LENGTH:])
    with pytest.raises(ShapeError):
        model.generate(inputs_embeds=embeddings, memory=tiny.memory(2), max_new_tokens=2)


@torch.no_grad()
def test_memory_can_be_demanded(ids):
    """Invariant 45."""
    adapter = mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, layers=(0,), num_heads=2, head_dim=8)
    model = mmattn.attach(tiny.make("llama"), adapter, require_memory=True)
    for call in (lambda: model(ids), lambda: model.host(ids), lambda: model.generate(ids, max_new_tokens=2)):
        with pytest.raises(ConditionError, match="require_memory"):
            call()
    assert torch.isfinite(model(ids, memory=tiny.memory(ROWS)).logits).all()
    with model.condition(tiny.memory(ROWS)):
        assert torch.isfinite(model(ids).logits).all()
    with model.disable_adapter():
        assert torch.equal(model(ids).logits, tiny.make("llama")(ids).logits)


# Images inside the text: each token looks at the latest one


FIRST, SECOND = (1, 2, 0), (4, 5, 3)


def album():
    """Texts with two images, elsewhere in each row, and memories of 3 and 2 slots for them."""
    ids = tiny.text(ROWS, LENGTH)
    for i in range(ROWS):
        ids[i, [FIRST[i], SECOND[i]]] = IMAGE
    return ids, mmattn.Memory(tiny.memory(ROWS).tokens, segments=torch.tensor([[0, 0, 0, 1, 1]]).expand(ROWS, -1))


@families
@torch.no_grad()
def test_text_before_an_image_does_not_see_it(family):
    model = tiny.attach(tiny.make(family), visible_segments="latest", media_token=IMAGE)
    ids, memory = album()
    own, out = tiny.make(family)(ids).logits, model(ids, memory=memory).logits
    other = mmattn.Memory(memory.tokens.clone(), segments=memory.segments)
    other.tokens[:, 3:] *= -1
    changed = model(ids, memory=other).logits
    for i in range(ROWS):
        assert torch.equal(out[i, : FIRST[i]], own[i, : FIRST[i]])
        assert differs(out[i, FIRST[i] :], own[i, FIRST[i] :])
        assert torch.equal(changed[i, : SECOND[i]], out[i, : SECOND[i]])
        assert differs(changed[i, SECOND[i] :], out[i, SECOND[i] :])
    assert torch.equal(model(ids, memory=memory, images=(ids == IMAGE).cumsum(1)).logits, out)


@families
def test_the_latest_image_in_every_way_of_generating(family):
    model = tiny.attach(tiny.make(family), visible_segments="latest", media_token=IMAGE)
    ids, memory = album()
    rows = torch.cat([generate(model, ids[i : i + 1], memory=memory[i]) for i in range(ROWS)])
    with torch.no_grad():
        full = model(torch.cat([ids, rows], 1), memory=memory).logits[:, LENGTH - 1 : -1]
        full[..., IMAGE] = -torch.inf
        assert torch.equal(full.argmax(-1), rows)
    assert torch.equal(generate(model, ids, memory=memory), rows)
    for how in ({"use_cache": False}, {"prefill_chunk_size": 3}, {"top_k": 1, "do_sample": True}):
        assert torch.equal(generate(model, ids, memory=memory, **how), rows), how
    beams = generate(model, ids, memory=memory, num_beams=3)
    alone = [generate(model, ids[i : i + 1], memory=memory[i], num_beams=3) for i in range(ROWS)]
    assert torch.equal(beams, torch.cat(alone))
    padded, keep = tiny.left_padded([ids[0], ids[1, 3:], ids[2, 1:]])
    got = generate(model, padded, attention_mask=keep, memory=memory)
    want = [generate(model, row[None], memory=memory[i]) for i, row in enumerate((ids[0], ids[1, 3:], ids[2, 1:]))]
    assert torch.equal(got, torch.cat(want))
    for i in range(ROWS):
        lookup = generate(model, ids[i : i + 1], memory=memory[i], **tiny.PROMPT_LOOKUP)
        assert torch.equal(lookup, rows[i : i + 1])


@torch.no_grad()
def test_which_image_is_never_guessed():
    ids, memory = album()
    model = tiny.attach(tiny.make("llama"), visible_segments="latest")
    with pytest.raises(ConditionError, match="images"):
        model(ids, memory=memory)
    model = tiny.attach(tiny.make("llama"), visible_segments="latest", media_token=IMAGE)
    with pytest.raises(ShapeError, match="segments"):
        model(ids, memory=tiny.memory(ROWS))
    # The second piece of a text alone does not say how many images went before it.
    full = model(ids, memory=memory).logits
    first = model(ids[:, :3], memory=memory, use_cache=True)
    with pytest.raises(ConditionError, match="images"):
        model(ids[:, 3:], memory=memory, **tiny.going_on(first.past_key_values))
    images = (ids == IMAGE).cumsum(1)
    first = model(ids[:, :3], memory=memory, use_cache=True)
    second = model(ids[:, 3:], memory=memory, **tiny.going_on(first.past_key_values), images=images[:, 3:])
    assert_close(second.logits, full[:, 3:])


@functools.cache
def scene(family: str) -> SimpleNamespace:
    """A host with open adapters, and the greedy continuation of each row made alone."""
    ids, memory = tiny.text(ROWS, LENGTH), tiny.memory(ROWS, lengths=[5, 2, 3])
    s = SimpleNamespace(model=tiny.attach(tiny.make(family)), ids=ids, memory=memory)
    s.rows = torch.cat([generate(s.model, ids[i : i + 1], memory=memory[i]) for i in range(ROWS)])
    assert not torch.equal(s.rows, generate(s.model.host, ids))
    return s


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
