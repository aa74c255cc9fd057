"""The ways in which a call can come: embeddings, beside other hosts, images inside the text."""

from __future__ import annotations

import pytest
import torch

import mmattn
from mmattn.errors import ConditionError, ShapeError
from tests import tiny
from tests.tiny import assert_close, differs

ROWS, LENGTH, NEW = 3, 7, 5
IMAGE = 1  # tiny.text never draws it

families = pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "bloom"])


@torch.no_grad()
def generate(model, ids, **kwargs):
    """New tokens only (b, NEW); none of them is the token of an image."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "suppress_tokens": [IMAGE]} | kwargs
    return model.generate(ids, **settings)[:, ids.shape[1] :]


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
