"""Published IP-Adapters of Flux and Stable Diffusion 3.5: diffusers' own numbers, files read, written and refused."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.embeddings import IPAdapterTimeImageProjection
from safetensors.torch import load_file, save_file

import mmattn
from mmattn.adapters import JointDecoupledAdapter
from mmattn.adapters.decoupled import DecoupledLayout, TimedResampler
from mmattn.errors import AdapterFileError, AttachError, ConditionError, NonFiniteError
from mmattn.testing.case import stir
from tests import tiny, tiny_transformers, tiny_unets
from tests.tiny import MEMORY_DIM, assert_close, differs
from tests.tiny_transformers import given, make, run

ROWS, TOKENS, SLOT_DIM, WIDTH = 3, 4, 22, 32
FLUX, SD3 = "FluxTransformer2DModel", "SD3Transformer2DModel"


def randomised(tensors, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=generator) * 0.4 for name, value in tensors.items()}


def flux_tensors():
    """A random IP-Adapter of Flux under the names of diffusers."""
    shapes = {
        "image_proj.proj.weight": (TOKENS * SLOT_DIM, MEMORY_DIM),
        "image_proj.proj.bias": (TOKENS * SLOT_DIM,),
        "image_proj.norm.weight": (SLOT_DIM,),
        "image_proj.norm.bias": (SLOT_DIM,),
    }
    for number in range(2):
        for letter in "kv":
            shapes[f"ip_adapter.{number}.to_{letter}_ip.weight"] = (WIDTH, SLOT_DIM)
            shapes[f"ip_adapter.{number}.to_{letter}_ip.bias"] = (WIDTH,)
    return randomised({name: torch.empty(shape) for name, shape in shapes.items()})


def sd3_tensors():
    """A random IP-Adapter of Stable Diffusion 3.5 under the names of diffusers."""
    projection = IPAdapterTimeImageProjection(
        embed_dim=MEMORY_DIM,
        output_dim=WIDTH,
        hidden_dim=128,
        heads=2,
        num_queries=3,
        timestep_in_dim=8,
    )
    block = SD3IPAdapterJointAttnProcessor2_0(WIDTH, WIDTH, head_dim=16, timesteps_emb_dim=128)
    tensors = {f"image_proj.{name}": value for name, value in projection.state_dict().items()}
    for number in range(2):
        tensors |= {f"ip_adapter.{number}.{name}": value for name, value in block.state_dict().items()}
    return {
        name: value * 0.5 + ("norm" in name and name.endswith("weight")) for name, value in randomised(tensors).items()
    }


TENSORS = {FLUX: flux_tensors, SD3: sd3_tensors}


def nested(tensors):
    parts = {"image_proj": {}, "ip_adapter": {}}
    for name, value in tensors.items():
        part, rest = name.split(".", 1)
        parts[part][rest] = value
    return parts


@torch.no_grad()
def by_diffusers(family, tensors, batch, memory, scale):
    """What diffusers itself predicts with this file: its own image projection and processors."""
    host = make(family)
    host._load_ip_adapter_weights(nested(tensors), low_cpu_mem_usage=False)
    for processor in host.attn_processors.values():
        if hasattr(processor, "scale"):
            processor.scale = [scale] if family == FLUX else scale
    images = [memory.tokens] if family == FLUX else memory.tokens
    return host(**batch, joint_attention_kwargs={"ip_adapter_image_embeds": images})[0]


def in_diffusers_names(path):
    """A written file as diffusers' own loader names it."""
    named = {}
    for name, value in load_file(path).items():
        name = name.replace("ip_adapter_proj_model.", "image_proj.").replace("double_blocks.", "ip_adapter.")
        name = name.replace("processor.", "").replace("ip_adapter_double_stream_", "to_")
        named[name.replace("to_k_proj", "to_k_ip").replace("to_v_proj", "to_v_ip")] = value
    return named


@pytest.mark.parametrize("scale", [0.6, 1.0])
@pytest.mark.parametrize("family", TENSORS)
@torch.no_grad()
def test_a_file_gives_what_diffusers_gives(family, scale, tmp_path):
    """Invariant 98: within 1e-5 of diffusers' own, relative to the largest; rows without a memory are the host's."""
    tensors, path = TENSORS[family](), tmp_path / "ip.safetensors"
    save_file(tensors, path)
    model = mmattn.load(make(family), path)
    batch, memory = given(model), tiny.memory(ROWS, m=2)
    want, own = by_diffusers(family, tensors, batch, memory, scale), run(model, batch)
    assert differs(want, own) and want.isfinite().all()
    found = run(model, batch, memory=memory, adapter_scale=scale)
    assert ((found - want).abs().max() / want.abs().max()).item() <= 1e-5
    some = run(model, batch, memory=tiny.memory(ROWS, m=2, lengths=[2, 0, 2]), adapter_scale=scale)
    assert_close(some[::2], want[::2], 1e-5)
    assert torch.equal(some[1], own[1])
    assert torch.equal(run(model, batch, memory=memory, adapter_scale=0.0), own)
    # The unconditional half of guidance.
    with model.condition(memory, adapter_scale=scale, guided=True):
        twice = tiny_transformers.given(model, 2 * ROWS, seed=3)
        both = run(model.host, twice)
    assert_close(both[:ROWS], run(model, twice)[:ROWS], 1e-6)
    assert differs(both[ROWS:], run(model, twice)[ROWS:])


@pytest.mark.parametrize("family", TENSORS)
@torch.no_grad()
def test_written_and_read_back(family, tmp_path):
    """Ours out: read by diffusers under the names that its loader makes of them, and by us bit for bit."""
    save_file(TENSORS[family](), tmp_path / "ip.safetensors")
    model = mmattn.load(make(family), tmp_path / "ip.safetensors")
    batch, memory = given(model), tiny.memory(ROWS, m=2)
    want = run(model, batch, memory=memory)
    model.save_ip_adapter(tmp_path / "out.safetensors")
    again = mmattn.load(make(family), tmp_path / "out.safetensors", "image")
    assert torch.equal(run(again, batch, memory={"image": memory}), want)
    written = in_diffusers_names(tmp_path / "out.safetensors")
    assert_close(by_diffusers(family, written, batch, memory, 1.0), want, 1e-5)
    names = list(load_file(tmp_path / "out.safetensors"))
    published = {
        FLUX: "double_blocks.1.processor.ip_adapter_double_stream_v_proj.bias",
        SD3: "image_proj.layers.1.0.to_kv.weight",
    }
    assert published[family] in names
    # And as adapters of ours.
    model.save_adapter(tmp_path / "folder")
    assert torch.equal(run(mmattn.load(make(family), tmp_path / "folder"), batch, memory=memory), want)


@pytest.mark.parametrize("family", TENSORS)
def test_bad_files_change_nothing(family, tmp_path):
    path = tmp_path / "ip.safetensors"
    good = TENSORS[family]()
    first = next(name for name in good if name.startswith("ip_adapter.1"))
    wrong = {
        "one tensor less": {name: value for name, value in good.items() if name != first},
        "one tensor more": good | {"ip_adapter.9.to_k_ip.weight": good["ip_adapter.1.to_k_ip.weight"]},
        "an unknown name": good | {"ip_adapter.1.to_q_ip.weight": good[first]},
        "another width": good | {"ip_adapter.1.to_k_ip.weight": good["ip_adapter.1.to_k_ip.weight"][1:]},
        "not finite": good | {first: good[first] * float("nan")},
        "whole numbers": good | {first: good[first].long()},
        "no projection": {name: value for name, value in good.items() if not name.startswith("image_proj")},
        "of a UNet": {name: value for name, value in flux_tensors().items() if not name.endswith("_ip.bias")},
    }
    host = make(family)
    before = tiny_unets.traces(host)
    for what, tensors in wrong.items():
        save_file({name: value.clone() for name, value in tensors.items()}, path)
        with pytest.raises(NonFiniteError if what == "not finite" else AdapterFileError):
            mmattn.load(host, path)
        assert tiny_unets.traces(host) == before, what
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(AdapterFileError, match="fetch it again"):
        mmattn.load(host, path)
    save_file(good, path)
    with pytest.raises(AdapterFileError, match="another base model"):
        mmattn.load(make(family, num_layers=3), path)
    with pytest.raises(AdapterFileError):
        mmattn.load(make("WanTransformer3DModel"), path)


def test_what_is_no_ip_adapter_is_not_written_as_one(tmp_path):
    path = tmp_path / "ip.safetensors"
    with pytest.raises(ConditionError, match="save_adapter"):
        tiny_transformers.attach(make(FLUX), tokens=2).save_ip_adapter(path)
    settings = JointDecoupledAdapter(MEMORY_DIM, resampler=TimedResampler(3, 1, 16, 1, 64, 2, 8))
    gated = mmattn.attach(make(SD3), settings)
    with pytest.raises(ConditionError, match="gates"):
        gated.save_ip_adapter(path)
    assert not path.exists()


JOINT = JointDecoupledAdapter(MEMORY_DIM, resampler=TimedResampler(3, 2, 16, 2, 8, 2, 8))
BLOCK = mmattn.DecoupledAdapter(MEMORY_DIM, tokens=2, layout=DecoupledLayout(slot_dim=10, bias=True, added_to="block"))


@torch.no_grad()
def test_a_resampler_that_follows_the_time_step():
    model = mmattn.attach(make(SD3), JOINT)
    stir(model.adapter("default"))
    batch, memory = given(model), tiny.memory(ROWS)
    answers = []
    for time in (1.0, 900.0):
        own = batch | {"timestep": torch.full((ROWS,), time)}
        answers.append(run(model, own, memory=memory) - run(model, own))
    assert differs(*answers)
    mixed = batch | {"timestep": torch.tensor([1.0, 900.0, 1.0])}
    out = run(model, mixed, memory=memory) - run(model, mixed)
    assert_close(out[[0, 2]], answers[0][[0, 2]], 1e-5)
    assert_close(out[1], answers[1][1], 1e-5)
    with pytest.raises(ConditionError, match="whole host"), model.condition(memory):
        model.layer(0)(torch.randn(ROWS, 8, WIDTH), torch.randn(ROWS, 5, WIDTH))


def test_what_adds_to_blocks_needs_blocks():
    for host in (
        tiny_unets.make(),
        make("SanaTransformer2DModel", num_cross_attention_heads=1, cross_attention_head_dim=16),
    ):
        before = tiny_unets.traces(host)
        with pytest.raises(AttachError, match="added_to='block'"):
            mmattn.attach(host, BLOCK)
        assert tiny_unets.traces(host) == before
    model = mmattn.attach(make(FLUX), BLOCK)
    with pytest.raises(ConditionError, match="whole host"), model.condition(tiny.memory(ROWS)), torch.no_grad():
        model.layer(0)(torch.randn(ROWS, 8, WIDTH), torch.randn(ROWS, 5, WIDTH))
