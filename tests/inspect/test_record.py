"""`mmattn.record`: the weights are those of the call, and the call does not notice."""

from __future__ import annotations

import torch

import mmattn
from tests import tiny


def test_weights_of_every_block_and_the_same_logits() -> None:
    model = tiny.attach(tiny.make("llama"), null_slot=False)
    ids, memory = tiny.text(3, 7), tiny.memory(3, 5, lengths=[5, 2, 4])
    alone = model(ids, memory=memory).logits
    with mmattn.record(model) as weights:
        assert torch.equal(model(ids, memory=memory).logits, alone)
    assert sorted(weights) == [("default", 0), ("default", 2)]
    for (seen,) in weights.values():
        assert seen.shape == (3, 2, 7, 5)
        assert torch.allclose(seen.sum(-1), torch.ones(3, 2, 7))
        assert not seen[~memory.mask[:, None, None].expand_as(seen)].any()
    (mean,) = weights.mean()
    assert torch.allclose(mean, sum(seen[0].mean(1) for seen in weights.values()) / 2)
    model(ids, memory=memory)
    assert all(len(calls) == 1 for calls in weights.values()), "recording goes on behind the block"


def test_dropout_stays_where_it_was() -> None:
    model = tiny.attach(tiny.make("llama"), dropout=0.5).train()
    ids, memory = tiny.text(2, 7), tiny.memory(2, 5)

    def logits() -> torch.Tensor:
        torch.manual_seed(3)
        return model(ids, memory=memory).logits

    plain = logits()
    with mmattn.record(model):
        assert torch.equal(logits(), plain)


def test_each_step_of_generate_is_a_call() -> None:
    model = tiny.attach(tiny.make("llama"))
    with mmattn.record(model) as weights:
        model.generate(tiny.text(2, 3), memory=tiny.memory(2, 5), max_new_tokens=4, do_sample=False)
    assert [seen.shape[2] for seen in weights["default", 0]] == [3, 1, 1, 1]
