"""Pipelines of diffusers, unchanged, around a transformer with an adapter: both ways of guidance, batches and steps."""

from __future__ import annotations

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    QwenImagePipeline,
    StableDiffusion3Pipeline,
    WanPipeline,
)

from mmattn.errors import ShapeError
from tests import tiny, tiny_transformers, tiny_unets
from tests.tiny import assert_close

ROWS, STEPS = 2, 3
pytestmark = pytest.mark.filterwarnings("ignore")


def texts(width: int, seed: int, length: int = 5) -> torch.Tensor:
    return torch.randn(ROWS, length, width, generator=torch.Generator().manual_seed(seed))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(1))


class Drawing:
    """A pipeline of tiny random parts that is given the embeddings of its prompts.

    Args:
        pipe: the pipeline.
        settings: what it is called with, each tensor with a row for each picture.
        guidance: how guidance is switched on.
    """

    def __init__(self, pipe, settings, guidance) -> None:
        pipe.set_progress_bar_config(disable=True)
        self.pipe, self.settings, self.guidance = pipe, settings, guidance

    def __call__(self, guided: bool, row: int | None = None) -> torch.Tensor:
        given = self.settings | (self.guidance if guided else dict.fromkeys(self.guidance, 1.0))
        given = given if row is None else tiny_unets.row_of(given, row)
        return self.pipe(num_inference_steps=STEPS, output_type="latent", **given)[0]


def sd3() -> Drawing:
    pipe = StableDiffusion3Pipeline(
        tiny_transformers.make("SD3Transformer2DModel"), FlowMatchEulerDiscreteScheduler(), *[None] * 7
    )
    return Drawing(
        pipe,
        {
            "prompt_embeds": texts(22, 1),
            "negative_prompt_embeds": texts(22, 2),
            "pooled_prompt_embeds": texts(26, 3)[:, 0],
            "negative_pooled_prompt_embeds": texts(26, 4)[:, 0],
            "latents": noise(4, 8, 8),
            "height": 64,
            "width": 64,
        },
        {"guidance_scale": 4.0},
    )


def flux() -> Drawing:
    """Distilled guidance in every call, and guidance by two calls where true_cfg_scale says so."""
    pipe = FluxPipeline(
        FlowMatchEulerDiscreteScheduler(),
        None,
        None,
        None,
        None,
        None,
        tiny_transformers.make("FluxTransformer2DModel"),
    )
    return Drawing(
        pipe,
        {
            "prompt_embeds": texts(22, 1),
            "negative_prompt_embeds": texts(22, 2),
            "pooled_prompt_embeds": texts(26, 3)[:, 0],
            "negative_pooled_prompt_embeds": texts(26, 4)[:, 0],
            "latents": noise(16, 4),
            "height": 64,
            "width": 64,
            "guidance_scale": 3.5,
        },
        {"true_cfg_scale": 4.0},
    )


def qwen_image() -> Drawing:
    pipe = QwenImagePipeline(
        FlowMatchEulerDiscreteScheduler(), None, None, None, tiny_transformers.make("QwenImageTransformer2DModel")
    )
    return Drawing(
        pipe,
        {
            "prompt_embeds": texts(22, 1),
            "prompt_embeds_mask": torch.ones(ROWS, 5, dtype=torch.long),
            "negative_prompt_embeds": texts(22, 2),
            "negative_prompt_embeds_mask": torch.ones(ROWS, 5, dtype=torch.long),
            "latents": noise(16, 16),
            "height": 64,
            "width": 64,
        },
        {"true_cfg_scale": 4.0},
    )


def wan() -> Drawing:
    pipe = WanPipeline(
        None, None, None, FlowMatchEulerDiscreteScheduler(), tiny_transformers.make("WanTransformer3DModel")
    )
    return Drawing(
        pipe,
        {
            "prompt_embeds": texts(22, 1),
            "negative_prompt_embeds": texts(22, 2),
            "latents": noise(4, 3, 4, 8),
            "height": 32,
            "width": 64,
            "num_frames": 9,
        },
        {"guidance_scale": 4.0},
    )


PIPELINES = {"sd3": sd3, "flux": flux, "qwen image": qwen_image, "wan": wan}


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_batch_with_a_memory_for_each_picture(name, guided):
    """Invariant 97: an unchanged pipeline sees its memory row by row; unloaded and fresh it is bit for bit itself."""
    draw = PIPELINES[name]()
    plain, memory = draw(guided), tiny.memory(ROWS, lengths=[5, 3])
    model = tiny_transformers.attach(draw.pipe.transformer, opened=False)
    with model.condition(memory, guided=True):
        assert torch.equal(draw(guided), plain)
    tiny_unets.open_values(model)
    with model.condition(memory, guided=True):
        out = draw(guided)
    assert out.isfinite().all()
    assert all((out[i] - plain[i]).abs().max() > 1e-3 * plain.abs().max() for i in range(ROWS))
    for i in range(ROWS):
        with model.condition(memory[i], guided=True):
            assert_close(draw(guided, row=i), out[i : i + 1], 1e-4)
    with model.condition(tiny.memory(ROWS, lengths=[5, 0]), guided=True):
        half = draw(guided)
    assert torch.equal(half[1], plain[1]) and not torch.equal(half[0], plain[0])
    assert torch.equal(draw(guided), plain)
    model.unload()
    assert torch.equal(draw(guided), plain)
    assert "cache_context" not in draw.pipe.transformer.__dict__


@pytest.mark.parametrize("name", PIPELINES)
def test_the_unconditional_half_sees_no_memory(name):
    """However the pipeline computes it: as the first half of the rows, or in a call of its own."""
    draw = PIPELINES[name]()
    host, answers = draw.pipe.transformer, []
    hook = host.register_forward_hook(lambda module, args, output: answers.append(output[0]))
    draw(True)
    plain = list(answers)
    model = tiny_unets.open_values(tiny_transformers.attach(host))
    answers.clear()
    with model.condition(tiny.memory(ROWS), guided=True):
        draw(True)
    hook.remove()
    if name == "sd3":
        assert torch.equal(answers[0][:ROWS], plain[0][:ROWS]) and tiny.differs(answers[0][ROWS:], plain[0][ROWS:])
        with pytest.raises(ShapeError, match="guided=True"), model.condition(tiny.memory(ROWS)):
            draw(True)
        return
    # The first step: both calls are given the same noise.
    same = [torch.equal(answer, own) for answer, own in zip(answers[:2], plain[:2], strict=True)]
    assert sorted(same) == [False, True]
    answers.clear()
    hook = host.register_forward_hook(lambda module, args, output: answers.append(output[0]))
    with model.condition(tiny.memory(ROWS)):
        draw(True)
    hook.remove()
    assert not any(torch.equal(answer, own) for answer, own in zip(answers[:2], plain[:2], strict=True))


@pytest.mark.parametrize("name", PIPELINES)
def test_keys_and_values_are_computed_once_for_a_picture(name):
    draw = PIPELINES[name]()
    model = tiny_transformers.attach(draw.pipe.transformer)
    blocks = [block.k_proj for block in model.adapters["default"].blocks.values()]
    with tiny_unets.counting(*blocks) as ran, model.condition(tiny.memory(ROWS), guided=True):
        draw(True)
    assert len(ran) == len(blocks)


def test_a_schedule_follows_the_time_that_the_host_is_given():
    draw = sd3()
    model, times = tiny_transformers.attach(draw.pipe.transformer), []
    with model.condition(tiny.memory(ROWS), guided=True, adapter_scale=lambda time: times.append(time) or 1.0):
        out = draw(True)
    assert times == [float(time) for time in draw.pipe.scheduler.timesteps]
    with model.condition(tiny.memory(ROWS), guided=True):
        assert torch.equal(draw(True), out)
