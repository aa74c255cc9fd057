"""Published gated cross-attention: the logits of Idefics, Mllama and OpenFlamingo, from files of every kind."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

import mmattn
from mmattn.errors import AdapterFileError, AttachError, ConfigError, NonFiniteError, ShapeError
from mmattn.testing.case import no_trace, traces
from tests import tiny, tiny_unets
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


@torch.no_grad()
def test_from_files(tmp_path):
    theirs, ids = mllama(), tiny.text(ROWS, LENGTH)
    state = {name: value.contiguous() for name, value in theirs.state_dict().items()}
    names = sorted(state)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(state, tmp_path / "one.safetensors")
    torch.save(state, tmp_path / "one.bin")
    for part in range(2):
        save_file({name: state[name] for name in names[part::2]}, folder / f"model-{part}.safetensors")
    hub = {name.replace("model.language_model.", "language_model.model."): value for name, value in state.items()}
    only = {name: value.half() for name, value in state.items() if ".layers.1." in name or ".layers.3." in name}
    tokens, segments = states(32)
    given = {"memory": mmattn.Memory(tokens, segments=segments), "images": ALWAYS}
    want = by_mllama(theirs, ids, tokens, ALWAYS)
    for weights in (tmp_path / "one.safetensors", str(tmp_path / "one.bin"), folder, hub):
        assert_close(mmattn.load_published(around(theirs, (1, 3)), "mllama", weights)(ids, **given).logits, want)
    model = mmattn.load_published(around(theirs, (1, 3)), "mllama", only)
    assert {one.dtype for one in model.adapters.parameters()} == {torch.float32}
    assert_close(model(ids, **given).logits, want, 1e-2)


def faults():
    """What is wrong: family, weights, host, and what the message says."""
    good, flamingo = idefics(interval=2).state_dict(), open_flamingo((1,))
    block, old = "model.gated_cross_attn_layers.1.", "lang_encoder.model.layers.1.gated_cross_attn_layer."
    wide = {"hidden_size": 48, "intermediate_size": 53}

    def without(tensors, name):
        return {key: value for key, value in tensors.items() if key != name}

    def idefics_host(**changes):
        return tiny.make("llama", **({"num_hidden_layers": 4, "num_key_value_heads": 4} | changes))

    trailing = mllama((1, 4)).state_dict()
    return {
        "another family": ("mllama", good, idefics_host(), "no gated cross-attention of mllama"),
        "nothing": ("idefics", {}, idefics_host(), "no gated cross-attention of idefics"),
        "two models": ("idefics", good | {"b." + key: good[key] for key in good}, idefics_host(), "several models"),
        "missing": ("idefics", without(good, block + "alpha_dense"), idefics_host(), f"1 missing: {block}alpha_dense"),
        "unknown": ("idefics", good | {block + "bias": torch.zeros(3)}, idefics_host(), f"1 unexpected: {block}bias"),
        "activation": ("idefics", good, idefics_host(hidden_act="gelu"), "SwiGLU"),
        "shape": (
            "idefics",
            good | {block + "mlp.up_proj.weight": torch.zeros(51, 32)},
            idefics_host(),
            r"up_proj.weight \[51, 32\].* needed \[53, 32\]",
        ),
        "gate": (
            "idefics",
            good | {block + "alpha_dense": torch.zeros(1, 1, 32)},
            idefics_host(),
            r"alpha_dense \[1, 1, 32\].* needed \[1\]",
        ),
        "integers": (
            "idefics",
            good | {block + "alpha_dense": torch.zeros(1, dtype=torch.long)},
            idefics_host(),
            "alpha_dense .*int64",
        ),
        "infinite": (
            "idefics",
            good | {block + "alpha_dense": torch.full((1,), float("inf"))},
            idefics_host(),
            "alpha_dense.*infinite",
        ),
        "depth": ("idefics", good, idefics_host(num_hidden_layers=3), "do not divide the 3 layers"),
        "width": ("idefics", good, idefics_host(**wide), "32 wide, and this host is 48 wide"),
        "norms": ("idefics", good, tiny.make("gpt2", n_layer=4), "epsilon None"),
        "after the last": ("mllama", trailing, idefics_host(num_hidden_layers=3), "before layer 3"),
        "one after another": ("mllama", mllama((1, 2)).state_dict(), idefics_host(num_hidden_layers=3), "follow"),
        "layers left in": ("mllama", mllama().state_dict(), idefics_host(num_hidden_layers=5), "3 others"),
        "too deep": ("openflamingo", open_flamingo((7,)), tiny.make("llama"), "layers 0 to 2"),
        "heads": ("openflamingo", flamingo, tiny.make("llama"), "num_heads="),
        "no bias": ("openflamingo", without(flamingo, old + "ff.0.bias"), tiny.make("llama"), "ff.0.bias"),
        "a picture model": ("openflamingo", flamingo, tiny_unets.make(), "UNet2DConditionModel"),
    }


def test_what_does_not_fit_changes_nothing():
    for wrong, (family, weights, host, match) in faults().items():
        before = traces(host)
        with pytest.raises((AdapterFileError, NonFiniteError), match=match):
            mmattn.load_published(host, family, weights)
        no_trace(host, before, wrong)


class Runs:
    """What makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("ending", ["bin", "pt", "pth"])
def test_what_a_pickle_would_run_is_not_run(ending, tmp_path):
    path, made = tmp_path / f"weights.{ending}", tmp_path / "made"
    torch.save(open_flamingo((1,)) | {"more": Runs(made)}, path)
    with pytest.raises(AdapterFileError, match="cannot be read as weights"):
        mmattn.load_published(tiny.make("llama"), "openflamingo", path, num_heads=2)
    assert not made.exists()


def test_files_that_are_none(tmp_path):
    lm, ids = tiny.make("llama"), tiny.text(ROWS, LENGTH)
    tensors = open_flamingo((1,))
    save_file(tensors, tmp_path / "good.safetensors")
    whole = (tmp_path / "good.safetensors").read_bytes()
    (tmp_path / "torn.safetensors").write_bytes(whole[:-9])
    (tmp_path / "page.bin").write_bytes(b"<html>" * 99)
    torch.save({"state": tensors}, tmp_path / "nested.pt")
    torch.save(list(tensors.values()), tmp_path / "list.pt")
    (tmp_path / "empty").mkdir()
    for name in ("torn.safetensors", "page.bin", "list.pt", "empty", "nowhere.safetensors", "."):
        with pytest.raises(AdapterFileError):
            mmattn.load_published(lm, "openflamingo", tmp_path / name, num_heads=2)
    with pytest.raises(AdapterFileError, match="by name"):
        mmattn.load_published(lm, "openflamingo", {"a": 3})
    with pytest.raises(ConfigError, match="'idefics', 'mllama', 'openflamingo'"):
        mmattn.load_published(lm, "flamingo", tensors)
    model = mmattn.load_published(lm, "openflamingo", tmp_path / "good.safetensors", num_heads=2)
    with pytest.raises(AttachError, match="already attached"):
        mmattn.load_published(model, "openflamingo", tensors, num_heads=2)
    assert torch.equal(model(ids).logits, tiny.own(ids)) and list(model.adapters) == ["default"]
    nested = mmattn.load_published(tiny.make("llama"), "openflamingo", tmp_path / "nested.pt", num_heads=2)
    weights = nested.adapters.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in model.adapters.state_dict().items())
