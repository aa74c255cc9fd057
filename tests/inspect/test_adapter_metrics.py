"""Figures of adapters in training, against the same worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import mmattn
from mmattn.adapters import JoinedAdapter
from mmattn.inspect import AdapterMetrics, record
from tests import tiny
from tests.tiny import assert_close


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
    found = AdapterMetrics(model)(step=1, grad_norm=3.0)
    adapter = model.adapters["default"]
    for layer in adapter.layers:
        block = adapter.block(layer)
        assert found[f"gate/layer_{layer}"] == pytest.approx(math.tanh(float(block.gate.gate.detach())))
        assert found[f"feed_forward_gate/layer_{layer}"] == pytest.approx(
            math.tanh(float(block.feed_forward_gate.gate.detach()))
        )
    norms = [value for name, value in found.items() if name.startswith("gradients/")]
    assert math.sqrt(sum(norm**2 for norm in norms)) == pytest.approx(3.0), "together they are that of the step"
    squares = [p.grad.square().sum() for p in adapter.block(adapter.layers[0]).parameters()]
    whole = torch.cat([p.grad.flatten() for p in model.adapters.parameters()]).norm()
    first = torch.stack(squares).sum().sqrt()
    assert found[f"gradients/layer_{adapter.layers[0]}"] == pytest.approx(float(3.0 * first / whole))
    assert "gradients/shared" in found and len(norms) == len(adapter.layers) + 1
    assert not any(name.startswith(("memory_attention", "null_attention")) for name in found), "no forward was given"


def test_attention_on_memory_and_null_slot() -> None:
    model, call = trained(null_slot=True)
    found = AdapterMetrics(model, call)(step=1, grad_norm=1.0)
    with record(model) as weights:
        call()
    for (_, layer), (own,) in weights.items():
        share = float(own.sum(-1).mean())
        assert 0 < share < 1
        assert_close(torch.tensor(found[f"memory_attention/layer_{layer}"]), torch.tensor(share), 1e-5)
        assert found[f"null_attention/layer_{layer}"] == pytest.approx(1 - share, abs=1e-5)


def test_without_a_null_slot_all_of_it_is_on_the_memory() -> None:
    model, call = trained()
    found = AdapterMetrics(model, call)(step=1, grad_norm=1.0)
    assert {found[name] for name in found if name.startswith("memory_attention/")} == {1.0}
    assert not any(name.startswith("null_attention/") for name in found)


def test_slots_joined_with_the_text_share_its_attention() -> None:
    model = mmattn.attach(tiny.make("llama"), JoinedAdapter(memory_dim=tiny.MEMORY_DIM, every=1))
    ids, memory = tiny.text(2, 7), tiny.memory(2, 5)
    found = AdapterMetrics(model, lambda: model(ids, memory=memory))(step=1, grad_norm=0.0)
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
    shown = [any(name.startswith("memory_attention/") for name in metrics(step, 1.0)) for step in (1, 2, 3, 4, 6)]
    assert shown == [False, False, True, False, True] and calls == [0, 1] * 2
    both = metrics(3, 1.0)
    first, second = (AdapterMetrics(model, lambda n=n: row(n))(1, 1.0) for n in range(2))
    for name in both:
        if name.startswith("null_attention/"):
            assert first[name] != second[name]
            assert both[name] == pytest.approx((first[name] + second[name]) / 2, abs=2e-6)


def test_adapters_by_name() -> None:
    model, _ = trained()
    model.add_adapter("second", mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, every=3, num_heads=2, head_dim=4))
    found = AdapterMetrics(model)(step=1, grad_norm=1.0)
    assert {"gate/second/layer_2", "gradients/second/layer_2", "gate/layer_0"} <= set(found)
    assert found["gate/second/layer_2"] == 0
