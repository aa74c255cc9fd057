"""Attention weights: those of the call, which does not notice; metrics of a training."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch

import mmattn
from mmattn.adapters import JoinedAdapter
from mmattn.inspect import AdapterMetrics, record, record_attention as recording
from tests import tiny, tiny_unets
from tests.tiny import assert_close


def test_names_of_the_room_are_no_modules() -> None:
    """A module of the same name would hide `record` as soon as it is imported."""
    assert mmattn.inspect.record is recording.record
    assert [name for name in mmattn.inspect.__all__ if isinstance(getattr(mmattn.inspect, name), ModuleType)] == []


def test_weights_of_every_block_and_the_same_logits() -> None:
    model = tiny.attach(tiny.make("llama"), null_slot=False)
    ids, memory = tiny.text(3, 7), tiny.memory(3, 5, lengths=[5, 2, 4])
    alone = model(ids, memory=memory).logits
    with mmattn.inspect.record(model) as weights:
        assert torch.equal(model(ids, memory=memory).logits, alone)
    assert sorted(weights) == [("default", 0), ("default", 2)]
    for (seen,) in weights.values():
        assert seen.shape == (3, 2, 7, 5)
        assert torch.allclose(seen.sum(-1), torch.ones(3, 2, 7))
        assert not seen[~memory.mask[:, None, None].expand_as(seen)].any()
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
