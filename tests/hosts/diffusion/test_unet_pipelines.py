"""Pipelines of diffusers, unchanged, around a UNet with an adapter: guidance, batches, steps, LoRA and IP-Adapters."""

from __future__ import annotations

import pytest
import torch
from diffusers import StableDiffusionPipeline
from transformers import CLIPTokenizer

import mmattn
from mmattn.errors import ConditionError, ShapeError
from tests import tiny, tiny_pipeline, tiny_unets
from tests.tiny import assert_close

STEPS = 3
PROMPTS = ["a red flower", "the blue one"]


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> CLIPTokenizer:
    """A tokenizer that spells."""
    return tiny_pipeline.make_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture
def pipe(words) -> StableDiffusionPipeline:
    """Stable Diffusion from tiny random parts: latents of 4 channels at 16 x 16."""
    return tiny_pipeline.make_pipeline(words)


def draw(pipe, prompts=PROMPTS, guidance=5.0, row=None, **more):
    """The latents (b, 4, 16, 16) that a pipeline arrives at; `row` starts from that row of the noise alone."""
    noise = torch.randn(len(PROMPTS), 4, 16, 16, generator=torch.Generator().manual_seed(1))
    settings = {"num_inference_steps": STEPS, "guidance_scale": guidance, "output_type": "latent"} | more
    latents = noise[: len(prompts)] if row is None else noise[row : row + 1]
    return pipe(prompts, latents=latents, **settings).images


@pytest.mark.parametrize("core", [False, True])
@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_a_batch_with_a_memory_for_each_picture(pipe, guidance, core):
    plain = draw(pipe, guidance=guidance)
    model, memory = tiny_unets.attach(pipe.unet).use_core(core), tiny.memory(2, lengths=[5, 3])
    assert model.host is pipe.unet
    with model.condition(memory, guided=True):
        out = draw(pipe, guidance=guidance)
    assert all((out[i] - plain[i]).abs().max() > 1e-2 * plain.abs().max() for i in range(2))
    for i in range(2):
        with model.condition(memory[i], guided=True):
            alone = draw(pipe, [PROMPTS[i]], guidance, row=i)
        assert_close(alone, out[i : i + 1], 1e-4)
    with model.condition(memory[[1, 0]], guided=True):
        assert (draw(pipe, guidance=guidance) - out).abs().max() > 1e-2
    model.use_core(False)
    assert torch.equal(draw(pipe, guidance=guidance), plain)
    model.unload()
    assert torch.equal(draw(pipe, guidance=guidance), plain)


@pytest.mark.parametrize("core", [False, True])
def test_keys_and_values_are_made_once_for_a_picture(pipe, core):
    model, memory = tiny_unets.attach(pipe.unet).use_core(core), tiny.memory(2)
    places = range(len(model.layer_names))
    ours = [block.k_proj for block in model.adapters["default"].blocks.values()]
    theirs = [model.layer(index).to_k for index in places]
    with tiny_unets.counting(*ours) as ran, tiny_unets.counting(*theirs) as read:
        with model.condition(memory, guided=True):
            draw(pipe)
        assert len(ran) == len(places)
        assert len(read) == len(places) * (1 if core else STEPS)
        with model.condition(model.prepare(memory), guided=True, adapter_scale=lambda time: time / 1000):
            draw(pipe)
            draw(pipe, guidance=1.0)
        assert len(ran) == 2 * len(places)


def test_schedules_follow_the_schedulers_time(pipe):
    model, times = tiny_unets.attach(pipe.unet), []
    with model.condition(tiny.memory(2), guided=True, adapter_scale=lambda time: times.append(time) or 1.0):
        out = draw(pipe)
    assert times == [float(time) for time in pipe.scheduler.timesteps]
    with model.condition(tiny.memory(2), guided=True):
        assert torch.equal(draw(pipe), out)


@pytest.mark.parametrize("pictures", [1, 3])
def test_several_pictures_of_a_prompt(pipe, pictures):
    """Rows of the sample are prompts by pictures: each needs a row of memory, and says so."""
    model = tiny_unets.attach(pipe.unet)
    settings = {"num_inference_steps": 2, "output_type": "latent", "num_images_per_prompt": pictures}
    rows = torch.arange(2).repeat_interleave(pictures)
    with model.condition(tiny.memory(2)[rows], guided=True):
        out = pipe(PROMPTS, generator=torch.Generator().manual_seed(3), **settings).images
    assert len(out) == 2 * pictures and torch.isfinite(out).all()
    if pictures > 1:
        with pytest.raises(ShapeError, match="12 rows.*has 2"), model.condition(tiny.memory(2), guided=True):
            pipe(PROMPTS, **settings)


def test_the_core_notices_an_adapter_loaded_by_the_pipeline(pipe, tmp_path):
    theirs = tiny_unets.attach(tiny_unets.make(in_channels=4, out_channels=4, cross_attention_dim=34), tokens=4)
    theirs.save_ip_adapter(tmp_path / "ip.safetensors")
    plain, model = draw(pipe), tiny_unets.attach(pipe.unet).use_core()
    pipe.load_ip_adapter(str(tmp_path), subfolder="", weight_name="ip.safetensors", image_encoder_folder=None)
    with pytest.raises(ConditionError, match="use_core"), model.condition(tiny.memory(2), guided=True):
        draw(pipe, ip_adapter_image_embeds=[torch.zeros(4, 1, 13)])
    model.use_core(False)
    pipe.unload_ip_adapter()
    assert_close(draw(pipe), plain, 1e-4)
    model.unload()
    pipe.load_ip_adapter(str(tmp_path), subfolder="", weight_name="ip.safetensors", image_encoder_folder=None)
    # One picture without guidance: for more, diffusers folds the images of all rows into tokens of each.
    memory = tiny.memory(1, m=1)
    by_diffusers = draw(pipe, PROMPTS[:1], 1.0, ip_adapter_image_embeds=[memory.tokens])
    pipe.unload_ip_adapter()
    ours = mmattn.load(pipe.unet, tmp_path / "ip.safetensors")
    for core in (False, True):
        with ours.use_core(core).condition(memory):
            assert_close(draw(pipe, PROMPTS[:1], 1.0), by_diffusers, 1e-4)
