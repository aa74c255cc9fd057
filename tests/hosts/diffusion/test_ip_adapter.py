"""Published IP-Adapters of UNets, Flux and Stable Diffusion 3.5: numbers of diffusers, files read, written, refused."""

from __future__ import annotations

import os

import pytest
import torch
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.embeddings import IPAdapterTimeImageProjection
from safetensors.torch import load_file, save, save_file

import mmattn
from mmattn.adapters.decoupled import DecoupledLayout, JointDecoupledAdapter, TimedResampler
from mmattn.errors import AdapterFileError, AttachError, ConditionError, NonFiniteError
from mmattn.testing.case import no_trace, stir, traces
from tests import tiny, tiny_transformers, tiny_unets
from tests.tiny import MEMORY_DIM, assert_close, differs
from tests.tiny_transformers import given, make, run

ROWS, TOKENS, WIDTH, MID = 3, 4, 32, 3  # diffusers knows no other number of tokens of this kind of adapter
FLUX, SD3 = "FluxTransformer2DModel", "SD3Transformer2DModel"
UNETS = ("stable", "linear", "sdxl")
FAMILIES = (*UNETS, FLUX, SD3)
families = pytest.mark.parametrize("family", FAMILIES)


def randomised(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()}


def projection(slot_dim, dim):
    """Shapes of the projection of an image to slots."""
    name, weight = "image_proj.proj", TOKENS * slot_dim
    return {f"{name}.weight": (weight, dim), f"{name}.bias": (weight,)} | {
        f"image_proj.norm.{part}": (slot_dim,) for part in ("weight", "bias")
    }


def tensors_of(family, dim=MEMORY_DIM):
    """A random IP-Adapter under the names of diffusers."""
    if family == SD3:
        image = IPAdapterTimeImageProjection(
            embed_dim=dim, output_dim=WIDTH, hidden_dim=128, heads=2, num_queries=3, timestep_in_dim=8
        )
        block = SD3IPAdapterJointAttnProcessor2_0(WIDTH, WIDTH, head_dim=16, timesteps_emb_dim=128)
        shapes = {f"image_proj.{name}": value.shape for name, value in image.state_dict().items()}
        for number in range(2):
            shapes |= {f"ip_adapter.{number}.{name}": value.shape for name, value in block.state_dict().items()}
        return {
            name: value * 0.5 + ("norm" in name and name.endswith("weight"))
            for name, value in randomised(shapes).items()
        }
    if family == FLUX:
        shapes = projection(22, dim)
        for name in (f"ip_adapter.{number}.to_{letter}_ip" for number in range(2) for letter in "kv"):
            shapes |= {f"{name}.weight": (WIDTH, 22), f"{name}.bias": (WIDTH,)}
        return randomised(shapes)
    unet, shapes = make(family), projection(tiny_unets.TEXT_DIM, dim)
    parts = [unet.get_submodule(name.removesuffix(".processor")) for name in unet.attn_processors]
    for index, attn in enumerate(part for part in parts if part.is_cross_attention):
        for letter in "kv":
            shapes[f"ip_adapter.{2 * index + 1}.to_{letter}_ip.weight"] = (attn.inner_dim, tiny_unets.TEXT_DIM)
    return randomised(shapes)


def nested(tensors):
    """The same file as pickles hold it, and as diffusers takes it."""
    parts = {"image_proj": {}, "ip_adapter": {}}
    for name, value in tensors.items():
        part, rest = name.split(".", 1)
        parts[part][rest] = value
    return parts


def give_to_diffusers(host, tensors, scale):
    given = nested(tensors)
    host._load_ip_adapter_weights([given] if hasattr(host, "conv_in") else given, low_cpu_mem_usage=False)
    for processor in host.attn_processors.values():
        if hasattr(processor, "scale"):
            processor.scale = scale if isinstance(host, type(make(SD3))) else [scale]


@torch.no_grad()
def by_diffusers(family, tensors, batch, memory, scale=1.0):
    """What diffusers itself predicts with this file: its own image projection and processors."""
    host, images = make(family), memory.tokens if family == SD3 else [memory.tokens]
    give_to_diffusers(host, tensors, scale)
    if family in UNETS:
        return host(**batch | {"added_cond_kwargs": batch.get("added_cond_kwargs", {}) | {"image_embeds": images}})[0]
    return host(**batch, joint_attention_kwargs={"ip_adapter_image_embeds": images})[0]


def in_diffusers_names(path):
    """A written file as diffusers' own loader names it."""
    named = {}
    for name, value in load_file(path).items():
        name = name.replace("ip_adapter_proj_model.", "image_proj.").replace("double_blocks.", "ip_adapter.")
        name = name.replace("processor.", "").replace("ip_adapter_double_stream_", "to_")
        named[name.replace("to_k_proj", "to_k_ip").replace("to_v_proj", "to_v_ip")] = value
    return named


@families
@pytest.mark.parametrize("images", [1, 3])
@torch.no_grad()
def test_a_file_gives_what_diffusers_gives(family, images, tmp_path):
    """Invariant 98: within 1e-5 of diffusers' own, relative to the largest; rows without a memory are the host's."""
    tensors, path = tensors_of(family), tmp_path / "ip.safetensors"
    save_file(tensors, path)
    model = mmattn.load(make(family), path)
    batch, memory = given(model, ROWS), tiny.memory(ROWS, m=images)
    want, own = by_diffusers(family, tensors, batch, memory, 0.6), run(model, batch)
    assert differs(want, own)
    assert_close(run(model, batch, memory=memory, adapter_scale=0.6), want)
    some = run(model, batch, memory=tiny.memory(ROWS, m=images, lengths=[images, 0, images]), adapter_scale=0.6)
    assert_close(some[::2], want[::2])
    assert torch.equal(some[1], own[1])
    if family in UNETS:
        assert model.adapters["default"].config == tiny_unets.adapter(tokens=TOKENS)
        assert_close(run(model.use_core(), batch, memory=memory, adapter_scale=0.6), want)


@families
@torch.no_grad()
def test_written_and_read_back(family, tmp_path):
    """Invariant 98. Read by diffusers under the names that its loader makes of them, and by us bit for bit."""
    save_file(tensors_of(family), tmp_path / "ip.safetensors")
    model = mmattn.load(make(family), tmp_path / "ip.safetensors")
    batch, memory = given(model, ROWS), tiny.memory(ROWS, m=2)
    want = run(model, batch, memory=memory)
    model.save_ip_adapter(tmp_path / "out.safetensors")
    again = mmattn.load(make(family), tmp_path / "out.safetensors", "image")
    assert torch.equal(run(again, batch, memory={"image": memory}), want)
    written = in_diffusers_names(tmp_path / "out.safetensors")
    if family == SD3:
        assert "image_proj.layers.1.0.to_kv.weight" in written
    else:
        assert written.keys() == tensors_of(family).keys()
    assert_close(by_diffusers(family, written, batch, memory), want)
    again.save_ip_adapter(tmp_path / "again.safetensors", "image")
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "again.safetensors").read_bytes()


@pytest.mark.parametrize("ending", [".bin", ".safetensors"])
@torch.no_grad()
def test_files_in_half_precision(ending, tmp_path):
    """Invariant 130: of both kinds, and those that a model in half precision wrote; in its own dtype if asked."""
    path, tensors = tmp_path / f"ip{ending}", {name: value.half() for name, value in tensors_of("stable").items()}
    torch.save(nested(tensors), path) if ending == ".bin" else save_file(tensors, path)
    model = mmattn.load(make("stable"), path)
    assert {one.dtype for one in model.adapters.parameters()} == {torch.float32}
    for name, value in tensors.items():
        assert any(torch.equal(one, value.float()) for one in model.adapters.parameters()), name
    model.half().save_ip_adapter(tmp_path / "half.safetensors")
    for dtype in (None, torch.float16, "auto"):
        again = mmattn.load(make("stable"), tmp_path / "half.safetensors", dtype=dtype)
        for name, value in again.adapter("default").state_dict().items():
            assert value.dtype == (torch.float32 if dtype is None else torch.float16)
            assert torch.equal(value.float(), model.adapter("default").state_dict()[name].float())


@torch.no_grad()
def test_one_of_diffusers_own_beside_ours():
    """Both add to the same layer, each its share."""
    unet, memory = tiny_unets.make(), tiny.memory(ROWS)
    model, (args, _) = tiny_unets.attach(unet, blocks=("mid",)), tiny_unets.given()
    image = {"added_cond_kwargs": {"image_embeds": [torch.randn(ROWS, 1, 11)]}}
    with tiny_unets.listening(model, MID) as heard:
        tiny_unets.run(model)
        without, x = heard["out"], heard["x"]
    give_to_diffusers(unet, tensors_of("stable", 11), 1.0)
    # Only the middle of theirs, so that what goes in there stays the same.
    for name, processor in unet.attn_processors.items():
        if hasattr(processor, "scale") and not name.startswith("mid"):
            processor.scale = [0.0]
    with tiny_unets.listening(model, MID) as heard:
        own = model(*args, **image).sample
        one = heard["out"] - without
        model(*args, memory=memory, **image)
        both = heard["out"] - without
        assert_close(heard["x"], x)
    assert one.abs().max() > 0.01
    assert_close(both, one + tiny_unets.share(model, MID, x, memory), 1e-4)
    with pytest.raises(ConditionError, match="IPAdapterAttnProcessor2_0.*default one back"):
        model.use_core()
    late = mmattn.attach(model.unload(), tiny_unets.adapter(blocks=("mid",)))
    assert torch.equal(late(*args, memory=memory, **image).sample, own)


# What is refused


def bad_tensors(family):
    """Tensors that are no IP-Adapter of a family, and what the message names."""
    good = tensors_of(family)
    first = next(name for name in good if name.startswith("ip_adapter.1"))
    wrong = {
        "one less": ({name: value for name, value in good.items() if name != first}, None),
        "one more": (good | {"ip_adapter.9.to_k_ip.weight": good[first].clone()}, None),
        "an unknown name": (good | {"ip_adapter.1.to_q_ip.weight": good[first].clone()}, None),
        "another width": (good | {first: good[first][1:]}, None),
        "not finite": (good | {first: good[first] * float("nan")}, None),
        "whole numbers": (good | {first: good[first].long()}, "int64"),
        "no projection": ({name: value for name, value in good.items() if not name.startswith("image_proj")}, None),
        "of another base": (tensors_of("stable" if family == FLUX else "sdxl"), None),
    }
    if family != "stable":
        return wrong
    plus = {name: value for name, value in good.items() if name.startswith("ip_adapter")}
    plus |= randomised({"image_proj.latents": (1, 16, 17), "image_proj.proj_in.weight": (17, 13)})
    wide = randomised({"image_proj.proj.weight": (17, 70000), "image_proj.proj.bias": (17,)})
    return wrong | {
        "plus": (plus, "Plus"),
        "an extra tensor": (good | randomised({"image_proj.latents": (3,)}), "Plus"),
        "a short bias": (good | randomised({"image_proj.proj.bias": (17,)}), None),
        "a flat projection": (good | randomised({"image_proj.proj.weight": (17,)}), None),
        "nothing projected": (good | randomised({"image_proj.proj.weight": (0, 13)}), None),
        "too wide": (good | wide, "memory_dim"),
    }


@pytest.mark.parametrize("family", ["stable", FLUX, SD3])
def test_a_bad_file_changes_nothing(family, tmp_path):
    good, files = tensors_of(family), []
    for what, (tensors, names) in bad_tensors(family).items():
        files.append((what, save({name: one.contiguous() for name, one in tensors.items()}), names))
    files.append(("torn", save(good)[:-7], "again"))
    model = tiny_transformers.attach(make(family, seed=1))
    for host in (make(family), model.host):
        before = traces(host)
        for what, content, names in files:
            path = tmp_path / "ip.safetensors"
            path.write_bytes(content)
            with pytest.raises(NonFiniteError if what == "not finite" else AdapterFileError, match=names):
                mmattn.load(host, path, "image")
            no_trace(host, before, what)


def test_what_is_no_ip_adapter_is_not_written_as_one(tmp_path):
    path, few = tmp_path / "ip.safetensors", mmattn.Resampler(3, 1, 2, 4)
    timed = JointDecoupledAdapter(MEMORY_DIM, resampler=TimedResampler(3, 1, 16, 1, 64, 2, 8))
    for model, name, error, names in (
        (tiny_unets.attach(make("stable")), "default", ConditionError, "save_adapter"),
        (tiny_unets.attach(make("stable"), tokens=2, blocks=("up",)), "default", ConditionError, "save_adapter"),
        (tiny_unets.attach(make("stable"), tokens=2, resampler=few), "default", ConditionError, "save_adapter"),
        (tiny_unets.attach(make("stable"), tokens=2), "other", AttachError, "other"),
        (tiny_transformers.attach(make(FLUX), tokens=2), "default", ConditionError, "save_adapter"),
        (mmattn.attach(make(SD3), timed), "default", ConditionError, "gates"),
    ):
        with pytest.raises(error, match=names):
            model.save_ip_adapter(path, name)
        assert not path.exists()
    model = tiny_unets.attach(make("stable"), tokens=2)
    model.save_ip_adapter(path)
    good = path.read_bytes()
    with torch.no_grad():
        next(iter(model.adapters.parameters())).fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        model.save_ip_adapter(path)
    assert path.read_bytes() == good and os.listdir(tmp_path) == [path.name]


# Layouts of these files


@torch.no_grad()
def test_a_resampler_that_follows_the_time_step():
    model = mmattn.attach(make(SD3), JointDecoupledAdapter(MEMORY_DIM, resampler=TimedResampler(3, 2, 16, 2, 8, 2, 8)))
    stir(model.adapter("default"))
    batch, memory = given(model), tiny.memory(ROWS)

    def added(*times):
        own = batch | {"timestep": torch.tensor(times)}
        return run(model, own, memory=memory) - run(model, own)

    early, late, mixed = added(1.0, 1.0, 1.0), added(900.0, 900.0, 900.0), added(1.0, 900.0, 1.0)
    assert differs(early, late)
    assert_close(mixed[[0, 2]], early[[0, 2]])
    assert_close(mixed[1], late[1])
    with pytest.raises(ConditionError, match="whole host"), model.condition(memory):
        model.layer(0)(torch.randn(ROWS, 8, WIDTH), torch.randn(ROWS, 5, WIDTH))


def test_what_adds_to_blocks_needs_the_whole_host():
    layout = DecoupledLayout(slot_dim=10, bias=True, added_to="block")
    block = mmattn.DecoupledAdapter(MEMORY_DIM, tokens=2, layout=layout)
    model = mmattn.attach(make(FLUX), block)
    with pytest.raises(ConditionError, match="whole host"), model.condition(tiny.memory(ROWS)), torch.no_grad():
        model.layer(0)(torch.randn(ROWS, 8, WIDTH), torch.randn(ROWS, 5, WIDTH))
