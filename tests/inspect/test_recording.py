"""`mmattn.inspect.record`: the weights are those of the call, and the call does not notice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import torch

import mmattn
from mmattn.inspect import diagnosis, record_attention as recording
from tests import tiny, tiny_unets
from tests.tiny import assert_close


def test_names_of_the_room_are_no_modules() -> None:
    """A module of the same name would hide `record` or `doctor` as soon as it is imported."""
    assert mmattn.inspect.record is recording.record and mmattn.inspect.doctor is diagnosis.doctor is mmattn.doctor
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
