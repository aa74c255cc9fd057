"""Drawing from a seed, grids of pictures, and the attention of a drawing to its words and its example."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import mmattn
from mmattn import inspect
from mmattn.pipelines import DiffusionHost, as_image

from .models import Denoiser

EXPLORED = 4  # sentences, or examples, in attention.safetensors


def draw(
    model: Denoiser,
    host: DiffusionHost,
    sentences: Sequence[str],
    steps: int,
    guidance_scale: float,
    *,
    seed: int,
    **options: Any,
) -> Tensor:
    """Return a picture (c, size, size) from -1 to 1 of each sentence; equal seeds draw equal pictures."""
    settings = {"num_inference_steps": steps, "guidance_scale": guidance_scale}
    return host.generate(model, sentences, generator=torch.Generator().manual_seed(seed), **settings, **options)


def grid(pictures: Tensor, columns: int, path: Path, labels: Sequence[str], headings: Sequence[str] = ()) -> None:
    """Save pictures (n, c, size, size) from -1 to 1 row by row, with a label for each row and headings."""
    rows = -(-len(pictures) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(0.7 * columns + 1.5, 0.7 * rows + 0.3), squeeze=False)
    for axis, picture in zip(axes.flat, pictures, strict=True):
        ink = -picture[0] if len(picture) == 1 else ((picture + 1) / 2).permute(1, 2, 0)  # ink on paper, or colours
        axis.imshow(ink.numpy(), cmap="gray", vmin=-1, vmax=1, interpolation="nearest")
        axis.set(xticks=[], yticks=[])
    for axis, label in zip(axes[:, 0], labels, strict=True):
        axis.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
    for axis, heading in zip(axes[0], headings, strict=False):
        axis.set_title(heading, fontsize=8)
    figure.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(figure)


def trace_drawing(
    model: Denoiser,
    host: DiffusionHost,
    sentence: str,
    steps: int,
    *,
    seed: int,
    memory: mmattn.Memory | None = None,
    example: Tensor | None = None,
) -> list[inspect.Trace]:
    """Return the attention of each place of a drawing to its words, and to the patches of an example."""
    with inspect.record(model) as weights:
        drawing = draw(model, host, [sentence], steps, 1.0, seed=seed, memory=memory)
    side = model.host.config.sample_size
    options: dict[str, Any] = {"queries": "sources", "grid": (side, side), "picture": enlarge(drawing[0])}
    traces = []
    if any(name == "text" for name, _ in weights):
        words = host.prompts.tokens(sentence)
        maps = attention_maps(weights, "text", len(words), side)
        traces.append(inspect.Trace(words, patch_names(side), *maps, sentence, **options))
    if memory is not None and example is not None:
        edge = round(memory.length**0.5)
        options |= {"word_grid": (edge, edge), "word_picture": enlarge(example)}
        maps = attention_maps(weights, "default", memory.length, side)
        title = f"{sentence}, in this hand"
        traces.append(inspect.Trace(patch_names(edge), patch_names(side), *maps, title, **options))
    return traces


def attention_maps(weights: Any, adapter: str, slots: int, side: int) -> tuple[Tensor, list[str]]:
    """Return weights (layers, heads, slots, places) over a square of side × side places, and the layers' names."""
    maps, names = [], []
    for index, calls in ((index, calls) for (name, index), calls in weights.items() if name == adapter):
        mean = torch.stack(calls)[:, 0].mean(0)[..., :slots].cpu()  # (heads, places, slots)
        height = round(mean.shape[1] ** 0.5)
        square = mean.transpose(1, 2).unflatten(2, (height, height))
        maps.append(F.interpolate(square, size=(side, side), mode="bilinear", align_corners=False).flatten(2))
        names.append(f"attention {index}, {height} × {height} places")
    return torch.stack(maps), names


def patch_names(side: int) -> list[str]:
    """Return the names of the patches of a square picture, row by row."""
    return [f"row {row + 1}, column {column + 1}" for row in range(side) for column in range(side)]


def enlarge(picture: Tensor) -> Image.Image:
    """Return a picture (c, height, width) from -1 to 1 for a page, its pixels as squares."""
    image = as_image(picture)
    return image.resize((256, 256), resample=0 if image.width < 256 else None)
