"""Published IP-Adapters: the same numbers as diffusers gives with them, files read and written, and files refused."""

from __future__ import annotations

import io
import os

import pytest
import torch
from safetensors.torch import load_file, save, save_file

import mmattn
from mmattn.errors import AdapterFileError, AttachError, ConditionError, NonFiniteError
from tests import tiny, tiny_unets
from tests.tiny import assert_close, differs
from tests.tiny_unets import ROWS, TEXT_DIM, run

KINDS = ("stable", "linear", "sdxl")
TOKENS = 4  # diffusers knows no other number of this kind of adapter
MID = 3


def checkpoint(unet, seed=0, e=tiny.MEMORY_DIM):
    """A random IP-Adapter for this UNet, as a file holds it: names to tensors."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator) * 0.5

    tensors = {
        "image_proj.proj.weight": random(TOKENS * TEXT_DIM, e),
        "image_proj.proj.bias": random(TOKENS * TEXT_DIM),
        "image_proj.norm.weight": 1 + random(TEXT_DIM),
        "image_proj.norm.bias": random(TEXT_DIM),
    }
    crossing = [part for part in map(unet.get_submodule, names(unet)) if part.is_cross_attention]
    for index, attn in enumerate(crossing):
        for letter in "kv":
            tensors[f"ip_adapter.{2 * index + 1}.to_{letter}_ip.weight"] = random(attn.inner_dim, TEXT_DIM)
    return tensors


def names(unet):
    return [name.removesuffix(".processor") for name in unet.attn_processors]


def nested(tensors):
    """The same checkpoint as pickles hold it, and as diffusers takes it."""
    parts = {"image_proj": {}, "ip_adapter": {}}
    for name, value in tensors.items():
        part, rest = name.split(".", 1)
        parts[part][rest] = value
    return parts


def by_diffusers(unet, tensors, memory, kind="stable", scale=1.0):
    """What diffusers itself answers with this checkpoint: its own image projection and processors."""
    give_to_diffusers(unet, tensors, scale)
    args, kwargs = tiny_unets.given(kind)
    kwargs["added_cond_kwargs"] = kwargs.get("added_cond_kwargs", {}) | {"image_embeds": [memory.tokens]}
    with torch.no_grad():
        return unet(*args, **kwargs).sample


def give_to_diffusers(unet, tensors, scale=1.0):
    unet._load_ip_adapter_weights([nested(tensors)], low_cpu_mem_usage=False)
    for processor in unet.attn_processors.values():
        if hasattr(processor, "scale"):
            processor.scale = [scale]


# The same numbers


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_checkpoint_gives_what_diffusers_gives(kind, images, tmp_path):
    unet, memory = tiny_unets.make(kind), tiny.memory(ROWS, m=images)
    tensors = checkpoint(unet)
    save_file(tensors, tmp_path / "ip.safetensors")
    model = mmattn.load(unet, tmp_path / "ip.safetensors")
    assert model.adapters["default"].config == tiny_unets.adapter(tokens=TOKENS)
    want = by_diffusers(tiny_unets.make(kind), tensors, memory, kind, scale=0.6)
    assert differs(want, tiny_unets.own(kind))
    assert_close(run(model, memory, kind, adapter_scale=0.6), want)
    assert_close(run(model.use_core(), memory, kind, adapter_scale=0.6), want)
    with model.disable_adapter():
        assert_close(run(model, memory, kind), tiny_unets.own(kind))
    out = run(model, tiny.memory(ROWS, m=images, lengths=[images, 0, images]), kind, adapter_scale=0.6)
    assert_close(out[::2], want[::2])
    assert torch.equal(out[1], run(model, None, kind)[1])


@torch.no_grad()
def test_one_of_diffusers_own_beside_ours():
    """Both add to the same layer, each its share."""
    unet, memory = tiny_unets.make(), tiny.memory(ROWS)
    theirs = checkpoint(unet, e=11)
    model = tiny_unets.attach(unet, blocks=("mid",))
    args, _ = tiny_unets.given()
    image = {"added_cond_kwargs": {"image_embeds": [torch.randn(ROWS, 1, 11)]}}
    with tiny_unets.listening(model, MID) as heard:
        run(model)
        without, x = heard["out"], heard["x"]
    give_to_diffusers(unet, theirs)
    # Only the middle of theirs, so that what goes in there stays the same.
    for name, processor in unet.attn_processors.items():
        if hasattr(processor, "scale") and not name.startswith("mid"):
            processor.scale = [0.0]
    with tiny_unets.listening(model, MID) as heard:
        model(*args, **image)
        one = heard["out"] - without
        model(*args, memory=memory, **image)
        both, same = heard["out"] - without, heard["x"]
    assert one.abs().max() > 0.01
    assert_close(same, x)
    assert_close(both, one + tiny_unets.share(model, MID, x, memory), 1e-4)
    own = model(*args, **image).sample
    out = model(*args, memory=tiny.memory(ROWS, lengths=[5, 0, 3]), **image).sample
    assert torch.equal(out[1], own[1]) and differs(out[::2], own[::2])
    assert list(model.adapters) == ["default"] and len(model.layer_names) == 4
    with pytest.raises(ConditionError, match="IPAdapterAttnProcessor2_0.*default one back"):
        model.use_core()
    late = mmattn.attach(model.unload(), tiny_unets.adapter(blocks=("mid",)))
    assert torch.equal(late(*args, memory=memory, **image).sample, own)


# Files


@pytest.mark.parametrize("ending", [".bin", ".safetensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@torch.no_grad()
def test_both_kinds_of_file_and_half_precision(ending, dtype, tmp_path):
    unet, path, memory = tiny_unets.make(), tmp_path / f"ip{ending}", tiny.memory(ROWS, m=1)
    tensors = {name: value.to(dtype) for name, value in checkpoint(unet).items()}
    if ending == ".bin":
        torch.save(nested(tensors), path)
    else:
        save_file(tensors, path)
    model = mmattn.load(unet, str(path))
    assert {one.dtype for one in model.adapters.parameters()} == {torch.float32}
    for theirs, value in tensors.items():
        assert any(torch.equal(one, value.float()) for one in model.adapters.parameters()), theirs
    want = by_diffusers(tiny_unets.make(), {name: value.float() for name, value in tensors.items()}, memory)
    assert_close(run(model, memory), want)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_written_and_read_back(kind, tmp_path):
    model, memory = tiny_unets.attach(tiny_unets.make(kind), tokens=TOKENS), tiny.memory(ROWS)
    path = tmp_path / "ip.safetensors"
    model.save_ip_adapter(path)
    assert os.listdir(tmp_path) == [path.name]
    tensors = load_file(path)
    assert tensors.keys() == checkpoint(model.host).keys()
    again = mmattn.load(tiny_unets.make(kind), path, "image")
    assert torch.equal(run(again, memory, kind), run(model, memory, kind))
    assert_close(by_diffusers(tiny_unets.make(kind), tensors, memory, kind), run(model, memory, kind))
    for source, name in ((model, "default"), (again, "image")):
        source.save_ip_adapter(tmp_path / "again.safetensors", name)
        assert path.read_bytes() == (tmp_path / "again.safetensors").read_bytes()


@torch.no_grad()
def test_written_in_half_precision(tmp_path):
    """Invariant 130: what a model in half precision wrote is read beside one in float32, and in its own if asked."""
    model, path = tiny_unets.attach(tiny_unets.make(), tokens=TOKENS).half(), tmp_path / "ip.safetensors"
    model.save_ip_adapter(path)
    for dtype in (None, torch.float16, "auto"):
        again = mmattn.load(tiny_unets.make(), path, dtype=dtype)
        for name, value in again.adapter("default").state_dict().items():
            assert value.dtype == (torch.float32 if dtype is None else torch.float16)
            assert torch.equal(value.float(), model.adapter("default").state_dict()[name].float())
        assert run(again, tiny.memory(ROWS)).isfinite().all()


def test_what_is_no_ip_adapter_is_not_written_as_one(tmp_path):
    few = mmattn.Resampler(3, 1, 2, 4)
    for settings in ({}, {"tokens": 2, "blocks": ("up",)}, {"tokens": 2, "resampler": few}):
        with pytest.raises(ConditionError, match="save_adapter"):
            tiny_unets.attach(tiny_unets.make(), **settings).save_ip_adapter(tmp_path / "ip.safetensors")
    model = tiny_unets.attach(tiny_unets.make(), tokens=2)
    with pytest.raises(AttachError, match="other"):
        model.save_ip_adapter(tmp_path / "ip.safetensors", "other")
    path = tmp_path / "good.safetensors"
    model.save_ip_adapter(path)
    good = path.read_bytes()
    with torch.no_grad():
        next(iter(model.adapters.parameters())).fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        model.save_ip_adapter(path)
    assert path.read_bytes() == good and os.listdir(tmp_path) == [path.name]


class Code:
    """A pickle that runs what it says."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def pickled(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def bad_files():
    """Name of the file to its bytes; what is wrong with it is its key."""
    unet = tiny_unets.make()
    good = checkpoint(unet)

    def without(name):
        return {key: value for key, value in good.items() if key != name}

    def reshaped(name, *shape):
        return save(good | {name: torch.zeros(shape)})

    plus = {name: value for name, value in good.items() if name.startswith("ip_adapter")}
    plus |= {"image_proj.latents": torch.zeros(1, 16, TEXT_DIM), "image_proj.proj_in.weight": torch.zeros(TEXT_DIM, 13)}
    projection = {"image_proj.proj.weight": torch.zeros(17, 70000), "image_proj.proj.bias": torch.zeros(17)}
    return {
        "torn": (save(good)[:-7], "cannot be read"),
        "a pickle by another name": (pickled(nested(good)), "cannot be read"),
        "plus": (save(plus), "Plus"),
        "an extra tensor": (save(good | {"image_proj.latents": torch.zeros(3)}), "Plus"),
        "no last layer": (save(without("ip_adapter.7.to_v_ip.weight")), "another base model"),
        "another base": (save(checkpoint(tiny_unets.make("sdxl"))), "another base model"),
        "a short bias": (reshaped("image_proj.proj.bias", 17), "not a plain IP-Adapter"),
        "a flat projection": (reshaped("image_proj.proj.weight", 17), "not a plain IP-Adapter"),
        "no projection": (reshaped("image_proj.proj.weight", 0, 13), "not a plain IP-Adapter"),
        "too wide": (save(good | projection), "memory_dim"),
        "integers": (save(good | {"image_proj.norm.bias": torch.zeros(17, dtype=torch.long)}), "int64"),
        "torn.bin": (pickled(nested(good))[:-300], "cannot be read"),
        "flat.bin": (pickled(good), "no 'image_proj'"),
    }


@pytest.mark.parametrize("wrong", bad_files())
def test_a_bad_file_changes_nothing(wrong, tmp_path):
    content, match = bad_files()[wrong]
    path = tmp_path / (wrong if wrong.endswith(".bin") else f"{wrong}.safetensors")
    path.write_bytes(content)
    unet, model = tiny_unets.make(), tiny_unets.attach(tiny_unets.make(seed=1))
    before = [tiny_unets.traces(host) for host in (unet, model.host)]
    for host in (unet, model):
        with pytest.raises(AdapterFileError, match=match):
            mmattn.load(host, path, "image")
    assert [tiny_unets.traces(host) for host in (unet, model.host)] == before
    assert list(model.adapters) == ["default"]
    assert all(one.requires_grad for one in unet.parameters())


def test_a_pickle_runs_nothing(tmp_path):
    path, marker = tmp_path / "ip.bin", tmp_path / "marker"
    torch.save(nested(checkpoint(tiny_unets.make())) | {"code": Code(marker)}, path)
    unet = tiny_unets.make()
    before = tiny_unets.traces(unet)
    with pytest.raises(AdapterFileError, match="cannot be read"):
        mmattn.load(unet, path)
    assert not marker.exists() and tiny_unets.traces(unet) == before
    torch.load(path, weights_only=False)  # it would have
    assert marker.exists()
