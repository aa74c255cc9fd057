"""Compiled UNets and diffusion transformers: one graph for each memory, timestep, scale and half of guidance."""

from __future__ import annotations

import asyncio

import pytest
import torch
import torch._dynamo.testing

import mmattn
from mmattn.adapters import JointDecoupledAdapter
from mmattn.adapters.decoupled import TimedResampler
from mmattn.testing.case import stir
from tests import tiny, tiny_transformers
from tests.device import count
from tests.tiny import assert_close, differs

ROWS, TIMES = 3, (901, 41, 7)
UNET, CROSS, JOINT, PACKED = "stable", "PixArtTransformer2DModel", "SD3Transformer2DModel", "FluxTransformer2DModel"
#: A UNet that is traced quickly.
SHALLOW = {
    "block_out_channels": (14,),
    "down_block_types": ("CrossAttnDownBlock2D",),
    "up_block_types": ("CrossAttnUpBlock2D",),
}


def make(family):
    """An adapted model of a family, and its arguments at a timestep."""
    model = tiny_transformers.attach(tiny_transformers.make(family, **(SHALLOW if family == UNET else {})))
    return model, at_time(tiny_transformers.given(model, ROWS))


def at_time(batch):
    """The arguments of a host as a function of the timestep."""
    return lambda time: batch | {"timestep": torch.full_like(torch.as_tensor(batch["timestep"]), time)}


@torch.no_grad()
def is_one_graph(dynamo, model, inputs, memories, **more):
    """Assert that for all timesteps the compiled host in a block, and the compiled model, are one graph each."""
    for host, in_block in ((model.host, True), (model, False)):
        torch._dynamo.reset()
        dynamo.frame_count = 0
        fast = torch.compile(host, backend=dynamo, fullgraph=True)
        for time, memory in zip(TIMES, memories, strict=True):
            want = model(**inputs(time), memory=memory, **more)[0]
            if in_block:
                with model.condition(memory, **more):
                    assert_close(fast(**inputs(time))[0], want)
            else:
                assert_close(fast(**inputs(time), memory=memory, **more)[0], want)
        assert dynamo.frame_count == 1
        own = model(**inputs(time))[0]
        assert differs(want, own)
        assert_close(fast(**inputs(time))[0], own)
        assert dynamo.frame_count == 2
    assert not torch._dynamo.utils.counters["graph_break"]


GIVEN = {
    "tensor": lambda model, memory: memory.tokens,
    "Memory": lambda model, memory: memory,
    "prepared": lambda model, memory: model.prepare(memory),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", [UNET, CROSS, JOINT, PACKED])
@pytest.mark.parametrize("given", GIVEN)
def test_one_graph_for_each_memory_and_timestep(dynamo, family, given):
    """Invariant 211: in a block and by keyword, equal to the host as it is; without a memory it is the host's own."""
    model, inputs = make(family)
    is_one_graph(dynamo, model, inputs, [GIVEN[given](model, tiny.memory(ROWS, seed=seed)) for seed in range(3)])


SCALES = {
    "number": 0.5,
    "by block": {"down": 0.5, "mid": 1.0},
    "by row": torch.tensor([1.0, 0.5, 0.3]),
    "map": torch.linspace(0, 1, 3 * 8 * 12).view(3, 8, 12),
}


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_scales_are_those_of_the_host_as_it_is(dynamo, scale):
    """Invariant 211."""
    is_one_graph(dynamo, *make(UNET), [tiny.memory(ROWS, lengths=[5, 1, 3])] * 3, adapter_scale=scale)


@pytest.mark.slow
def test_a_memory_that_follows_the_timestep(dynamo):
    """Invariant 211."""
    resampler = TimedResampler(num_latents=3, depth=1, width=12, num_heads=2, head_dim=6, frequencies=8)
    adapter = JointDecoupledAdapter(memory_dim=tiny.MEMORY_DIM, resampler=resampler)
    model = mmattn.attach(tiny_transformers.make(JOINT), adapter)
    stir(model.adapter("default"))
    memories = [tiny.memory(ROWS, seed=seed) for seed in range(3)]
    is_one_graph(dynamo, model, at_time(tiny_transformers.given(model, ROWS)), memories)


@pytest.mark.slow
@torch.no_grad()
def test_a_schedule_and_both_halves_of_guidance(dynamo):
    """Invariant 211: what follows from the arguments of a step is known before its graph."""
    (model, inputs), memory = make(UNET), tiny.memory(ROWS)
    fast = torch.compile(model.host, backend=dynamo, fullgraph=True)
    for time in TIMES:
        with model.condition(memory, adapter_scale=lambda time: time / 1000):
            assert_close(fast(**inputs(time)).sample, model.host(**inputs(time)).sample)
    assert dynamo.frame_count <= 2  # one more for any number
    both = {name: torch.cat([value.flip(0), value]) if value.dim() else value for name, value in inputs(7).items()}
    with model.condition(memory, guided=True):
        got, want = fast(**both).sample, model.host(**both).sample
    assert_close(got, want)
    first = {name: value[:ROWS] if value.dim() else value for name, value in both.items()}
    assert_close(got[:ROWS], model(**first)[0])


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_host_in_several_tasks(dynamo):
    """Invariant 211: each task of one thread has the memory of its own block, or none."""
    model, inputs = make(UNET)
    fast, batch = torch.compile(model.host, backend=dynamo, fullgraph=True), inputs(7)
    memories = [tiny.memory(ROWS, seed=1), None, tiny.memory(ROWS, seed=2)]
    wants = [model(**batch, memory=memory).sample for memory in memories]

    async def work(memory, want):
        with model.condition(memory):
            for _ in range(3):
                await asyncio.sleep(0)
                assert_close(fast(**batch).sample, want)

    async def together():
        await asyncio.gather(*(work(*each) for each in zip(memories, wants, strict=True)))

    asyncio.run(together())
    assert dynamo.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("in_block", [True, False])
def test_gradients_of_a_compiled_host(dynamo, in_block):
    """Invariant 211."""
    (model, inputs), memory, gradients = make(UNET), tiny.memory(ROWS), []
    fast = torch.compile(model.host if in_block else model, backend="aot_eager", fullgraph=True)
    for call in (model, fast):
        model.zero_grad()
        if in_block:
            with model.condition(memory):
                loss = call(**inputs(7)).sample.square().mean()
        else:
            loss = call(**inputs(7), memory=memory).sample.square().mean()
        loss.backward()
        gradients.append([weight.grad for weight in model.adapters.parameters()])
    for got, want in zip(*gradients, strict=True):
        assert_close(got, want)


@pytest.mark.slow
@torch.no_grad()
def test_the_default_backend():
    """Invariant 211."""
    model, inputs = make(UNET)
    torch._dynamo.reset()
    fast = torch.compile(model.host, fullgraph=True)
    for seed, time in enumerate(TIMES):
        memory = tiny.memory(ROWS, seed=seed)
        with model.condition(memory):
            assert_close(fast(**inputs(time)).sample, model.host(**inputs(time)).sample, 1e-4)
    torch._dynamo.reset()


# What a step costs


@pytest.mark.parametrize("family", [UNET, CROSS, JOINT, PACKED])
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@torch.no_grad()
def test_a_later_step_costs_three_operations_a_layer(family, given):
    """Invariant 212: one attention, one product and one scaled sum; of a tensor that is given anew only in a block."""
    model, inputs = make(family)
    memory, batch = given(model, tiny.memory(ROWS)), inputs(7)
    bare = count(lambda: model.host(**batch)).operations
    layers = len(model.adapter("default").layers)
    norms = sum(getattr(model.layer(index), "norm_q", None) is not None for index in range(layers))
    budget = bare + 3 * layers + 4 * norms
    if not torch.is_tensor(memory):
        assert count(lambda: model(**batch, memory=memory, adapter_scale=0.7)).operations <= budget
    with model.condition(memory):
        assert count(lambda: model.host(**batch)).operations <= budget


@torch.no_grad()
def test_what_is_kept_follows_edits():
    """Invariant 212: of the memory, of the tensor that was given as one, and of the weights."""
    model, inputs = make(UNET)
    batch, tokens = inputs(7), tiny.memory(ROWS).tokens
    memory, weight = mmattn.Memory(tokens), model.adapter("default").attention(0).k_proj.weight
    for given in (memory, tokens):
        for edited in (tokens, weight):
            before = model(**batch, memory=given).sample
            edited.copy_(edited.flip(-1))
            after = model(**batch, memory=given).sample
            assert differs(after, before)
            assert_close(after, model(**batch, memory=tokens.clone()).sample)
