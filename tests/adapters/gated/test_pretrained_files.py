"""Published gated cross-attention from files of every kind, and what is refused with nothing changed."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

import mmattn
from mmattn.errors import AdapterFileError, AttachError, ConfigError, NonFiniteError
from tests import tiny, tiny_unets
from tests.adapters.gated.pretrained_models import (
    ALWAYS,
    LENGTH,
    ROWS,
    around,
    by_mllama,
    idefics,
    mllama,
    open_flamingo,
    states,
)
from tests.tiny import assert_close


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
        before = tiny_unets.traces(host)
        with pytest.raises((AdapterFileError, NonFiniteError), match=match):
            mmattn.load_published(host, family, weights)
        assert tiny_unets.traces(host) == before, wrong


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
