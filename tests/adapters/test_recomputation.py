"""Layers that are recomputed in the backward pass see the memory they saw first, whatever the kind of adapter."""

from __future__ import annotations

import pytest
import torch

import mmattn
from mmattn.errors import ConditionError
from tests import tiny
from tests.test_contract import case_of

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
