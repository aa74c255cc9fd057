"""One prepared memory used in several ways at once: each use has its own precision, mode, host and device."""

from __future__ import annotations

import itertools

import pytest
import torch

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
