"""The table of a run, and its captions with the attention of each word to the patches."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from transformers import PreTrainedTokenizerBase

import mmattn
from mmattn import inspect, training

from .measure import named_species

COLUMNS = {
    "perplexity": ("held-out perplexity", 1, ".2f", ""),
    "bits_saved": ("bits saved per description", 1, "+.2f", ""),
    "species_perplexity": ("perplexity of the species word", 1, ".2f", ""),
    "species_accuracy": ("species right in caption", 100, ".0f", " %"),
    "attribute_accuracy": ("attributes right in caption", 100, ".0f", " %"),
    "parameters": ("trained parameters", 1, ",.0f", ""),
    "seconds": ("seconds", 1, ".0f", ""),
}


def table(contents: list[dict[str, Any]]) -> str:
    """Return the table of one or several `table.json`, with notes on how to read it."""
    first, notes = contents[0], []
    if len(contents) > 1:
        notes.append(f"{len(contents)} seeds, mean ± half the range.")
    notes += [
        f"log2({first['species']} species) = {first['bound_bits']:.2f} bits: all that the species can save.",
        f"Means over {first['pairs']} pairs of one of {first['held_out_pictures']} held-out pictures and a description "
        "of its species. The descriptions were seen in training, with other pictures and by the LoRA as well.",
        "Shuffled: each picture replaced by one of another species. No picture: the host's own output.",
    ]
    rows = training.spread_table("", COLUMNS, [content["rows"] for content in contents])
    return "\n".join([rows, "", *(f"- {note}" for note in notes)])


def trace_captions(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    images: Sequence[Any],
    memory: mmattn.Memory,
    captions: Sequence[str],
    grid: tuple[int, int] | None,
) -> list[inspect.Trace]:
    """Return the attention of each word of the captions to the patches; nothing if the encoder has no patches."""
    if grid is None or grid[0] * grid[1] != memory.length:
        return []
    traces = []
    rows = training.encode_texts(tokenizer, [caption or " " for caption in captions])
    for number, (image, ids) in enumerate(zip(images, rows, strict=True)):
        words = [tokenizer.decode([token]) for token in ids]
        picture, title = mmattn.load_image(image), captions[number]
        traces.append(inspect.attribute(model, ids, memory[number], words, grid=grid, picture=picture, title=title))
    return traces


def draw_captions(
    path: Path,
    images: Sequence[Any],
    captions: Sequence[str],
    traces: Sequence[inspect.Trace],
    species: Sequence[str],
    names: Sequence[str],
) -> None:
    """Draw pictures with their captions, beside them the attention to the patches; wrong species are marked."""
    from matplotlib.figure import Figure

    columns = min(4, len(images))
    lines = -(-len(images) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.1 * lines), layout="tight")
    axes = numpy.array(figure.subplots(lines, 2 * columns)).reshape(lines * columns, 2)
    for ax in axes.flat:
        ax.axis("off")
    for place, (image, caption, name) in enumerate(zip(images, captions, species, strict=True)):
        left, right = axes[place]
        picture, wrong = mmattn.load_image(image), named_species(caption, names) != [name]
        title = "\n".join([*textwrap.wrap(caption, 52), *([f"✗ wrong: it is {name}"] if wrong else [])])
        left.set_title(title, fontsize=7, loc="left", color="#b3261e" if wrong else "black")
        left.imshow(picture)
        right.imshow(picture.convert("L"), cmap="gray")
        if traces:
            heat = traces[place].mean().mean(0).view(traces[place].grid).numpy()
            extent = (0, picture.width, picture.height, 0)
            right.imshow(heat, cmap="inferno", alpha=0.55, extent=extent, interpolation="bilinear")
    figure.savefig(path, dpi=110, bbox_inches="tight")
