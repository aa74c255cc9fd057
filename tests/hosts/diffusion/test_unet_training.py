"""Training an adapter on a frozen UNet: what moves, checkpointing, autocast, several memories before one backward."""

from __future__ import annotations

import pytest
import torch

import mmattn
from tests import tiny, tiny_unets
from tests.tiny import assert_close
from tests.tiny_unets import ROWS, run


def gradients(model, memory, kind="stable", **more):
    """Loss and gradients, by name, of the adapter and of the memory."""
    tokens = memory.tokens.clone().requires_grad_()
    model.adapters.zero_grad()
    loss = run(model, mmattn.Memory(tokens, memory.mask), kind, **more).square().mean()
    loss.backward()
    found = {name: one.grad.clone() for name, one in model.adapters.named_parameters()}
    return loss.detach(), found | {"memory": tokens.grad}


def test_a_start_as_the_hosts_own_projections():
    model = tiny_unets.attach(tiny_unets.make(), opened=False, tokens=2, start="host")
    for index, block in enumerate(model.adapters["default"].blocks.values()):
        assert torch.equal(block.k_proj.weight, model.layer(index).to_k.weight)
        assert torch.equal(block.v_proj.weight, model.layer(index).to_v.weight)
    assert tiny.differs(run(model, tiny.memory(ROWS)).detach(), tiny_unets.own())
    with pytest.raises(mmattn.errors.AttachError, match="tokens="):
        model.add_adapter("other", tiny_unets.adapter(start="host"))
    assert list(model.adapters) == ["default"]


@pytest.mark.parametrize(
    ("kind", "core"),
    [("stable", False), ("stable", True), ("sdxl", True), ("k", False), ("k", True), ("simple", False)],
)
def test_checkpointing_gives_the_same_gradients(kind, core):
    memory, adapter_scale = tiny.memory(ROWS, lengths=[5, 0, 3]), torch.tensor([0.5, 1.0, 2.0])
    model = tiny_unets.attach(tiny_unets.make(kind)).use_core(core).train()
    want = gradients(model, memory, kind, adapter_scale=adapter_scale)
    with tiny_unets.counting(model.layer(len(model.layer_names) - 1)) as ran:
        model.enable_gradient_checkpointing()
        got = gradients(model, memory, kind, adapter_scale=adapter_scale)
        # Once more in the backward pass, where these blocks let their attention run again.
        assert len(ran) == (1 if kind in ("simple", "k") else 2)
    assert torch.equal(got[0], want[0])
    for name, value in want[1].items():
        assert torch.equal(got[1][name], value), name
        assert value.any(), name
    # Nothing of that stands in the way of a host without memory, or without us.
    with torch.no_grad():
        assert_close(run(model.eval(), None, kind), tiny_unets.own(kind))
    model.train()
    unet = model.unload()
    args, kwargs = tiny_unets.given(kind)
    args[2].requires_grad_()
    unet(*args, **kwargs).sample.sum().backward()
    assert args[2].grad.any()


def test_a_memory_of_its_own_for_every_row_and_time():
    """As training has it: rows at different times, some of them without the memory."""
    model, memory = tiny_unets.attach(tiny_unets.make()).train(), tiny.memory(ROWS)
    times, (sample, _, words) = torch.tensor([3, 500, 41]), tiny_unets.given()[0]
    out = model(sample, times, words, memory=memory, adapter_scale=torch.tensor([1.0, 0.0, 1.0])).sample
    own = model(sample, times, words).sample
    assert torch.equal(out[1], own[1]) and not torch.equal(out[0], own[0])
    by_block = model(sample, times, words, memory=memory, adapter_scale={"": torch.tensor([1.0, 0.0, 1.0])}).sample
    assert torch.equal(by_block, out)
    with pytest.raises(mmattn.errors.ConditionError, match="one timestep"):
        model(sample, times, words, memory=memory, adapter_scale=lambda time: time)
    same = torch.full((ROWS,), 41)
    assert torch.isfinite(model(sample, same, words, memory=memory, adapter_scale=lambda time: time / 100).sample).all()


@pytest.mark.parametrize("core", [False, True])
def test_autocast(core):
    model, memory = tiny_unets.attach(tiny_unets.make()).use_core(core), tiny.memory(ROWS, lengths=[5, 0, 3])
    want, args = gradients(model, memory), tiny_unets.given()[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(model, memory)
        with torch.no_grad(), model.condition(memory):
            rough = model.host(*args).sample
            with torch.autocast("cpu", enabled=False):
                exact = model.host(*args).sample
            assert torch.equal(model.host(*args).sample, rough)
    assert_close(got[0], want[0], 0.05)
    for name, value in want[1].items():
        assert got[1][name].dtype is torch.float32
        assert_close(got[1][name], value, 0.3)
    with torch.no_grad():
        assert torch.equal(exact, run(model, memory))
        assert_close(rough.float(), exact, 0.15)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(rough[1], run(model)[1])
