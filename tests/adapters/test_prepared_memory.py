"""One prepared memory used in several ways at once: each use has its own precision, mode, host and device."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import mmattn
from tests import tiny
from tests.tiny import assert_close, differs

ROWS = 3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "none": None}


def precise(dtype):
    return torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)


@pytest.mark.parametrize("order", list(itertools.permutations(DTYPES)), ids="-".join)
@torch.no_grad()
def test_one_prepared_memory_under_every_precision(model, ids, order):
    """Invariant 25: keys and values of one precision are never served in another, whatever was computed first."""
    memory = tiny.memory(ROWS)
    want = {}
    for name, dtype in DTYPES.items():
        with precise(dtype):
            want[name] = model(ids, memory=memory).logits
    prepared = model.prepare(memory)
    for name in (*order, *order):
        with precise(DTYPES[name]):
            assert torch.equal(model(ids, memory=prepared).logits, want[name]), name
    # The same within one block.
    with model.condition(memory):
        for name in (*order, *order):
            with precise(DTYPES[name]):
                assert torch.equal(model.host(ids).logits, want[name]), name


@torch.no_grad()
def test_keys_of_a_memory_that_is_edited_while_it_is_projected_are_not_kept(model, ids):
    """Invariant 119: as another thread would, between the reading of the memory and its projection for a layer."""
    memory, edited, adapter = tiny.memory(ROWS), tiny.memory(ROWS, seed=5), model.adapter("default")
    want = model(ids, memory=edited).logits
    assert differs(model(ids, memory=memory).logits, want)
    prepared = model.prepare(memory)
    values, read = prepared.values(adapter), adapter.read(memory)
    values["read"] = mmattn.Memory(read.tokens.clone(), read.mask)
    before = prepared.read(adapter, values)
    memory.tokens.copy_(edited.tokens)
    prepared.project(adapter, adapter.layers, before, ids.shape[1], values)
    assert_close(model(ids, memory=prepared).logits, want, 1e-6)


@pytest.mark.parametrize("first", [True, False], ids=["inference first", "inference last"])
def test_inference_mode_and_training_share_a_prepared_memory(model, ids, first):
    """Invariant 25."""
    memory = tiny.memory(ROWS)
    prepared = model.prepare(memory)
    with torch.no_grad():
        want = model(ids, memory=memory).logits

    def infer():
        with torch.inference_mode():
            assert torch.equal(model(ids, memory=prepared).logits, want)

    def decide():
        with torch.no_grad():
            assert torch.equal(model(ids, memory=prepared).logits, want)

    def train():
        model(ids, labels=ids, memory=prepared).loss.backward()
        gradients = [one.grad.clone() for one in model.adapters.parameters()]
        model.zero_grad()
        model(ids, labels=ids, memory=memory).loss.backward()
        for got, one in zip(gradients, model.adapters.parameters(), strict=True):
            assert torch.equal(got, one.grad)
        model.zero_grad()

    steps = [infer, decide, train]
    for step in (steps if first else steps[::-1]) * 2:
        step()


@torch.no_grad()
def test_between_two_steps_of_a_block_every_change_is_seen():
    """What is kept from step to step goes with an edit, another parameter, another module, other rows, autocast."""
    model, ids = tiny.attach(tiny.make("llama")), tiny.text(2, 3)
    memory = tiny.memory(2, lengths=[4, 2])
    projection = model.adapter("default").attention(0).kv_proj

    def edit():
        projection.k_proj.weight.mul_(3)

    def another_parameter():
        projection.v_proj.weight = nn.Parameter(projection.v_proj.weight * 3)

    def another_module():
        projection.k_proj = nn.Linear(projection.memory_dim, projection.k_proj.out_features, bias=True)

    def another_norm():
        model.adapter("default").memory_norm = nn.LayerNorm(memory.dim, eps=9.0)

    def another_slot():
        memory.tokens[0, 0, :5] += 9

    with model.condition(memory):
        before = model.host(ids).logits
        for change in (edit, another_parameter, another_module, another_norm, another_slot):
            change()
            seen = model.host(ids).logits
            assert differs(seen[:1], before[:1]), change.__name__
            assert_close(seen, model(ids, memory=mmattn.Memory(memory.tokens.clone(), memory.mask)).logits, 1e-6)
            before = seen
        with precise(torch.bfloat16):
            fresh = mmattn.Memory(memory.tokens.clone(), memory.mask)
            assert torch.equal(model.host(ids).logits, model(ids, memory=fresh).logits)
        assert torch.equal(model.host(ids).logits, before)
