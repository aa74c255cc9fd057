"""Hosts sharded by FSDP2 learn what whole ones do, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import mmattn
from tests import tiny
from tests.tiny import assert_close


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process only."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


SHARDABLE = {
    "gated": mmattn.GatedAdapter(memory_dim=11, every=1),
    "joined": mmattn.adapters.JoinedAdapter(memory_dim=11),
    "inserted": mmattn.adapters.InsertedAdapter(memory_dim=11),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", SHARDABLE)
def test_an_adapted_model_is_sharded_as_a_whole(kind: str) -> None:
    """Invariant 203. FSDP2 takes every parameter of an adapter; values and a step are those of the whole model."""
    whole, pieces = (tiny.open_gates(mmattn.attach(tiny.make("llama"), SHARDABLE[kind])) for _ in range(2))
    pieces.adapters.load_state_dict(whole.adapters.state_dict())
    fully_shard(pieces)
    ids, memory = torch.arange(3, 10)[None], torch.randn(1, 5, 11)
    for model in (whole, pieces):
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 0.01)
        model.train()(ids, labels=ids, memory=memory).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = whole.eval()(ids, memory=memory).logits
    assert_close(pieces.eval()(ids, memory=memory).logits, wanted, 1e-5)
    assert not torch.equal(wanted, whole(ids).logits)
