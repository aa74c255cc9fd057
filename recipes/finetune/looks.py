"""What a model attends to: shares in the metrics of training, then words to patches, passages, or a drawn example."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import mmattn
from mmattn import inspect, training

from .memories import picture_grid, shown_pictures

EXPLORED = 6
"""Rows that `mmattn explore` shows, at most."""
MEASURED = 4
"""Held-out rows whose attention is measured during the training."""


def adapter_metrics(
    model: Any, host: Any, memories: Any, held_out: Sequence[training.Row], accelerator: Any, config: Any
) -> inspect.AdapterMetrics:
    """Gates, gradients and, as often as there are evaluations, the attention of a few held-out rows."""
    rows = list(itertools.islice((row for row in held_out if row.has_memory), MEASURED))
    loss, collate = host.loss(model), host.collate(memories)

    def forward() -> None:
        # One row at a time, so that no padding attends to anything.
        training.mean_loss(model, loss, rows, 1, accelerator, collate=collate)

    return inspect.AdapterMetrics(model, forward if rows else None, config.eval_steps or config.logging_steps)


def language_traces(
    model: Any, tokenizer: Any, rows: Sequence[training.Row], texts: Sequence[str], memories: training.MemorySource
) -> list[inspect.Trace]:
    """What each word that was written attended to; none where a resampler hides the slots.

    Args:
        model: the adapted language model.
        tokenizer: its own.
        rows: each with a memory.
        texts: what was written for each of them.
        memories: of the rows.
    """
    if any(adapter.resampler is not None for adapter in model.adapters.values()):
        return []
    longest = getattr(model.config, "max_position_embeddings", None)
    collator, made = training.RowCollator(tokenizer, max_length=longest, truncation=True), []
    for row, text in zip(rows[:EXPLORED], texts, strict=False):
        # The row itself may be longer than what was written of it; its own text would not be what was attended from.
        written = training.Row(text or " ", row.prompt)
        (ids,), (start,) = collator.ids([written])
        memory = memories.of([row])
        words = [tokenizer.decode([one]) for one in ids]
        shown: dict[str, Any] = {"sources": _names(row, memory)}
        grid, pictures = picture_grid(memories), row.images or shown_pictures(row)
        # The pictures of encoded rows may be elsewhere now.
        there = len(pictures) == 1 and not (isinstance(pictures[0], str) and not Path(pictures[0]).is_file())
        if there and grid is not None and grid[0] * grid[1] == memory.length:
            shown = {"grid": grid, "picture": mmattn.load_image(pictures[0])}
        made.append(inspect.attribute(model, ids, memory, words, start=max(1, start), title=text, **shown))
    return made


def _names(row: training.Row, memory: mmattn.Memory) -> list[str]:
    """The picture or passage of each slot, which its segment counts."""
    pictures = [f"picture {number}" for number in range(1, len(row.images or shown_pictures(row)) + 1)]
    names = [*pictures, *row.passages]
    # What a saved memory holds comes after them, in segments of its own.
    return [names[one] if one < len(names) else f"memory {one - len(names) + 1}" for one in memory.segments[0].tolist()]


def unet_traces(
    painting: Any, model: Any, rows: Sequence[training.Row], memories: training.MemorySource, seed: int, steps: int = 20
) -> list[inspect.Trace]:
    """Which patches of its example each place of a drawing attended to, as the mean over the steps.

    None where a resampler hides the patches, or where the memory is not one picture in patches.

    Args:
        painting: the host with its text encoder.
        model: the adapted UNet.
        rows: each with a memory.
        memories: of the rows.
        seed: of the noise.
        steps: of DDIM.
    """
    grid, made = picture_grid(memories), []
    for row in rows[:EXPLORED]:
        memory = memories.of([row])
        if grid is None or len(row.images) != 1 or grid[0] * grid[1] != memory.length:
            continue
        with inspect.record(model) as weights:
            drawn = painting.draw(model, memory, [row.text], seed, steps)
        found = {index: calls for (owner, index), calls in weights.items() if owner == "default"}
        if not found or any(calls[0].shape[-1] < memory.length for calls in found.values()):
            continue
        side = int(painting.host.config.sample_size)
        maps, layers = _maps(found, memory.length, side)
        patches = [f"row {line + 1}, column {column + 1}" for line in range(grid[0]) for column in range(grid[1])]
        places = [f"row {line + 1}, column {column + 1}" for line in range(side) for column in range(side)]
        pictures = {"picture": _picture(drawn[0]), "word_picture": mmattn.load_image(row.images[0])}
        grids: dict[str, Any] = {"grid": (side, side), "word_grid": grid, "queries": "sources"}
        made.append(inspect.Trace(patches, places, maps, layers, row.text, **grids, **pictures))
    return made


def _maps(found: dict[int, Any], count: int, side: int) -> tuple[torch.Tensor, list[str]]:
    """Of each layer the weights (h, slots, places), over a square of side × side; and the layers' names."""
    maps, names = [], []
    for index, calls in found.items():
        seen = torch.stack([call[0] for call in calls]).float().mean(0)[..., :count]  # (h, places, slots)
        height = round(seen.shape[1] ** 0.5)
        square = seen.transpose(1, 2).unflatten(2, (height, height))
        maps.append(F.interpolate(square, size=(side, side), mode="bilinear", align_corners=False).flatten(2))
        names.append(f"attention {index}, {height} × {height} places")
    return torch.stack(maps), names


def _picture(drawn: torch.Tensor) -> Any:
    """A drawing (c, height, width) from 0 to 1, large enough to be looked at."""
    pixels = drawn.expand(3, -1, -1) if drawn.shape[0] == 1 else drawn
    image = mmattn.load_image(pixels)
    return image.resize((256, 256), resample=0) if image.width < 128 else image
