"""Drawing with a seed, and the attention of a drawing to its words and its example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mmattn
from mmattn import inspect
from mmattn.pipelines import DiffusionHost, as_image

from .models import Denoiser


def draw(
    model: Denoiser,
    host: DiffusionHost,
    sentences: Sequence[str],
    steps: int,
    guidance_scale: float,
    *,
    seed: int,
    **given: Any,
) -> Tensor:
    """Pictures (b, c, size, size) from -1 to 1 on the CPU, one for each sentence; equal seeds draw equal pictures."""
    settings = {"num_inference_steps": steps, "guidance_scale": guidance_scale}
    return host.generate(model, sentences, generator=torch.Generator().manual_seed(seed), **settings, **given)


def traces(
    model: Denoiser,
    host: DiffusionHost,
    sentence: str,
    steps: int,
    *,
    seed: int,
    memory: mmattn.Memory | None = None,
    example: Tensor | None = None,
) -> list[inspect.Trace]:
    """The attention of each place of the picture to each word, without guidance, as the mean over the steps.

    Of a model that reads picture and text in one softmax, only the attention to the example.

    Args:
        model: attached.
        host: with its text encoder.
        sentence: what is drawn.
        steps: of DDIM.
        seed: of the noise.
        memory: of an example; a second trace is then of its patches.
        example: the picture (c, size, size) that the memory is of.
    """
    with inspect.record(model) as weights:
        made = draw(model, host, [sentence], steps, 1.0, seed=seed, memory=memory)
    words, side = host.prompts.tokens(sentence), model.host.config.sample_size
    given: dict[str, Any] = {"queries": "sources", "grid": (side, side), "picture": enlarged(made[0])}
    found = []
    if any(name == "text" for name, _ in weights):
        seen = maps(weights, "text", len(words), side)
        found.append(inspect.Trace(words, patches(side), *seen, sentence, **given))
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


@torch.no_grad()
def word_attention(
    model: Denoiser, host: DiffusionHost, sentence: str, steps: int, *, seed: int
) -> tuple[list[str], list[int], Tensor, Tensor]:
    """The attention to each word at each step of drawing without guidance.

    Returns:
        The words, the time steps, the maps (steps, words, h, w) as the mean over layers and heads, and the picture.
    """
    with inspect.record(model) as weights:
        made = draw(model, host, [sentence], steps, 1.0, seed=seed)
    words = host.prompts.tokens(sentence)
    side, maps = model.host.config.sample_size, []
    for calls in (calls for (name, _), calls in weights.items() if name == "text"):
        seen = torch.stack(calls)[:, 0].mean(1)[..., : len(words)].cpu()  # (steps, places, words)
        height = round(seen.shape[1] ** 0.5)
        square = seen.transpose(1, 2).unflatten(2, (height, height))
        maps.append(F.interpolate(square, size=(side, side), mode="bilinear", align_corners=False))
    return words, host.sampler(steps).timesteps.tolist(), torch.stack(maps).mean(0), made[0]
