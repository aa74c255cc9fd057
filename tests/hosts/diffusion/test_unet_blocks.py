"""Blocks of calls of a UNet: each sees its memory, made into keys and values once; threads, failures and guidance."""

from __future__ import annotations

import contextlib

import pytest
import torch

import mmattn
from mmattn.errors import ConditionError
from tests import tiny, tiny_unets
from tests.tiny import assert_close, differs
from tests.tiny_unets import ROWS, run


@pytest.fixture
def model():
    """A tiny UNet with an open adapter."""
    return tiny_unets.attach(tiny_unets.make())


# Blocks and threads


@torch.no_grad()
def test_a_layer_called_by_itself_knows_no_picture_and_no_time(model):
    """As before the call of the whole host, so after it, and after one that failed."""
    memory, x, words = tiny.memory(ROWS), torch.randn(ROWS, 96, 14), tiny_unets.text()
    own = tiny_unets.make().get_submodule(model.layer_names[1])(x, words)
    for adapter_scale in (torch.ones(ROWS, 8, 12), lambda time: 1.0):
        with model.condition(memory, adapter_scale=adapter_scale):
            for whole in (
                lambda: None,
                lambda: run(model),
                lambda: model.host(tiny_unets.picture(), 3, words[:, :, 1:]),
            ):
                with contextlib.suppress(RuntimeError):  # the last text is of another width
                    whole()
                with pytest.raises(ConditionError, match="the whole host"):
                    model.layer(1)(x, words)
    with model.condition(memory, adapter_scale=0.5):
        assert differs(model.layer(1)(x, words), own)
    assert torch.equal(model.layer(1)(x, words), own)


@torch.no_grad()
def test_a_memory_stays_with_its_host():
    left, right = (tiny_unets.attach(tiny_unets.make(seed=seed)) for seed in (0, 1))
    one, two = tiny.memory(ROWS), tiny.memory(ROWS, m=3, seed=1)
    want, own = (run(left, one), run(right, two)), run(right)
    with left.condition(one):
        assert torch.equal(run(right), own)
        with right.condition(two):
            assert torch.equal(run(left), want[0]) and torch.equal(run(right), want[1])


# Keys and values are made once, and never stale


# Guidance


@torch.no_grad()
def test_guidance_hides_the_memory_from_the_first_half(model):
    memory, adapter_scale = tiny.memory(ROWS, lengths=[5, 0, 3]), torch.tensor([0.5, 1.0, 2.0])
    args = tuple(torch.cat([one, one]) if isinstance(one, torch.Tensor) else one for one in tiny_unets.given()[0])
    own = tiny_unets.make()(*args).sample
    for given in (1.0, adapter_scale, adapter_scale[:, None, None].expand(-1, 16, 24), lambda time: adapter_scale):
        with model.condition(memory, adapter_scale=given, guided=True):
            out = model.host(*args).sample
            assert torch.equal(out[:ROWS], own[:ROWS])
            assert_close(out[ROWS:], run(model, memory, adapter_scale=given))
            # Without guidance the same block serves rows one by one.
            assert torch.equal(run(model), run(model, memory, adapter_scale=given))
    # A memory for both halves needs no word.
    both = mmattn.Memory.stack([tiny.memory(ROWS, seed=1), memory])
    assert_close(model(*args, memory=both).sample[ROWS:], run(model, memory))


@torch.no_grad()
def test_one_host_inside_the_forward_of_another():
    """Each has a step of its own: a map over another picture, or a step forgotten too early, would be an error."""
    outer, inner = (tiny_unets.attach(tiny_unets.make(seed=seed)) for seed in (0, 1))
    memory, map_ = tiny.memory(ROWS), torch.rand(ROWS, tiny_unets.HEIGHT, tiny_unets.WIDTH)
    want, alone = run(outer, memory, adapter_scale=map_), run(inner, memory, adapter_scale=0.5)
    heard = []

    def call_inner(module, args, output):
        heard.append(run(inner, memory, adapter_scale=0.5))

    hook = outer.layer(1).register_forward_hook(call_inner, prepend=True)
    assert torch.equal(run(outer, memory, adapter_scale=map_), want)
    hook.remove()
    assert torch.equal(heard[0], alone)


@torch.no_grad()
def test_text_that_a_layer_normalises_is_projected_once_too():
    model = tiny_unets.attach(tiny_unets.make("k")).use_core()
    layers = [model.layer(index) for index in range(len(model.layer_names))]
    assert any(layer.norm_cross is not None for layer in layers)
    args, kwargs = tiny_unets.given("k")
    want = model.host(*args, **kwargs).sample
    with tiny_unets.counting(*(layer.to_k for layer in layers)) as ran, model.condition(None):
        for _ in range(3):
            assert torch.equal(model.host(*args, **kwargs).sample, want)
        assert len(ran) == len(layers)
        layers[0].norm_cross.weight.mul_(2)
        assert differs(model.host(*args, **kwargs).sample, want)
