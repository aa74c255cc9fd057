"""Pipelines of diffusers, unchanged, around a host with an adapter: both ways of guidance, batches, steps, files."""

from __future__ import annotations

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler as Scheduler,
    FluxPipeline,
    QwenImagePipeline,
    StableDiffusion3Pipeline,
    WanPipeline,
)

import mmattn
from mmattn.errors import ConditionError, ShapeError
from tests import tiny, tiny_pipeline, tiny_transformers, tiny_unets
from tests.tiny import assert_close

ROWS, STEPS = 2, 3
pytestmark = pytest.mark.filterwarnings("ignore")


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(seed))


TEXTS = {
    "prompt_embeds": noise(5, 22, seed=1),
    "negative_prompt_embeds": noise(5, 22, seed=2),
    "height": 64,
    "width": 64,
}
POOLED = {"pooled_prompt_embeds": noise(26, seed=3), "negative_pooled_prompt_embeds": noise(26, seed=4)}
MASKS = dict.fromkeys(("prompt_embeds_mask", "negative_prompt_embeds_mask"), torch.ones(ROWS, 5, dtype=torch.long))


class Drawing:
    """A pipeline of tiny random parts, its arguments, each with a row for each picture, and how it is guided."""

    def __init__(self, pipe, arguments, guidance) -> None:
        pipe.set_progress_bar_config(disable=True)
        self.pipe, self.arguments, self.guidance = pipe, arguments, guidance

    @property
    def host(self):
        """What denoises."""
        return self.pipe.unet if hasattr(self.pipe, "unet") else self.pipe.transformer

    def __call__(self, guided: bool = True, row: int | None = None, **more) -> torch.Tensor:
        arguments = self.arguments | (self.guidance if guided else dict.fromkeys(self.guidance, 1.0))
        if row is not None:
            arguments = tiny_unets.row_of(arguments, row)
            arguments |= {name: [one[row]] for name, one in arguments.items() if isinstance(one, list)}
        return self.pipe(num_inference_steps=STEPS, output_type="latent", **arguments | more)[0]


def stable(words) -> Drawing:
    arguments = {"prompt": ["a red flower", "the blue one"], "latents": noise(4, 16, 16)}
    return Drawing(tiny_pipeline.make_pipeline(words), arguments, {"guidance_scale": 5.0})


def sd3(words) -> Drawing:
    pipe = StableDiffusion3Pipeline(tiny_transformers.make("SD3Transformer2DModel"), Scheduler(), *[None] * 7)
    return Drawing(pipe, TEXTS | POOLED | {"latents": noise(4, 8, 8)}, {"guidance_scale": 4.0})


def flux(words) -> Drawing:
    """Distilled guidance in every call, and guidance by two calls where true_cfg_scale says so."""
    pipe = FluxPipeline(Scheduler(), *[None] * 5, tiny_transformers.make("FluxTransformer2DModel"))
    arguments = TEXTS | POOLED | {"latents": noise(16, 4), "guidance_scale": 3.5}
    return Drawing(pipe, arguments, {"true_cfg_scale": 4.0})


def qwen_image(words) -> Drawing:
    pipe = QwenImagePipeline(Scheduler(), *[None] * 3, tiny_transformers.make("QwenImageTransformer2DModel"))
    return Drawing(pipe, TEXTS | MASKS | {"latents": noise(16, 16)}, {"true_cfg_scale": 4.0})


def wan(words) -> Drawing:
    pipe = WanPipeline(None, None, None, Scheduler(), tiny_transformers.make("WanTransformer3DModel"))
    film = {"latents": noise(4, 3, 4, 8), "height": 32, "num_frames": 9}
    return Drawing(pipe, TEXTS | film, {"guidance_scale": 4.0})


pipelines = pytest.mark.parametrize("make", [stable, sd3, flux, qwen_image, wan])


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A tokenizer that spells."""
    return tiny_pipeline.make_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture
def draw(words) -> Drawing:
    """Stable Diffusion."""
    return stable(words)


@pytest.mark.parametrize("guided", [False, True])
@pipelines
def test_a_batch_with_a_memory_for_each_picture(make, guided, words):
    """Invariant 97: an unchanged pipeline sees its memory row by row; unloaded and fresh it is bit for bit itself."""
    draw = make(words)
    plain, memory = draw(guided), tiny.memory(ROWS, lengths=[5, 3])
    model = tiny_transformers.attach(draw.host, opened=False)
    with model.condition(memory, guided=True):
        assert torch.equal(draw(guided), plain)
    tiny_unets.open_values(model)
    for core in (False, True) if make is stable else (False,):
        if core:
            model.use_core()
        with model.condition(memory, guided=True):
            out = draw(guided)
        assert out.isfinite().all()
        assert all((out[i] - plain[i]).abs().max() > 1e-3 * plain.abs().max() for i in range(ROWS))
        for i in range(ROWS):
            with model.condition(memory[i], guided=True):
                assert_close(draw(guided, row=i), out[i : i + 1], 1e-4)
    with model.condition(tiny.memory(ROWS, lengths=[5, 0]), guided=True):
        half = draw(guided)
    with model.condition(None):
        own = draw(guided)
    assert torch.equal(half[1], own[1]) and not torch.equal(half[0], own[0])
    model.unload()
    assert torch.equal(draw(guided), plain)
    assert "cache_context" not in vars(draw.host)


@pipelines
def test_the_unconditional_half_sees_no_memory(make, words):
    """Invariant 97. However the pipeline computes it: as the first half of the rows, or in a call of its own."""
    draw, answers = make(words), []
    draw.host.register_forward_hook(lambda module, args, output: answers.append(output[0]))

    def first_step(guided: bool | None) -> list[torch.Tensor]:
        answers.clear()
        if guided is None:
            draw()
        else:
            with model.condition(tiny.memory(ROWS), guided=guided):
                draw()
        return answers[:1] if make in (stable, sd3) else answers[:2]  # both calls are given the same noise

    plain = first_step(None)
    model = tiny_unets.open_values(tiny_transformers.attach(draw.host))
    seen = first_step(True)
    if make in (stable, sd3):
        assert torch.equal(seen[0][:ROWS], plain[0][:ROWS]) and tiny.differs(seen[0][ROWS:], plain[0][ROWS:])
        with pytest.raises(ShapeError, match="guided=True"):
            first_step(False)
        return
    assert sorted(torch.equal(answer, own) for answer, own in zip(seen, plain, strict=True)) == [False, True]
    assert not any(torch.equal(answer, own) for answer, own in zip(first_step(False), plain, strict=True))


@pytest.mark.parametrize("core", [False, True])
def test_keys_and_values_are_made_once_for_a_picture(draw, core):
    model, memory = tiny_unets.attach(draw.host).use_core(core), tiny.memory(2)
    places = range(len(model.layer_names))
    ours = [block.k_proj for block in model.adapters["default"].blocks.values()]
    theirs = [model.layer(index).to_k for index in places]
    with tiny.counting(*ours) as ran, tiny.counting(*theirs) as read:
        with model.condition(memory, guided=True):
            draw()
        assert len(ran) == len(places)
        assert len(read) == len(places) * (1 if core else STEPS)
        with model.condition(model.prepare(memory), guided=True, adapter_scale=lambda time: time / 1000):
            draw()
            draw(False)
        assert len(ran) == 2 * len(places)


def test_schedules_follow_the_schedulers_time(draw):
    model, times = tiny_unets.attach(draw.host), []
    with model.condition(tiny.memory(2), guided=True, adapter_scale=lambda time: times.append(time) or 1.0):
        out = draw()
    assert times == [float(time) for time in draw.pipe.scheduler.timesteps]
    with model.condition(tiny.memory(2), guided=True):
        assert torch.equal(draw(), out)


@pytest.mark.parametrize("pictures", [1, 3])
def test_several_pictures_of_a_prompt(draw, pictures):
    """Rows of the sample are prompts by pictures: each needs a row of memory, and says so."""
    model, more = tiny_unets.attach(draw.host), {"num_images_per_prompt": pictures, "latents": None}
    with model.condition(tiny.memory(2)[torch.arange(2).repeat_interleave(pictures)], guided=True):
        out = draw(**more)
    assert len(out) == 2 * pictures and out.isfinite().all()
    if pictures > 1:
        with pytest.raises(ShapeError, match="12 rows.*has 2"), model.condition(tiny.memory(2), guided=True):
            draw(**more)


def test_the_core_notices_an_adapter_loaded_by_the_pipeline(draw, tmp_path):
    theirs = tiny_unets.attach(tiny_unets.make(in_channels=4, out_channels=4, cross_attention_dim=34), tokens=4)
    theirs.save_ip_adapter(tmp_path / "ip.safetensors")
    pipe, file = draw.pipe, {"subfolder": "", "weight_name": "ip.safetensors", "image_encoder_folder": None}
    plain, model = draw(), tiny_unets.attach(draw.host).use_core()
    pipe.load_ip_adapter(str(tmp_path), **file)
    with pytest.raises(ConditionError, match="use_core"), model.condition(tiny.memory(2), guided=True):
        draw(ip_adapter_image_embeds=[torch.zeros(4, 1, 13)])
    model.use_core(False)
    pipe.unload_ip_adapter()
    assert_close(draw(), plain, 1e-4)
    model.unload()
    pipe.load_ip_adapter(str(tmp_path), **file)
    # One picture without guidance: for more, diffusers folds the images of all rows into tokens of each.
    memory = tiny.memory(1, m=1)
    by_diffusers = draw(False, row=0, ip_adapter_image_embeds=[memory.tokens])
    pipe.unload_ip_adapter()
    ours = mmattn.load(draw.host, tmp_path / "ip.safetensors")
    for core in (False, True):
        with ours.use_core(core).condition(memory):
            assert_close(draw(False, row=0), by_diffusers, 1e-4)
