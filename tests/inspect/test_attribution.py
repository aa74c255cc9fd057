"""`mmattn.inspect.attribute`: weights are those of the call, counterfactuals those of a memory without the source."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import mmattn
from mmattn import inspect
from mmattn.encoders import LogMelEncoder, SeriesEncoder
from mmattn.errors import ConditionError, ConfigError, ShapeError
from tests import tiny, tiny_unets
from tests.tiny import assert_close
from tests.tiny_audio import chirp

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
    memory = tiny.memory(1, SLOTS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    want = model(IDS, memory=memory).logits
    torch.manual_seed(3)
    trace = mmattn.inspect.attribute(model, IDS, memory)
    assert torch.equal(model(IDS, memory=memory).logits, want), "random numbers or dropout have moved"
    assert model.training and model.host.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(trace.dropped, mmattn.inspect.attribute(model, IDS, memory).dropped)


def test_threads_explain_and_ask_at_once() -> None:
    """No other call of the model meets the hooks and modes of attribution."""
    model, memory = tiny.attach(tiny.make("llama")), tiny.memory(1, SLOTS)
    model.train()
    alone = mmattn.inspect.attribute(model, IDS, memory)

    @torch.no_grad()
    def ask(turn: int) -> torch.Tensor | mmattn.inspect.Trace:
        return mmattn.inspect.attribute(model, IDS, memory) if turn % 2 else model(IDS, memory=memory).logits

    want = ask(0)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(ask, range(24)))
    assert all(torch.equal(logits, want) for logits in found[::2])
    for trace in found[1::2]:
        assert torch.equal(trace.weights, alone.weights) and torch.equal(trace.dropped, alone.dropped)
    assert all(module.training for module in model.modules())


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


# Names of slots


def test_stretches_are_one_source() -> None:
    memory = LogMelEncoder(23, 4)([chirp(1.0), chirp(0.3)])
    names = inspect.media_names(memory, 0.25)
    assert list(dict.fromkeys(names)) == ["0.00–0.25 s", "0.25–0.50 s", "0.50–0.75 s", "0.75–1.00 s"]
    assert [names.count(name) for name in dict.fromkeys(names)] == [7, 6, 6, 6]
    short = inspect.media_names(memory, row=1)
    assert short[7] == "0.28–0.32 s" and short[8:] == [None] * 17


def test_names_of_series_bands_and_patches() -> None:
    assert inspect.media_names(SeriesEncoder(10, 2)(torch.randn(90, 2)))[4] == "40–50"
    sources = [[
        {"audio": 0, "start": 0.0, "end": 0.5, "band": 1},
        {"video": 0, "frame": 1, "time": 0.5, "patch": [0, 2]},
        {"video": 0, "frame": 2, "time": 1.0},
    ]]  # fmt: skip
    names = inspect.media_names(mmattn.Memory(torch.zeros(1, 3, 3), sources=sources))
    assert names == ["0.00–0.50 s, band 2", "0.50 s, row 1, column 3", "1.00 s"]
    with pytest.raises(ConfigError, match="no sources that say when its slots are"):
        inspect.media_names(mmattn.Memory(torch.zeros(1, 2, 3)))
