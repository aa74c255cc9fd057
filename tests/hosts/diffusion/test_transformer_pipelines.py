"""Pipelines of diffusers, unchanged, around a transformer with an adapter: both ways of guidance, batches and steps."""

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

from mmattn.errors import ShapeError
from tests import tiny, tiny_transformers, tiny_unets
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
    """A pipeline of tiny random parts, its arguments, each tensor with a row for each picture, and how it is guided."""

    def __init__(self, pipe, arguments, guidance) -> None:
        pipe.set_progress_bar_config(disable=True)
        self.pipe, self.arguments, self.guidance = pipe, arguments, guidance

    def __call__(self, guided: bool, row: int | None = None) -> torch.Tensor:
        arguments = self.arguments | (self.guidance if guided else dict.fromkeys(self.guidance, 1.0))
        arguments = arguments if row is None else tiny_unets.row_of(arguments, row)
        return self.pipe(num_inference_steps=STEPS, output_type="latent", **arguments)[0]


def sd3() -> Drawing:
    pipe = StableDiffusion3Pipeline(tiny_transformers.make("SD3Transformer2DModel"), Scheduler(), *[None] * 7)
    return Drawing(pipe, TEXTS | POOLED | {"latents": noise(4, 8, 8)}, {"guidance_scale": 4.0})


def flux() -> Drawing:
    """Distilled guidance in every call, and guidance by two calls where true_cfg_scale says so."""
    pipe = FluxPipeline(Scheduler(), *[None] * 5, tiny_transformers.make("FluxTransformer2DModel"))
    arguments = TEXTS | POOLED | {"latents": noise(16, 4), "guidance_scale": 3.5}
    return Drawing(pipe, arguments, {"true_cfg_scale": 4.0})


def qwen_image() -> Drawing:
    pipe = QwenImagePipeline(Scheduler(), *[None] * 3, tiny_transformers.make("QwenImageTransformer2DModel"))
    return Drawing(pipe, TEXTS | MASKS | {"latents": noise(16, 16)}, {"true_cfg_scale": 4.0})


def wan() -> Drawing:
    pipe = WanPipeline(None, None, None, Scheduler(), tiny_transformers.make("WanTransformer3DModel"))
    film = {"latents": noise(4, 3, 4, 8), "height": 32, "num_frames": 9}
    return Drawing(pipe, TEXTS | film, {"guidance_scale": 4.0})


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
