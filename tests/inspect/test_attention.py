"""Attention weights: recorded, as metrics of adapters, and by source of the memory."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch

import mmattn
from mmattn import inspect
from mmattn.adapters import JoinedAdapter
from mmattn.encoders import LogMelEncoder, SeriesEncoder
from mmattn.errors import ConditionError, ConfigError, ShapeError
from mmattn.inspect import AdapterMetrics, attention as recording, record
from tests import tiny, tiny_unets
from tests.tiny import assert_close
from tests.tiny_audio import chirp


def test_names_of_the_room_are_no_modules() -> None:
    """A module of the same name would hide `record` as soon as it is imported."""
    assert mmattn.inspect.record is recording.record
    assert [name for name in mmattn.inspect.__all__ if isinstance(getattr(mmattn.inspect, name), ModuleType)] == []


def test_the_mean_of_all_blocks() -> None:
    """What is recorded of each block the contract suite says."""
    model = tiny.attach(tiny.make("llama"))
    ids, memory = tiny.text(3, 7), tiny.memory(3, 5, lengths=[5, 2, 4])
    with mmattn.inspect.record(model) as weights:
        model(ids, memory=memory)
    (mean,) = weights.mean()
    assert torch.allclose(mean, sum(seen[0].mean(1) for seen in weights.values()) / 2)
    model(ids, memory=memory)
    assert all(len(calls) == 1 for calls in weights.values()), "recording goes on after the block"


def test_dropout_stays_where_it_was() -> None:
    model = tiny.attach(tiny.make("llama"), dropout=0.5).train()
    ids, memory = tiny.text(2, 7), tiny.memory(2, 5)

    def logits() -> torch.Tensor:
        torch.manual_seed(3)
        return model(ids, memory=memory).logits

    plain = logits()
    with mmattn.inspect.record(model):
        assert torch.equal(logits(), plain)


def test_each_step_of_generate_is_a_call() -> None:
    model = tiny.attach(tiny.make("llama"))
    with mmattn.inspect.record(model) as weights:
        model.generate(tiny.text(2, 3), memory=tiny.memory(2, 5), max_new_tokens=4, do_sample=False)
    assert [seen.shape[2] for seen in weights["default", 0]] == [3, 1, 1, 1]


def test_calls_of_other_threads_are_theirs() -> None:
    model = tiny.attach(tiny.make("llama"))
    ids, mine, other = tiny.text(2, 7), tiny.memory(2, 5), tiny.memory(2, 11)

    def asked(memory: mmattn.Memory) -> dict[tuple[str, int], list[torch.Tensor]]:
        with mmattn.inspect.record(model) as weights:
            model(ids, memory=memory)
        return weights

    alone, theirs = asked(mine), asked(other)
    with ThreadPoolExecutor(1) as pool, mmattn.inspect.record(model) as weights:
        beside = pool.submit(asked, other).result()
        model(ids, memory=mine)
        pool.submit(model, ids, memory=other).result()
    for got, want in ((weights, alone), (beside, theirs)):
        assert got.keys() == want.keys() and all(len(calls) == 1 for calls in got.values())
        assert all(torch.equal(calls[0], want[key][0]) for key, calls in got.items())


def test_a_call_may_come_while_hooks_are_being_made() -> None:
    """torch makes a hook in two steps, the hook first and that it takes kwargs second: between them it is called."""
    model, ids, memory = tiny.attach(tiny.make("llama")), tiny.text(2, 7), tiny.memory(2, 5)
    want = model(ids, memory=memory).logits
    with ThreadPoolExecutor(1) as pool, mmattn.inspect.record(model) as weights:
        for attention in model.attentions().values():
            assert attention._forward_hooks_with_kwargs
            attention._forward_hooks_with_kwargs.clear()
        assert torch.equal(pool.submit(lambda: model(ids, memory=memory).logits).result(), want)
    assert not weights and not any(attention._forward_hooks for attention in model.attentions().values())


@torch.no_grad()
def test_a_unet_tells_of_its_text_and_of_each_adapter():
    model = tiny_unets.attach(tiny_unets.make())
    memory = tiny.memory(tiny_unets.ROWS, lengths=[5, 2, 3])
    mask = torch.arange(tiny_unets.TEXT_LENGTH) < torch.tensor([7, 3, 5])[:, None]
    with mmattn.inspect.record(model) as weights:
        tiny_unets.run(model, memory)
    assert {name for name, _ in weights} == {"default"}, "the host's own attention is diffusers' then"
    model.use_core()
    want = tiny_unets.run(model, memory, text_mask=mask)
    with mmattn.inspect.record(model) as weights:
        assert torch.equal(tiny_unets.run(model, memory, text_mask=mask), want)
    assert set(weights) == {(name, index) for name in ("default", "text") for index in range(len(model.layer_names))}
    for (name, _), calls in weights.items():
        (seen,) = calls
        real = mask if name == "text" else memory.mask
        assert seen.isfinite().all() and seen.shape[-1] == real.shape[1]
        assert not seen.masked_select(~real[:, None, None]).any()
        assert_close(seen.sum(-1), torch.ones(seen.shape[:-1]))


# Metrics of a training


def trained(**settings: Any) -> tuple[Any, Any]:
    """An adapted model with open gates and gradients, and a call of it."""
    model = tiny.attach(tiny.make("llama"), **settings)
    ids, memory = tiny.text(2, 7), tiny.memory(2, 5)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.adapters.named_parameters()):
            if name.endswith("gate"):
                parameter.fill_(0.1 * (number + 1))

    def call() -> Any:
        return model(ids, memory=memory, labels=ids)

    call().loss.backward()
    return model, call


def test_gates_and_gradients_by_layer() -> None:
    model, _ = trained(feed_forward=1)
    found = AdapterMetrics(model)(step=1)
    adapter = model.adapters["default"]
    for layer in adapter.layers:
        block = adapter.block(layer)
        assert found[f"gate/layer_{layer}"] == pytest.approx(math.tanh(float(block.gate.gate.detach())))
        assert found[f"feed_forward_gate/layer_{layer}"] == pytest.approx(
            math.tanh(float(block.feed_forward_gate.gate.detach()))
        )
    norms = [value for name, value in found.items() if name.startswith("gradients/")]
    squares = [p.grad.square().sum() for p in adapter.block(adapter.layers[0]).parameters()]
    first = torch.stack(squares).sum().sqrt()
    assert found[f"gradients/layer_{adapter.layers[0]}"] == pytest.approx(float(first))
    assert "gradients/shared" in found and len(norms) == len(adapter.layers) + 1
    assert not any(name.startswith(("memory_attention", "null_attention")) for name in found), "no forward was given"


def test_attention_on_memory_and_null_slot() -> None:
    model, call = trained(null_slot=True)
    found = AdapterMetrics(model, call)(step=1)
    with record(model) as weights:
        call()
    for (_, layer), (own,) in weights.items():
        share = float(own.sum(-1).mean())
        assert 0 < share < 1
        assert_close(torch.tensor(found[f"memory_attention/layer_{layer}"]), torch.tensor(share), 1e-5)
        assert found[f"null_attention/layer_{layer}"] == pytest.approx(1 - share, abs=1e-5)


def test_without_a_null_slot_all_of_it_is_on_the_memory() -> None:
    model, call = trained()
    found = AdapterMetrics(model, call)(step=1)
    assert {found[name] for name in found if name.startswith("memory_attention/")} == {1.0}
    assert not any(name.startswith("null_attention/") for name in found)


def test_slots_joined_with_the_text_share_its_attention() -> None:
    model = mmattn.attach(tiny.make("llama"), JoinedAdapter(memory_dim=tiny.MEMORY_DIM, every=1))
    ids, memory = tiny.text(2, 7), tiny.memory(2, 5)
    found = AdapterMetrics(model, lambda: model(ids, memory=memory))(step=1)
    shares = [value for name, value in found.items() if name.startswith("memory_attention/")]
    assert len(shares) == tiny.LAYERS and all(0 < share < 1 for share in shares)
    assert {value for name, value in found.items() if name.startswith("gradients/")} == {0.0}


def test_attention_is_measured_every_so_many_steps_over_all_calls() -> None:
    model, call = trained(null_slot=True)
    ids, memory, calls = tiny.text(2, 7), tiny.memory(2, 5), []

    def row(number: int) -> None:
        calls.append(number)
        model(ids[number : number + 1], memory=memory[number : number + 1])

    metrics = AdapterMetrics(model, lambda: (row(0), row(1)), attention_steps=3)
    shown = [any(name.startswith("memory_attention/") for name in metrics(step)) for step in (1, 2, 3, 4, 6)]
    assert shown == [False, False, True, False, True] and calls == [0, 1] * 2
    both = metrics(3)
    first, second = (AdapterMetrics(model, lambda n=n: row(n))(1) for n in range(2))
    for name in both:
        if name.startswith("null_attention/"):
            assert first[name] != second[name]
            assert both[name] == pytest.approx((first[name] + second[name]) / 2, abs=2e-6)


def test_adapters_by_name() -> None:
    model, _ = trained()
    model.add_adapter("second", mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, every=3, num_heads=2, head_dim=4))
    found = AdapterMetrics(model)(step=1)
    assert {"gate/second/layer_2", "gradients/second/layer_2", "gate/layer_0"} <= set(found)
    assert found["gate/second/layer_2"] == 0


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
    with pytest.raises(ConfigError, match="no visible slot"):
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
