"""One memory used several times: prepared, under several precisions, and by layers that are recomputed."""

from __future__ import annotations

import itertools

import pytest
import torch

import mmattn
from mmattn.errors import ConditionError
from tests import tiny
from tests.test_contract import case_of
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


IN_THE_HOSTS_ATTENTION = ("joined, llama", "inserted, llama", "prefix, llama", "prefix, gpt2", "fused cache, mistral")
KINDS = ("gated, llama", "gated, mixtral", "chunked, llama", "chunked, bloom", "composed, llama")


def gradients(name: str, use_reentrant: bool | None) -> dict[str, torch.Tensor]:
    """Of two forwards with different memories, and a third without one, and one backward."""
    torch.manual_seed(3)
    case = case_of(name)
    model, ids = case.trained().train(), case.batch["input_ids"]
    if use_reentrant is not None:
        tiny.checkpoint(model.host, use_reentrant)
    memories = [case.memory(seed) for seed in range(2)]
    tokens = [one.tokens.requires_grad_() for one in memories if isinstance(one, mmattn.Memory)]
    losses = [model(ids, labels=ids, memory=memory, use_cache=False).loss for memory in (*memories, None)]
    (losses[0] + 2 * losses[1] + losses[2]).backward()
    found = dict(model.adapters.named_parameters()) | {f"memory {n}": one for n, one in enumerate(tokens)}
    return {name: one.grad for name, one in found.items() if one.grad is not None}


@pytest.mark.parametrize("use_reentrant", tiny.ways_of_checkpointing())
@pytest.mark.parametrize("name", [*KINDS, *IN_THE_HOSTS_ATTENTION])
def test_gradients_are_the_same(name: str, use_reentrant: bool) -> None:
    """Invariant 49: reentrant checkpointing would lose gradients of keys in the host's attention, and is refused."""
    if use_reentrant and name in IN_THE_HOSTS_ATTENTION:
        with pytest.raises(ConditionError, match="reentrant"):
            gradients(name, use_reentrant)
        return
    want, got = gradients(name, None), gradients(name, use_reentrant)
    assert want and got.keys() == want.keys()
    for parameter, value in want.items():
        assert value.any(), parameter
        tiny.assert_close(got[parameter], value)
