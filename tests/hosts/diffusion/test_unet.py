"""A UNet stays itself: its keys, modes and processors; swaps, LoRA and offloading beside an adapter; saved adapters."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor

import mmattn
from mmattn.errors import AdapterFileError, AttachError, ConditionError
from tests import tiny, tiny_unets
from tests.tiny import assert_close, differs
from tests.tiny_unets import ROWS, run

MID = 3  # the number of the attention layer in the middle, the host's last


@pytest.fixture
def model():
    """A tiny UNet with an open adapter."""
    return tiny_unets.attach(tiny_unets.make())


# Being the same


@pytest.mark.parametrize("kind", tiny_unets.KINDS)
def test_nothing_of_the_host_is_other_and_nothing_stays(kind, tmp_path):
    unet = tiny_unets.make(kind)
    before, keys, processors = tiny_unets.traces(unet), list(unet.state_dict()), unet.attn_processors
    trained = [parameter.requires_grad for parameter in unet.parameters()]
    model = tiny_unets.attach(unet)
    model.add_adapter("second", tiny_unets.adapter(tokens=2))
    assert list(unet.state_dict()) == keys
    assert unet.attn_processors == processors
    unet.save_pretrained(tmp_path)
    again = UNet2DConditionModel.from_pretrained(tmp_path).eval()
    assert list(again.state_dict()) == keys
    with torch.no_grad():
        args, kwargs = tiny_unets.given(kind)
        assert torch.equal(again(*args, **kwargs).sample, tiny_unets.own(kind))
        unet.enable_gradient_checkpointing()
        with torch.enable_grad():
            run(model, tiny.memory(ROWS), kind)
        if kind in tiny_unets.CORE_KINDS:
            model.use_core()
            run(model, tiny.memory(ROWS), kind)
    assert model.unload() is unet
    assert not any("mmattn" in type(value).__module__ for part in unet.modules() for value in part.__dict__.values())
    unet.disable_gradient_checkpointing()
    assert tiny_unets.traces(unet) == [
        (name, sorted({*names, "_gradient_checkpointing_func"} if "gradient_checkpointing" in names else names), hooks)
        for name, names, hooks in before
    ]
    assert all(got is want for got, want in zip(unet.attn_processors.values(), processors.values(), strict=True))
    assert [parameter.requires_grad for parameter in unet.parameters()] == trained
    with torch.no_grad():
        assert torch.equal(unet(*args, **kwargs).sample, tiny_unets.own(kind))


def test_a_layer_that_memory_does_not_reach(model):
    """A layer that is run without being called: its hooks are passed by, and the call says so."""
    attn = model.layer(1)
    kind = type(attn)
    attn.__class__ = type("Deaf", (kind,), {"__call__": lambda self, *args, **kwargs: self.forward(*args, **kwargs)})
    with pytest.raises(ConditionError, match=r"did not reach \['up_blocks.1.attentions.0"):
        run(model, tiny.memory(ROWS))
    with torch.no_grad():
        assert torch.equal(run(model), tiny_unets.own())
        assert torch.equal(run(model, tiny.memory(ROWS), adapter_scale=0.0), tiny_unets.own())
        attn.__class__ = kind
        assert differs(run(model, tiny.memory(ROWS)), tiny_unets.own())


def test_pickling_says_what_to_do(model):
    for thing in (model, model.host):
        with pytest.raises(TypeError, match="save_adapter"):
            pickle.dumps(thing)
    host = model.unload()
    again = pickle.loads(pickle.dumps(host))
    args, kwargs = tiny_unets.given()
    assert torch.equal(again(*args, **kwargs).sample, host(*args, **kwargs).sample)


@torch.no_grad()
@pytest.mark.slow
def test_compiled_afterwards(model):
    memory, args = tiny.memory(ROWS), tiny_unets.given()[0]
    want, own = run(model, memory), run(model)
    compiled = torch.compile(model.host, backend="eager")
    with model.condition(memory):
        assert_close(compiled(*args).sample, want)
        assert_close(compiled(*args).sample, want)
    assert_close(compiled(*args).sample, own)
    with pytest.raises(ConditionError, match="attach first"):
        mmattn.attach(torch.compile(tiny_unets.make(), backend="eager"), tiny_unets.adapter())


def test_a_copy_after_a_projection_was_replaced(model):
    """Its hook is gone with it; the rest is copied, and the copy answers as the host does."""
    memory, attention = (
        tiny.memory(ROWS),
        next(one for name, one in model.host.named_modules() if name.endswith("attn2")),
    )
    attention.to_q = copy.deepcopy(attention.to_q)
    del attention
    gc.collect()
    twin = copy.deepcopy(model)
    assert_close(run(twin, memory), run(model, memory))
    assert twin.unload() is not model.host


# Processors that come and go


def swaps():
    return {
        "sliced": lambda unet: unet.set_attention_slice("max"),
        "fused": lambda unet: unet.fuse_qkv_projections(),
        "fused and back": lambda unet: (unet.fuse_qkv_projections(), unet.unfuse_qkv_projections()),
        "plain": lambda unet: unet.set_attn_processor(AttnProcessor()),
        "default": lambda unet: unet.set_default_attn_processor(),
        "by name": lambda unet: unet.set_attn_processor({name: AttnProcessor() for name in unet.attn_processors}),
    }


@pytest.mark.parametrize("kind", ["stable", "k", "sdxl"])
@pytest.mark.parametrize("swap", swaps())
@torch.no_grad()
def test_an_adapter_outlives_the_hosts_processors(kind, swap):
    model, memory = tiny_unets.attach(tiny_unets.make(kind)), tiny.memory(ROWS, lengths=[5, 0, 3])
    want, own = run(model, memory, kind), run(model, None, kind)
    swaps()[swap](model.host)
    assert_close(run(model, memory, kind), want)
    assert_close(run(model, None, kind), own)
    assert torch.equal(run(model, memory, kind)[1], run(model, None, kind)[1])
    model.unload()
    late = tiny_unets.attach(model.host)
    assert_close(run(late, memory, kind), want)


# LoRA


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("first", ["lora", "adapter"])
@torch.no_grad()
def test_lora_beside_an_adapter(first, bias):
    unet, memory = tiny_unets.make(), tiny.memory(ROWS)
    if first == "lora":
        tiny_unets.lora(unet, lora_bias=bias)
    model = tiny_unets.attach(unet, blocks=("mid",))
    if first == "adapter":
        tiny_unets.lora(unet, lora_bias=bias)
    alone = tiny_unets.make()
    tiny_unets.lora(alone, lora_bias=bias)
    args, _ = tiny_unets.given()
    own = alone(*args).sample
    assert differs(own, tiny_unets.own())
    assert torch.equal(run(model), own)
    with tiny_unets.listening(model, MID) as heard:
        run(model)
        without = heard["out"]
        out = run(model, memory)
        x, seen = heard["x"], heard["out"]
    assert_close(seen - without, tiny_unets.share(model, MID, x, memory))
    assert torch.equal(run(model, tiny.memory(ROWS, lengths=[5, 0, 3]))[1], own[1])
    unet.disable_lora()
    other = run(model, memory)
    assert differs(other, out)
    unet.enable_lora()
    assert torch.equal(run(model, memory), out)
    unet.delete_adapters("default")
    assert torch.equal(run(model), tiny_unets.own())
    assert_close(run(model, memory), other)


# Offloading


@torch.no_grad()
def test_hooks_of_accelerate(model):
    memory = tiny.memory(ROWS, lengths=[5, 0, 3])
    want, own = run(model, memory), run(model)
    seen = []

    class Passing(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(type(module).__name__)
            return args, kwargs

    add_hook_to_module(model.host, Passing())
    add_hook_to_module(model.layer(1), Passing())
    add_hook_to_module(model.layer(1).to_out[0], Passing())
    for core in (False, True):
        model.use_core(core)
        assert_close(run(model, memory), want)
        assert_close(run(model), own)
    assert {"UNet2DConditionModel", "Attention", "Linear"} <= set(seen)


# Files


def test_a_saved_adapter_for_another_host(tmp_path):
    tiny_unets.attach(tiny_unets.make()).save_adapter(tmp_path / "unet")
    tiny.attach(tiny.make("llama"), layers=(0,)).save_adapter(tmp_path / "lm")
    for make, folder, match in (
        (lambda: tiny_unets.make("sdxl"), "unet", "4 layers of width 17.*8 layers of width 17"),
        (lambda: tiny_unets.make(cross_attention_dim=19), "unet", "width 17.*width 19"),
        (lambda: tiny_unets.make(block_out_channels=(22, 14)), "unet", "of another shape"),
        (lambda: tiny.make("llama"), "unet", "LlamaForCausalLM"),
        (tiny_unets.make, "lm", "UNet2DConditionModel"),
    ):
        host = make()
        before = tiny_unets.traces(host)
        with pytest.raises(AdapterFileError, match=match):
            mmattn.load(host, tmp_path / folder)
        assert tiny_unets.traces(host) == before
    model = tiny_unets.attach(tiny_unets.make())
    with pytest.raises(AttachError, match="already attached"):
        mmattn.load(model, tmp_path / "unet")


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
