"""What a UNet answers with a memory: rows, padding, ways to call it, and what is refused."""

from __future__ import annotations

import contextlib

import pytest
import torch
from diffusers import UNet2DModel
from torch import nn

import mmattn
from mmattn.errors import AttachError, ConditionError
from tests import tiny, tiny_unets
from tests.tiny import assert_close, differs
from tests.tiny_unets import ROWS, run

kinds = pytest.mark.parametrize("kind", tiny_unets.KINDS)


@pytest.fixture
def model():
    """A tiny UNet with an open adapter."""
    return tiny_unets.attach(tiny_unets.make())


# Nothing added is nothing changed


@kinds
@torch.no_grad()
def test_a_fresh_adapter_is_exactly_nothing(kind):
    model = tiny_unets.attach(tiny_unets.make(kind), opened=False)
    assert torch.equal(run(model, tiny.memory(ROWS), kind), tiny_unets.own(kind))


@kinds
@torch.no_grad()
def test_rows_and_padding_in_every_kind_of_block(kind):
    model, memory = tiny_unets.attach(tiny_unets.make(kind), tokens=2), tiny.memory(ROWS, lengths=[5, 0, 3])
    args, kwargs = tiny_unets.given(kind)
    out, own = run(model, memory, kind), tiny_unets.own(kind)
    assert torch.equal(out[1], own[1]) and differs(out[[0, 2]], own[[0, 2]])
    assert torch.equal(run(model, tiny.memory(ROWS, m=0), kind), own)
    for i in range(ROWS):
        alone = model(*tiny_unets.row_of(args, i), memory=memory[i], **tiny_unets.row_of(kwargs, i)).sample
        assert_close(alone, out[i : i + 1])
    for garbage in (float("nan"), float("inf"), -7e3):
        tokens = memory.tokens.masked_fill(~memory.mask[..., None], garbage)
        assert torch.equal(run(model, mmattn.Memory(tokens, memory.mask), kind), out)


@torch.no_grad()
def test_what_the_host_misses_it_says_itself(model):
    own = None
    for host, given in ((tiny_unets.make(), None), (model.host, tiny.memory(ROWS))):
        with model.condition(given) if given is not None else torch.no_grad():
            args, kwargs = tiny_unets.given()
            with pytest.raises(TypeError, match="timestep") as raised:
                host(args[0], encoder_hidden_states=args[2] if len(args) > 2 else kwargs["encoder_hidden_states"])
        own = own or str(raised.value)
    assert str(raised.value) == own
    assert differs(run(model, tiny.memory(ROWS)), tiny_unets.own()), "the failed call left nothing behind"


@torch.no_grad()
def test_sizes_that_no_halving_divides(model):
    """A picture of 7 x 9 in a UNet that halves it: the up path is told the sizes."""
    sample, memory = torch.randn(ROWS, tiny_unets.CHANNELS, 7, 9), tiny.memory(ROWS, lengths=[5, 0, 3])
    own = tiny_unets.make()(sample, 3, tiny_unets.text()).sample
    adapter_scale = torch.ones(ROWS, 7, 9)
    out = model(sample, 3, tiny_unets.text(), memory=memory).sample
    assert torch.equal(model(sample, 3, tiny_unets.text(), memory=memory, adapter_scale=adapter_scale).sample, out)
    assert torch.equal(out[1], own[1]) and differs(out[[0, 2]], own[[0, 2]])


# What is refused


def test_hosts_and_adapters_that_do_not_belong_together():
    unet, lm = tiny_unets.make(), tiny.make("llama")
    plain = UNet2DModel(
        sample_size=8,
        block_out_channels=(14, 22),
        norm_num_groups=2,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        attention_head_dim=2,
    )
    gated = mmattn.GatedAdapter(memory_dim=13, layers=(0,))
    hosts = (unet, lm, plain)
    before = [tiny_unets.traces(host) for host in hosts]
    for host, adapter, match in (
        (unet, gated, "UNet2DConditionModel"),
        (lm, tiny_unets.adapter(), "LlamaForCausalLM.*GatedAdapter"),
        (plain, tiny_unets.adapter(), "UNet2DModel.*cross-attention"),
        (nn.Linear(3, 5), tiny_unets.adapter(), "Linear"),
        ("unet", tiny_unets.adapter(), "str"),
        (unet, tiny_unets.adapter(blocks=("down", "middle")), "middle.*down_blocks.0"),
        (unet, tiny_unets.adapter(start="host"), "start='host'.*17 wide.*13 wide"),
    ):
        with pytest.raises(AttachError, match=match):
            mmattn.attach(host, adapter)
    assert [tiny_unets.traces(host) for host in hosts] == before
    assert all(one.requires_grad for host in hosts for one in host.parameters())


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
