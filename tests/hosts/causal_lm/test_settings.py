"""Every setting of the gated adapter keeps the promises that the plain one keeps."""

from __future__ import annotations

import pytest
import torch

import mmattn
from tests import tiny
from tests.tiny import assert_close, differs

ROWS, LENGTH = 3, 7

SETTINGS = {
    "gates per head": {"gate": "head"},
    "gates per channel": {"gate": "channel"},
    "no feed-forward": {"feed_forward": 0},
    "grouped heads": {"num_heads": 4, "num_kv_heads": 2},
    "one key head": {"num_heads": 3, "num_kv_heads": 1},
    "query and key norm": {"qk_norm": True},
    "null slot": {"null_slot": True},
    "length norm": {"length_norm": 17.0},
    "score bias": {"score_bias": True},
    "standardised scores": {"score_bias": True, "score_mean": 0.7, "score_std": 0.3, "null_slot": True},
    "resampler": {"resampler": mmattn.Resampler(num_latents=3, depth=2, num_heads=2)},
    "before the layer": {"position": "before"},
    "RMS norm": {"layout": {"norm": "rms", "norm_eps": 1e-3}, "qk_norm": True},
    "no memory norm": {"layout": {"memory_norm": False}},
    "SwiGLU": {"layout": {"activation": "swiglu"}},
}

settings = pytest.mark.parametrize("setting", SETTINGS.values(), ids=list(SETTINGS))


def memory(lengths=(5, 2, 3)):
    plain = tiny.memory(ROWS, lengths=list(lengths))
    scores = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(5))
    return mmattn.Memory(plain.tokens, plain.mask, scores=scores)


@settings
@torch.no_grad()
def test_fresh_is_nothing_and_open_is_something(setting):
    ids = tiny.text(ROWS, LENGTH)
    own = tiny.make("llama")(ids).logits
    model = tiny.attach(tiny.make("llama"), opened=False, **setting)
    assert torch.equal(model(ids, memory=memory()).logits, own)
    tiny.open_gates(model)
    out = model(ids, memory=memory()).logits
    assert differs(out, own)
    assert_close(out, torch.cat([model(ids[i : i + 1], memory=memory()[i]).logits for i in range(ROWS)]))
    # The whole adapter is silent where a row sees nothing, whatever it learnt to say by itself.
    mixed = model(ids, memory=memory([5, 0, 3])).logits
    assert torch.equal(mixed[1], own[1]) and differs(mixed[[0, 2]], own[[0, 2]])
    assert torch.equal(model(ids, memory=memory([0, 0, 0])).logits, own)
    empty = memory()
    empty = mmattn.Memory(empty.tokens[:, :0], scores=empty.scores[:, :0])
    assert torch.equal(model(ids, memory=empty).logits, own)


@settings
def test_everything_learns(setting):
    ids, model = tiny.text(ROWS, LENGTH), tiny.attach(tiny.make("llama"), **setting).train()
    model.eval()
    with torch.no_grad():
        model(ids, memory=memory())
    model.train()
    model(ids, labels=ids, memory=memory()).loss.backward()
    for name, parameter in model.adapters.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, f"{name} never learns"
