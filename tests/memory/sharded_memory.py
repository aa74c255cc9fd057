"""One of two processes, each with half of the slots of a memory; compares with the whole memory in one process."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

import mmattn
from mmattn.errors import ConditionError, ConfigError
from mmattn.memory import ShardedMemory
from tests import tiny


def main(store: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(minutes=3))
    for setting in ({}, {"null_slot": True, "length_norm": 20.0}):
        compare(rank, setting)
    dist.destroy_process_group()
    print("equal")


def compare(rank: int, setting: dict[str, Any]) -> None:
    torch.manual_seed(1)
    tokens = torch.randn(3, 12, tiny.MEMORY_DIM)
    # The third row has no slot at all; the second one none in the first process.
    mask = torch.arange(12) < torch.tensor([[12], [12], [0]])
    mask[1, :7] = False
    model, ids = tiny.attach(tiny.make("llama"), **setting), tiny.text(3)
    mine = slice(0, 7) if rank == 0 else slice(7, 12)

    def gradients(memory: Any, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        out = model(ids, labels=ids, memory=memory)
        weights = list(model.adapters.parameters())
        of_tokens, *found = torch.autograd.grad(out.loss, [given, *weights], materialize_grads=True)
        return out.logits, of_tokens, found

    everything, own = tokens.clone().requires_grad_(), tokens[:, mine].clone().requires_grad_()
    wanted = gradients(mmattn.Memory(everything, mask), everything)
    found = gradients(ShardedMemory(mmattn.Memory(own, mask[:, mine])), own)
    tiny.assert_close(found[0], wanted[0], 1e-6)
    assert torch.equal(found[0][2], tiny.own(ids)[2]), "a row that sees nothing anywhere is the host's own"
    assert tiny.differs(found[0][1], tiny.own(ids)[1])
    tiny.assert_close(found[1], wanted[1][:, mine], 1e-5)
    names = [name for name, _ in model.adapters.named_parameters()]
    for name, got, want in zip(names, found[2], wanted[2], strict=True):
        if ".k_proj" in name or ".v_proj" in name or "memory_norm" in name:
            dist.all_reduce(got)  # of the slots of each process, as the page says
        assert (got - want).abs().max() <= 1e-4 * max(1e-3, want.abs().max()), name
    given: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    whole = model.generate(ids, memory=mmattn.Memory(tokens, mask), **given)
    shard = model.prepare(mmattn.Memory(tokens[:, mine], mask[:, mine]))
    assert torch.equal(model.generate(ids, memory=ShardedMemory(shard), **given), whole)
    try:
        with mmattn.inspect.record(model):
            model(ids, memory=ShardedMemory(shard))
    except (ConditionError, ConfigError) as error:
        assert "split over processes" in str(error)
    else:
        raise AssertionError("weights that no process has")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
