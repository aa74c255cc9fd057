"""A UNet with an adapter: sizes, blocks, processors, LoRA, training, and films."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
from diffusers import UNet3DConditionModel, UNetMotionModel, UNetSpatioTemporalConditionModel
from diffusers.models.attention_processor import AttnProcessor

import mmattn
from mmattn.errors import AdapterFileError, AttachError, ConditionError, ShapeError
from mmattn.testing.case import no_trace, stir, traces
from tests import tiny, tiny_unets
from tests.tiny import assert_close, differs
from tests.tiny_unets import ROWS, run

MID = 3  # the number of the attention layer in the middle, the host's last


@pytest.fixture
def model():
    """A tiny UNet with an open adapter."""
    return tiny_unets.attach(tiny_unets.make())


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


def test_a_copy_after_a_projection_was_replaced(model):
    """Its hook is gone with it; the rest is copied, and the copy answers as the host does."""
    memory, name = tiny.memory(ROWS), next(name for name, _ in model.host.named_modules() if name.endswith("attn2"))
    attention = model.host.get_submodule(name)
    attention.to_q = copy.deepcopy(attention.to_q)
    del attention
    gc.collect()
    twin = copy.deepcopy(model)
    assert_close(run(twin, memory), run(model, memory))
    assert twin.unload() is not model.host


@torch.no_grad()
def test_sizes_that_no_halving_divides(model):
    """A picture of 7 x 9 in a UNet that halves it: the up path is told the sizes."""
    args, memory = (torch.randn(ROWS, tiny_unets.CHANNELS, 7, 9), 3, tiny_unets.text()), tiny.memory(ROWS)
    out = model(*args, memory=memory).sample
    assert torch.equal(model(*args, memory=memory, adapter_scale=torch.ones(ROWS, 7, 9)).sample, out)
    assert differs(out, tiny_unets.make()(*args).sample)


@torch.no_grad()
def test_a_layer_called_by_itself_knows_no_picture_and_no_time(model):
    """As before the call of the whole host, so after it, and after one that failed."""
    memory, x, words = tiny.memory(ROWS), torch.randn(ROWS, 96, 14), tiny_unets.text()
    own = tiny_unets.make().get_submodule(model.layer_names[1])(x, words)
    calls = (lambda: None, lambda: run(model), lambda: model.host(tiny_unets.picture(), 3, words[:, :, 1:]))
    for adapter_scale in (torch.ones(ROWS, 8, 12), lambda time: 1.0):
        with model.condition(memory, adapter_scale=adapter_scale):
            for whole in calls:
                with contextlib.suppress(RuntimeError):  # the last text is of another width
                    whole()
                with pytest.raises(ConditionError, match="the whole host"):
                    model.layer(1)(x, words)
    with model.condition(memory, adapter_scale=0.5):
        assert differs(model.layer(1)(x, words), own)
    assert torch.equal(model.layer(1)(x, words), own)


@torch.no_grad()
def test_one_host_inside_the_forward_of_another():
    """Each has a memory and a step of its own: a step forgotten too early would be an error."""
    outer, inner = (tiny_unets.attach(tiny_unets.make(seed=seed)) for seed in (0, 1))
    memory, map_, heard = tiny.memory(ROWS), torch.rand(ROWS, tiny_unets.HEIGHT, tiny_unets.WIDTH), []
    want, alone = run(outer, memory, adapter_scale=map_), run(inner, memory, adapter_scale=0.5)
    with outer.layer(1).register_forward_hook(
        lambda *_: heard.append(run(inner, memory, adapter_scale=0.5)) and None, prepend=True
    ):
        assert torch.equal(run(outer, memory, adapter_scale=map_), want)
    assert torch.equal(heard[0], alone)


SWAPS = {
    "sliced": lambda unet: unet.set_attention_slice("max"),
    "fused": lambda unet: unet.fuse_qkv_projections(),
    "fused and back": lambda unet: (unet.fuse_qkv_projections(), unet.unfuse_qkv_projections()),
    "plain": lambda unet: unet.set_attn_processor(AttnProcessor()),
    "default": lambda unet: unet.set_default_attn_processor(),
    "by name": lambda unet: unet.set_attn_processor({name: AttnProcessor() for name in unet.attn_processors}),
}


@pytest.mark.parametrize("kind", ["stable", "k", "sdxl"])
@pytest.mark.parametrize("swap", SWAPS)
@torch.no_grad()
def test_an_adapter_outlives_the_hosts_processors(kind, swap):
    model, memory = tiny_unets.attach(tiny_unets.make(kind)), tiny.memory(ROWS, lengths=[5, 0, 3])
    want, own = run(model, memory, kind), run(model, None, kind)
    SWAPS[swap](model.host)
    assert_close(run(model, memory, kind), want)
    assert_close(run(model, None, kind), own)
    assert_close(run(tiny_unets.attach(model.unload()), memory, kind), want)


@torch.no_grad()
def test_a_lora_put_on_after_an_adapter():
    alone, unet, memory = tiny_unets.make(), tiny_unets.make(), tiny.memory(ROWS)
    model = tiny_unets.attach(unet, blocks=("mid",))
    tiny_unets.lora(alone), tiny_unets.lora(unet)
    assert torch.equal(run(model), alone(*tiny_unets.given()[0]).sample)
    with tiny_unets.listening(model, MID) as heard:
        run(model)
        without = heard["out"]
        run(model, memory)
        assert_close(heard["out"] - without, tiny_unets.share(model, MID, heard["x"], memory))
    unet.delete_adapters("default")
    assert torch.equal(run(model), tiny_unets.own())


def test_a_saved_adapter_for_another_host(tmp_path):
    tiny_unets.attach(tiny_unets.make()).save_adapter(tmp_path / "unet")
    tiny.attach(tiny.make("llama"), layers=(0,)).save_adapter(tmp_path / "lm")
    for make, folder, error, match in (
        (lambda: tiny_unets.make("sdxl"), "unet", AdapterFileError, "4 layers of width 17.*8 layers of width 17"),
        (lambda: tiny_unets.make(cross_attention_dim=19), "unet", AdapterFileError, "width 17.*width 19"),
        (lambda: tiny_unets.make(block_out_channels=(22, 14)), "unet", AdapterFileError, "of another shape"),
        (lambda: tiny.make("llama"), "unet", AdapterFileError, "LlamaForCausalLM"),
        (tiny_unets.make, "lm", AdapterFileError, "UNet2DConditionModel"),
        (lambda: tiny_unets.attach(tiny_unets.make()).host, "unet", AttachError, "already attached"),
    ):
        host = make()
        before = traces(host)
        with pytest.raises(error, match=match):
            mmattn.load(host, tmp_path / folder)
        no_trace(host, before, folder)


# Training


def gradients(model, memory, kind="stable", **more):
    """Loss and gradients, by name, of the adapter and of the memory."""
    tokens = memory.tokens.clone().requires_grad_()
    model.adapters.zero_grad()
    loss = run(model, mmattn.Memory(tokens, memory.mask), kind, **more).square().mean()
    loss.backward()
    found = {name: one.grad.clone() for name, one in model.adapters.named_parameters()}
    return loss.detach(), found | {"memory": tokens.grad}


def test_a_memory_and_a_scale_for_every_row_and_time():
    """As training has it: rows at different times, of which the second is without the memory."""
    model, memory, (sample, _, words) = (
        tiny_unets.attach(tiny_unets.make()).train(),
        tiny.memory(ROWS),
        tiny_unets.given()[0],
    )
    scale, times = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([3, 500, 41])
    own, out = (
        model(sample, times, words).sample,
        model(sample, times, words, memory=memory, adapter_scale=scale).sample,
    )
    assert torch.equal(out[1], own[1]) and not torch.equal(out[0], own[0])
    assert torch.equal(model(sample, times, words, memory=memory, adapter_scale={"": scale}).sample, out)
    with pytest.raises(ConditionError, match="one timestep"):
        model(sample, times, words, memory=memory, adapter_scale=lambda time: time)
    same = model(sample, torch.full((ROWS,), 41), words, memory=memory, adapter_scale=lambda time: time / 100)
    assert same.sample.isfinite().all()


@pytest.mark.parametrize("core", [False, True])
def test_autocast(core):
    model, memory = tiny_unets.attach(tiny_unets.make()).use_core(core), tiny.memory(ROWS, lengths=[5, 0, 3])
    want, args = gradients(model, memory), tiny_unets.given()[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(model, memory)
        with torch.no_grad(), model.condition(memory):
            rough = model.host(*args).sample
            with torch.autocast("cpu", enabled=False):
                assert torch.equal(model.host(*args).sample, run(model, memory))
            assert torch.equal(model.host(*args).sample, rough)
            assert torch.equal(rough[1], run(model)[1])
    assert_close(got[0], want[0], 0.05)
    for name, value in want[1].items():
        assert got[1][name].dtype is torch.float32
        assert_close(got[1][name], value, 0.3)


# UNets of films, whose layers have a row for each frame: memory, scales and guidance stay with their own film


FRAMES, FILMS = 3, 2
_SIZES = {
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "cross_attention_dim": 12,
    "in_channels": 5,
    "out_channels": 5,
}


def blocks(kind: str) -> dict:
    down, up = (f"CrossAttnDownBlock{kind}", f"DownBlock{kind}"), (f"UpBlock{kind}", f"CrossAttnUpBlock{kind}")
    return {"down_block_types": down, "up_block_types": up}


def three_d():
    return UNet3DConditionModel(**_SIZES, **blocks("3D"), attention_head_dim=4)


def motion():
    return UNetMotionModel(**_SIZES, **blocks("Motion"), num_attention_heads=2, motion_num_attention_heads=2)


def spatio_temporal():
    sizes = {name: value for name, value in _SIZES.items() if name != "norm_num_groups"} | {
        "block_out_channels": (32, 64)
    }
    times = {"addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 12}
    return UNetSpatioTemporalConditionModel(**sizes, **blocks("SpatioTemporal"), **times, num_attention_heads=2)


KINDS = {"3d": three_d, "motion": motion, "spatio-temporal": spatio_temporal}


def batch(kind: str) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    sample = torch.randn(FILMS, 5, FRAMES, 8, 12, generator=drawn)
    text = torch.randn(FILMS, 1 if kind == "spatio-temporal" else 7, 12, generator=drawn)
    if kind == "motion":
        text = text.repeat_interleave(FRAMES, 0)  # as AnimateDiff's pipeline gives it
    given = {"sample": sample, "timestep": torch.tensor(11), "encoder_hidden_states": text}
    if kind == "spatio-temporal":
        given |= {"sample": sample.transpose(1, 2), "added_time_ids": torch.ones(FILMS, 3)}
    return given


@pytest.fixture(params=KINDS)
def film(request):
    torch.manual_seed(0)
    host = KINDS[request.param]().eval()
    model = mmattn.attach(host, mmattn.DecoupledAdapter(memory_dim=tiny.MEMORY_DIM))
    stir(model.adapter("default"))
    return model, batch(request.param)


@torch.no_grad()
def predict(model, given, **more):
    return model(**given, **more)[0]


def film_of(given, row):
    """One film of a batch."""
    return {
        name: value.unflatten(0, (FILMS, -1))[row] if name != "timestep" else value for name, value in given.items()
    }


@torch.no_grad()
def test_each_film_sees_its_own_memory(film):
    model, given = film
    memory, own = tiny.memory(FILMS, lengths=[5, 3]), predict(model, given)
    out = predict(model, given, memory=memory)
    assert all(differs(out[row], own[row]) for row in range(FILMS))
    for row in range(FILMS):
        assert_close(predict(model, film_of(given, row), memory=memory[row])[0], out[row], 1e-4)
    half = predict(model, given, memory=tiny.memory(FILMS, lengths=[5, 0]))
    assert torch.equal(half[1], own[1]) and differs(half[0], own[0])


@torch.no_grad()
def test_the_unconditional_half_of_guidance_sees_none(film):
    model, given = film
    memory = tiny.memory(FILMS)
    twice = {name: value if name == "timestep" else torch.cat([value, value]) for name, value in given.items()}
    with model.condition(memory, guided=True):
        both = predict(model.host, twice)
    assert_close(both[:FILMS], predict(model, given), 1e-5)
    assert_close(both[FILMS:], predict(model, given, memory=memory), 1e-5)


@torch.no_grad()
def test_a_scale_for_each_film(film):
    model, given = film
    memory, own = tiny.memory(FILMS), predict(model, given)
    out = predict(model, given, memory=memory, adapter_scale=torch.tensor([0.0, 1.0]))
    assert_close(out[0], own[0], 1e-6)
    assert_close(out[1], predict(model, given, memory=memory)[1], 1e-5)
    ones, zeros = torch.ones(FILMS, 8, 12), torch.zeros(FILMS, 8, 12)
    if any("temporal" in name for name in model.layer_names):
        with pytest.raises(ShapeError, match="blocks="):
            predict(model, given, memory=memory, adapter_scale=ones)
        return
    assert torch.equal(predict(model, given, memory=memory, adapter_scale=zeros), own)
    assert_close(predict(model, given, memory=memory, adapter_scale=ones), predict(model, given, memory=memory), 1e-5)
