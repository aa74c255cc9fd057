"""`mmattn.inspect.attribute`: weights are those of the call, counterfactuals those of a memory without the source."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import mmattn
from mmattn.errors import ConditionError, ConfigError, ShapeError
from mmattn.inspect import roll_out
from tests import tiny, tiny_unets
from tests.tiny import assert_close

IDS, SLOTS = tiny.text(1, 7), 5


@torch.no_grad()
def probability(model, memory, ids=IDS) -> torch.Tensor:
    """(l - 1,) of each token but the first, from the model's own logits."""
    logits = model(ids, memory=memory).logits[0, :-1] if memory is not None else model(ids).logits[0, :-1]
    return logits.exp().div(logits.exp().sum(-1, keepdim=True)).gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("batch", [1, 2, 32])
def test_the_numbers_are_those_of_calls(batch: int) -> None:
    model, memory = tiny.attach(tiny.make("llama")), tiny.memory(1, SLOTS)
    trace = mmattn.inspect.attribute(model, IDS, memory, start=3, batch=batch)
    assert trace.words == tuple(str(one) for one in IDS[0, 3:].tolist())
    assert trace.sources == tuple(f"slot {slot}" for slot in range(SLOTS)) and trace.layers == ("layer 0", "layer 2")
    with mmattn.inspect.record(model) as weights:
        model(IDS, memory=memory)
    want = torch.stack([calls[0][0, :, 2:-1] for calls in weights.values()])
    assert torch.equal(trace.weights, want) and (trace.weights > 0).any()
    assert_close(trace.probability, probability(model, memory)[2:])
    assert_close(trace.without, probability(tiny.make("llama"), None)[2:])
    for slot in range(SLOTS):
        others = torch.arange(SLOTS)[None] != slot
        assert_close(trace.dropped[:, slot], probability(model, mmattn.Memory(memory.tokens, others))[2:])
    assert tiny.differs(trace.dropped.T, trace.probability.expand(SLOTS, -1)), "no source matters"


def test_slots_of_one_source_are_one() -> None:
    model = tiny.attach(tiny.make("gpt2"))
    tokens, mask = tiny.memory(1, SLOTS).tokens, torch.tensor([[True, True, True, True, False]])
    said = [{"id": 3, "text": "three", "slot": 0}, {"id": 3, "text": "three", "slot": 1}, {"id": 8}, None, {"id": 9}]
    memory = mmattn.Memory(tokens, mask, sources=[said])
    trace = mmattn.inspect.attribute(model, IDS, memory)
    assert trace.sources == ("three", "8")
    whole = mmattn.inspect.attribute(model, IDS, mmattn.Memory(tokens, mask))
    assert_close(trace.weights[..., 0], whole.weights[..., :2].sum(-1))
    assert_close(trace.weights[..., 1], whole.weights[..., 2])
    without = mmattn.Memory(tokens, torch.tensor([[False, False, True, True, False]]))
    assert_close(trace.dropped[:, 0], probability(model, without))
    same = mmattn.inspect.attribute(model, IDS, mmattn.Memory(tokens, mask), sources=["x", "x", "y", None, "z"])
    assert same.sources == ("x", "y") and torch.equal(same.weights, trace.weights)


def test_a_memory_with_scores_keeps_them() -> None:
    model = tiny.attach(tiny.make("llama"), score_bias=True)
    with torch.no_grad():
        for name, parameter in model.adapters.named_parameters():
            if "score" in name:
                parameter.fill_(1.0)
    tokens, scores = tiny.memory(1, SLOTS).tokens, torch.linspace(-2, 3, SLOTS)[None]
    trace = mmattn.inspect.attribute(model, IDS, mmattn.Memory(tokens, scores=scores))
    others = torch.arange(SLOTS)[None] != 1
    assert_close(trace.dropped[:, 1], probability(model, mmattn.Memory(tokens, others, scores=scores)))


def test_the_model_is_as_it_was() -> None:
    model = tiny.attach(tiny.make("llama"), dropout=0.5).train()
    memory, kind = tiny.memory(1, SLOTS), model.host.config._attn_implementation
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    want = model(IDS, memory=memory).logits
    torch.manual_seed(3)
    trace = mmattn.inspect.attribute(model, IDS, memory)
    assert torch.equal(model(IDS, memory=memory).logits, want), "random numbers or dropout have moved"
    assert model.training and model.host.training and model.host.config._attn_implementation == kind
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(trace.dropped, mmattn.inspect.attribute(model, IDS, memory).dropped)


def test_threads_explain_and_ask_at_once() -> None:
    """What attribution changes, such as the way a host attends, no other call of the model meets."""
    model, memory = tiny.attach(tiny.make("llama")), tiny.memory(1, SLOTS)
    kind, alone = model.host.config._attn_implementation, mmattn.inspect.attribute(model, IDS, memory)
    assert kind != "eager", "there is nothing to change"

    @torch.no_grad()
    def ask(turn: int) -> torch.Tensor | mmattn.inspect.Trace:
        return mmattn.inspect.attribute(model, IDS, memory) if turn % 2 else model(IDS, memory=memory).logits

    want = ask(0)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(ask, range(24)))
    assert all(torch.equal(logits, want) for logits in found[::2])
    for trace in found[1::2]:
        assert trace.rollout is not None and torch.equal(trace.weights, alone.weights)
        assert torch.equal(trace.dropped, alone.dropped) and torch.equal(trace.rollout, alone.rollout)
    assert model.host.config._attn_implementation == kind


@pytest.mark.parametrize("position", ["after", "before"])
def test_rollout_is_the_product_over_the_layers(position: str) -> None:
    model, memory = tiny.attach(tiny.make("llama"), position=position), tiny.memory(1, SLOTS)
    trace = mmattn.inspect.attribute(model, IDS, memory)
    host = tiny.make("llama")
    host.set_attn_implementation("eager")
    plain = tiny.attach(host, position=position)
    with mmattn.inspect.record(plain) as weights, torch.no_grad():
        own = plain(IDS, memory=memory, output_attentions=True).attentions
    seen = {layer: calls[0][0].mean(0) for (_, layer), calls in weights.items()}
    # The definition on one graph of memory and text: a state is half itself, half what it read.
    l, both = IDS.shape[1], torch.eye(SLOTS + IDS.shape[1])
    for layer in range(tiny.LAYERS):
        text, read = torch.eye(SLOTS + l), torch.eye(SLOTS + l)
        text[SLOTS:, SLOTS:] = (torch.eye(l) + own[layer][0].mean(0)) / 2
        if layer in seen:
            share = seen[layer].sum(1)
            read[SLOTS:, :SLOTS], read[SLOTS:, SLOTS:] = seen[layer] / 2, torch.diag(1 - share / 2)
        both = text @ read @ both if position == "before" else read @ text @ both
    assert_close(trace.rollout, both[SLOTS:-1, :SLOTS])
    assert (trace.rollout.sum(1) <= 1).all() and trace.rollout.min() > 0
    with torch.no_grad():
        assert_close(roll_out([one[0].mean(0) for one in own], seen, position == "before")[:-1], trace.rollout)


def test_a_host_without_attention_has_no_rollout() -> None:
    trace = mmattn.inspect.attribute(tiny.attach(tiny.make("mamba")), IDS, tiny.memory(1, SLOTS))
    assert trace.rollout is None and trace.dropped is not None


def test_what_cannot_be_explained_is_refused() -> None:
    model, memory = tiny.attach(tiny.make("llama")), tiny.memory(1, SLOTS)
    with pytest.raises(ShapeError, match="one row"):
        mmattn.inspect.attribute(model, tiny.text(2), memory)
    with pytest.raises(ShapeError, match="one row"):
        mmattn.inspect.attribute(model, IDS, tiny.memory(2, SLOTS))
    with pytest.raises(ShapeError, match="each of 7 tokens, got 2"):
        mmattn.inspect.attribute(model, IDS, memory, ["a", "b"])
    with pytest.raises(ShapeError, match="each of 5 slots, got 1"):
        mmattn.inspect.attribute(model, IDS, memory, sources=["a"])
    with pytest.raises(ShapeError, match="grid of 2 × 3"):
        mmattn.inspect.attribute(model, IDS, memory, grid=(2, 3))
    with pytest.raises(ConfigError, match="start=7 leaves nothing"):
        mmattn.inspect.attribute(model, IDS, memory, start=7)
    with pytest.raises(ConfigError, match="no slot"):
        mmattn.inspect.attribute(model, IDS, mmattn.Memory(memory.tokens, torch.zeros(1, SLOTS, dtype=torch.bool)))
    resampled = tiny.attach(tiny.make("llama"), resampler=mmattn.Resampler(num_latents=3, num_heads=2, head_dim=8))
    with pytest.raises(ConditionError, match="attends to 3 vectors"):
        mmattn.inspect.attribute(resampled, IDS, memory)
    with pytest.raises(ConditionError, match="language model"):
        mmattn.inspect.attribute(tiny_unets.attach(tiny_unets.make()), IDS, memory)
