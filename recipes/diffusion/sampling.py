"""Sampling: pictures from sentences, and from a memory where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mmattn
from mmattn import inspect, training

from .models import Models


@torch.no_grad()
def draw(
    model: mmattn.hosts.AdaptedUNet,
    models: Models,
    sentences: Sequence[str],
    steps: int,
    guidance_scale: float,
    *,
    seed: int,
    memory: mmattn.Memory | None = None,
    adapter_scale: Any = 1.0,
    concatenated: Any = None,
    progress: bool = False,
) -> Tensor:
    """Pictures (b, c, size, size) from -1 to 1 on the CPU, one for each sentence; equal seeds start from equal noise.

    Args:
        model: the UNet, attached.
        models: the text encoder, the noise schedule and what decodes.
        sentences: b of them.
        steps: of DDIM.
        guidance_scale: as in diffusers; 1 is no guidance.
        seed: of the noise.
        memory: an example for each sentence.
        adapter_scale: of the memory.
        concatenated: a module that appends the memory to the text instead.
        progress: show a bar.
    """
    scheduler = models.sampler(steps)
    (text, mask), null = models.words(list(sentences)), models.words.null()
    memory = None if memory is None else memory.to(text.device)
    if concatenated is not None:
        (text, mask), memory = concatenated(text, mask, memory), None
    settings = model.host.config
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(text), settings.in_channels, settings.sample_size, settings.sample_size, generator=generator)
    x = x.to(text.device)
    guidance = mmattn.Guidance(guidance_scale)
    given = {"text_mask": mask, "null_text": null, "memory": memory, "adapter_scale": adapter_scale}
    with guidance.run(model, text, **given) as predict:
        for index in training.tracked(len(scheduler.timesteps), "drawing", progress):
            time = scheduler.timesteps[index]
            # Guidance overshoots: the noise must be that of the clipped picture, or the next step starts from neither.
            clipped = {"use_clipped_model_output": True} if scheduler.config.clip_sample else {}
            x = scheduler.step(predict(x, time), time, x, **clipped).prev_sample
    return models.decode(x).cpu()


def traces(
    model: mmattn.hosts.AdaptedUNet,
    models: Models,
    sentence: str,
    steps: int,
    *,
    seed: int,
    memory: mmattn.Memory | None = None,
    example: Tensor | None = None,
) -> list[inspect.Trace]:
    """The attention of each place of the picture to each word, without guidance, as the mean over the steps.

    Args:
        model: the UNet, attached.
        models: as in `draw`.
        sentence: what is drawn.
        steps: of DDIM.
        seed: of the noise.
        memory: of an example; a second trace is then of its patches.
        example: the picture (c, size, size) that the memory is of.
    """
    with inspect.record(model) as weights:
        made = draw(model, models, [sentence], steps, 1.0, seed=seed, memory=memory)
    words, side = models.words.tokens(sentence), model.host.config.sample_size
    given: dict[str, Any] = {"queries": "sources", "grid": (side, side), "picture": enlarged(made[0])}
    found = [inspect.Trace(words, patches(side), *maps(weights, "text", len(words), side), sentence, **given)]
    if memory is not None and example is not None:
        edge = round(memory.length**0.5)
        given |= {"word_grid": (edge, edge), "word_picture": enlarged(example)}
        seen = maps(weights, "default", memory.length, side)
        found.append(inspect.Trace(patches(edge), patches(side), *seen, f"{sentence}, in this hand", **given))
    return found


def maps(weights: Any, name: str, count: int, side: int) -> tuple[Tensor, list[str]]:
    """Of the slots of a memory, (layers, heads, slots, places) over a square of side × side, and the layers' names."""
    found, names = [], []
    for index, calls in ((index, calls) for (owner, index), calls in weights.items() if owner == name):
        seen = torch.stack(calls)[:, 0].mean(0)[..., :count].cpu()  # (heads, places, slots)
        height = round(seen.shape[1] ** 0.5)
        square = seen.transpose(1, 2).unflatten(2, (height, height))
        found.append(F.interpolate(square, size=(side, side), mode="bilinear", align_corners=False).flatten(2))
        names.append(f"attention {index}, {height} × {height} places")
    return torch.stack(found), names


def patches(side: int) -> list[str]:
    """The names of the patches of a square picture, row by row."""
    return [f"row {row + 1}, column {column + 1}" for row in range(side) for column in range(side)]


def enlarged(picture: Tensor) -> Any:
    """A picture (c, height, width) from -1 to 1 as one of Pillow that a page can show, its pixels as squares."""
    shown = as_image(picture)
    return shown.resize((256, 256), resample=0 if shown.width < 256 else None)


def as_image(picture: Tensor) -> Any:
    """A picture (c, height, width) from -1 to 1 as one of Pillow: one channel is ink on paper, three are colours."""
    from PIL import Image

    shown = (1 - picture[0]) if len(picture) == 1 else (1 + picture).permute(1, 2, 0)
    return Image.fromarray((127.5 * shown).round().to(torch.uint8).numpy())


@torch.no_grad()
def word_attention(
    model: mmattn.hosts.AdaptedUNet, models: Models, sentence: str, steps: int, *, seed: int
) -> tuple[list[str], list[int], Tensor, Tensor]:
    """The attention to each word at each step of drawing without guidance.

    Returns:
        The words, the time steps, the maps (steps, words, h, w) as the mean over layers and heads, and the picture.
    """
    with inspect.record(model) as weights:
        made = draw(model, models, [sentence], steps, 1.0, seed=seed)
    words = models.words.tokens(sentence)
    side, maps = model.host.config.sample_size, []
    for calls in (calls for (name, _), calls in weights.items() if name == "text"):
        seen = torch.stack(calls)[:, 0].mean(1)[..., : len(words)].cpu()  # (steps, places, words)
        height = round(seen.shape[1] ** 0.5)
        square = seen.transpose(1, 2).unflatten(2, (height, height))
        maps.append(F.interpolate(square, size=(side, side), mode="bilinear", align_corners=False))
    return words, models.sampler(steps).timesteps.tolist(), torch.stack(maps).mean(0), made[0]
