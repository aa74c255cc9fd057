"""Published gated cross-attention: the logits of transformers' Idefics and Mllama, and of OpenFlamingo's equations."""

from __future__ import annotations

import pytest
import torch

import mmattn
from mmattn.errors import ShapeError
from tests import tiny
from tests.adapters.gated.pretrained_models import (
    ALWAYS,
    BEGUN,
    LENGTH,
    PATCHES,
    ROWS,
    around,
    by_idefics,
    by_mllama,
    by_open_flamingo,
    idefics,
    mllama,
    open_flamingo,
    states,
    text_part,
)
from tests.tiny import assert_close, differs

IDEFICS = {
    "one number": {},
    "a number per channel": {"alpha": "vector"},
    "every second layer": {"interval": 2},
    "norms of queries and keys": {"alpha": "vector", "qk_layer_norms": True, "interval": 4},
}


@pytest.mark.parametrize("options", IDEFICS.values(), ids=list(IDEFICS))
@torch.no_grad()
def test_idefics(options):
    theirs, ids = idefics(**options), tiny.text(ROWS, LENGTH)
    lm = text_part(theirs, range(4))
    own = lm(ids).logits
    model = mmattn.load_published(lm, "idefics", theirs.state_dict())
    assert model.adapters["default"].layers == tuple(range(0, 4, options.get("interval", 1)))
    tokens, segments = states(tiny.MEMORY_DIM)
    # Images that no token of a row sees are padding.
    mask = segments < torch.tensor([2, 1, 0])[:, None]
    garbage = tokens.masked_fill(~mask[..., None], float("nan"))
    memory = mmattn.Memory(garbage, mask, segments, check_finite=False)
    want = by_idefics(theirs, ids, tokens, BEGUN)
    got = model(ids, memory=memory, images=BEGUN).logits
    assert_close(got, want)
    assert differs(want, own)  # also the third row, whose tokens see no image: their feed-forward acts
    assert_close(model(ids, memory=mmattn.Memory(tokens, segments=segments), images=BEGUN).logits, want)
    other = mmattn.Memory(states(tiny.MEMORY_DIM, seed=1)[0], mask, segments)
    changed = model(ids, memory=other, images=BEGUN).logits
    assert differs(changed[:2], want[:2]) and torch.equal(changed[2], got[2])
    assert torch.equal(changed[0, 0], got[0, 0])  # the first word of the first row comes before its images
    assert torch.equal(model(ids).logits, own)


@torch.no_grad()
def test_idefics_writes_on_and_is_kept(tmp_path):
    """Words after the prompt see its last image; what was read is an adapter like others."""
    theirs, ids, media_token = idefics(interval=2), tiny.text(ROWS, LENGTH), 3
    ids = ids.masked_fill(ids == media_token, 4)
    ids[:, 0] = ids[0, 3] = media_token
    tokens, segments = states(tiny.MEMORY_DIM)
    memory = mmattn.Memory(tokens, segments=segments)
    model = mmattn.load_published(text_part(theirs, range(4)), "idefics", theirs.state_dict(), media_token=media_token)
    out = model.generate(ids, memory=memory, max_new_tokens=3, do_sample=False)
    begun = (ids == media_token).cumsum(1)
    begun = torch.cat([begun, begun[:, -1:].expand(-1, 3)], 1)
    want = by_idefics(theirs, out, tokens, begun)
    assert torch.equal(want[:, LENGTH - 1 : -1].argmax(-1), out[:, LENGTH:])
    model.save_adapter(tmp_path / "adapter")
    again = mmattn.load(text_part(theirs, range(4)), tmp_path / "adapter")
    assert torch.equal(again(ids, memory=memory).logits, model(ids, memory=memory).logits)


@pytest.mark.parametrize(("cross", "layers"), [((1, 3), (1, 2)), ((0, 4), (0, 3))])
@torch.no_grad()
def test_mllama(cross, layers):
    theirs, ids = mllama(cross, layers=6), tiny.text(ROWS, LENGTH)
    lm = around(theirs, cross)
    own = lm(ids).logits
    assert_close(own, theirs(ids).logits)  # without images it passes over its cross-attention
    model = mmattn.load_published(lm, "mllama", theirs.state_dict())
    assert model.adapters["default"].layers == layers
    tokens, segments = states(32)
    memory = mmattn.Memory(tokens, segments=segments)
    want = by_mllama(theirs, ids, tokens, ALWAYS)
    assert_close(model(ids, memory=memory, images=ALWAYS).logits, want)
    assert differs(want, own)
    other = mmattn.Memory(states(32, seed=1)[0], segments=segments)
    assert differs(model(ids, memory=other, images=ALWAYS).logits, want)
    everything = mmattn.load_published(lm, "mllama", theirs.state_dict(), "everything", visible_segments="all")
    with everything.disable_adapter("default"):
        out = everything(ids, memory={"everything": mmattn.Memory(tokens)}).logits
    assert_close(out, by_mllama(theirs, ids, tokens, None))


@pytest.mark.parametrize("at", [(0, 1, 2), (1,)])
@pytest.mark.parametrize("look", ["latest", "previous"])
@torch.no_grad()
def test_open_flamingo(at, look):
    tensors, ids = open_flamingo(at), tiny.text(ROWS, LENGTH)
    own = tiny.own(ids)
    model = mmattn.load_published(tiny.make("llama"), "openflamingo", tensors, visible_segments=look, num_heads=2)
    tokens, segments = states(tiny.MEMORY_DIM)
    memory = mmattn.Memory(tokens, segments=segments)
    begun = BEGUN if look == "latest" else ALWAYS
    want = by_open_flamingo(tensors, at, ids, tokens, begun, look == "latest")
    assert_close(model(ids, memory=memory, images=begun).logits, want)
    assert differs(want, own)
    changed = mmattn.Memory(torch.cat([states(tiny.MEMORY_DIM, seed=1)[0][:, :PATCHES], tokens[:, PATCHES:]], 1))
    changed = mmattn.Memory(changed.tokens, segments=segments)
    # The first image of the first row: seen by its last word only through all previous ones, or through other words.
    assert differs(model(ids, memory=changed, images=begun).logits[:2], want[:2])
    with pytest.raises(ShapeError, match=look):
        model(ids, memory=mmattn.Memory(tokens), images=begun)
