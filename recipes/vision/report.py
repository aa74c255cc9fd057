"""The files of a run: table, captions, pictures with the attention to their patches."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

import mmattn
from mmattn import inspect, training

from .data import Data
from .measure import Row, named_species, write_captions

COLUMNS = {
    "perplexity": ("held-out perplexity", 1, ".2f", ""),
    "bits_saved": ("bits saved per description", 1, "+.2f", ""),
    "species_perplexity": ("perplexity of the species word", 1, ".2f", ""),
    "species_accuracy": ("species right in caption", 100, ".0f", " %"),
    "attribute_accuracy": ("attributes right in caption", 100, ".0f", " %"),
    "parameters": ("trained parameters", 1, ",.0f", ""),
    "seconds": ("seconds", 1, ".0f", ""),
}


def table_content(rows: Sequence[Row], data: Data, seed: int) -> dict[str, Any]:
    """Return the content of `table.json`."""
    return {
        "species": len(data.species),
        "bound_bits": math.log2(len(data.species)),
        "held_out_pictures": len(data.held_out),
        "pairs": len(rows[0].nats),
        "seed": seed,
        "rows": [{name: value for name, value in vars(row).items() if name != "nats"} for row in rows],
    }


def table(contents: list[dict[str, Any]]) -> str:
    """Return the table of one or several `table.json`, with notes on how to read it."""
    first, lines = contents[0], []
    if len(contents) > 1:
        lines.append(f"{len(contents)} seeds, mean ± half the range.")
    if first["species"] > 1:
        bound = first["bound_bits"]
        lines.append(f"log2({first['species']} species) = {bound:.2f} bits: all that the species can save.")
    lines.append(
        f"Means over {first['pairs']} pairs of one of {first['held_out_pictures']} held-out pictures and a description "
        "of its species. The descriptions were seen in training, with other pictures and by the LoRA as well."
    )
    lines.append("Shuffled: each picture replaced by one of another species. No picture: the host's own output.")
    rows = training.spread_table("", COLUMNS, [content["rows"] for content in contents])
    return "\n".join([rows, "", *(f"- {line}" for line in lines)])


def save_captions(
    run: training.RunFolder,
    model: Any,
    tokenizer: Any,
    data: Data,
    memory: mmattn.Memory,
    captions: Sequence[str],
    samples: Sequence[int],
    grid: tuple[int, int] | None,
    *,
    traces: int,
) -> None:
    """Write all captions, pictures of some, and the attention of each word of a few to the patches."""
    pictures = [data.held_out[i].image for i in samples]
    names = [species_of(data, i) for i in samples]
    species = [one.name for one in data.species]
    draw_captions(
        run.path / "captions.png", model, tokenizer, pictures, memory[torch.tensor(samples)], grid,
        species=names, names=species,
    )  # fmt: skip
    run.write_text("samples_after.txt", name_captions(data, samples, [captions[i] for i in samples]))
    lines = []
    for i, (picture, caption) in enumerate(zip(data.held_out, captions, strict=True)):
        image = picture.image if isinstance(picture.image, str) else i
        lines.append({"picture": image, "species": species_of(data, i), "caption": caption})
    run.write_json("captions.json", lines)
    if _attends_to_patches(model, memory, grid):
        recorded = []
        for i in samples[:traces]:
            (ids,) = training.encode_texts(tokenizer, [captions[i] or " "])
            words = [tokenizer.decode([one]) for one in ids]
            picture = mmattn.load_image(data.held_out[i].image)
            recorded.append(
                inspect.attribute(model, ids, memory[i], words, grid=grid, picture=picture, title=captions[i])
            )
        inspect.save_traces(recorded, run.path)


def name_captions(data: Data, samples: Sequence[int], captions: Sequence[str]) -> str:
    """Return a line "species: caption" for each of some held-out pictures."""
    return "\n".join(f"{species_of(data, i)}: {text}" for i, text in zip(samples, captions, strict=True))


def species_of(data: Data, held_out: int) -> str:
    """Return the species of a held-out picture."""
    return data.species[data.held_out[held_out].species].name


def draw_captions(
    path: Path,
    model: Any,
    tokenizer: Any,
    images: Sequence[Any],
    memory: mmattn.Memory,
    grid: tuple[int, int] | None,
    *,
    species: Sequence[str],
    names: Sequence[str],
) -> list[str]:
    """Caption pictures and draw each twice, plain and under the attention to its patches.

    Args:
        path: the file.
        model: the adapted language model.
        tokenizer: its tokenizer.
        images: the pictures.
        memory: a row for each.
        grid: rows and columns of their patches.
        species: of each picture; captions that name another one are marked as wrong.
        names: of all species.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    captions = write_captions(model, tokenizer, memory)
    heat = attention_to_patches(model, tokenizer, captions, memory, grid)
    columns = min(4, len(images))
    lines = -(-len(images) // columns)
    figure = Figure(figsize=(4.4 * columns, 3.1 * lines), layout="tight")
    FigureCanvasAgg(figure)
    axes = numpy.array(figure.subplots(lines, 2 * columns)).reshape(lines, 2 * columns)
    for ax in axes.flat:
        ax.axis("off")
    for place, (source, caption, name) in enumerate(zip(images, captions, species, strict=True)):
        picture = mmattn.load_image(source)
        verdict = caption_verdict(caption, name, names)
        left, right = axes[place // columns, 2 * (place % columns) : 2 * (place % columns) + 2]
        title = "\n".join([*textwrap.wrap(caption, 52), *([verdict] if verdict else [])])
        left.set_title(title, fontsize=7, loc="left", color="#b3261e" if verdict else "black")
        left.imshow(picture)
        right.imshow(picture.convert("L"), cmap="gray")
        if heat is not None:
            extent = (0, picture.width, picture.height, 0)
            right.imshow(heat[place].cpu().numpy(), cmap="inferno", alpha=0.55, extent=extent, interpolation="bilinear")
    figure.savefig(path, dpi=110, bbox_inches="tight")
    return captions


@torch.no_grad()
def attention_to_patches(
    model: Any, tokenizer: Any, captions: Sequence[str], memory: mmattn.Memory, grid: tuple[int, int] | None
) -> torch.Tensor | None:
    """Return the attention (b, rows, columns) to patches, the mean over layers, heads and the caption's tokens."""
    if not _attends_to_patches(model, memory, grid):
        return None
    rows = training.encode_texts(tokenizer, [caption or " " for caption in captions])
    with inspect.record(model) as weights:
        model(input_ids=training.collate(rows).input_ids.to(memory.device), memory=memory)
    (mean,) = weights.mean()
    return torch.stack([one[: len(ids) - 1].mean(0) for one, ids in zip(mean, rows, strict=True)]).view(-1, *grid)


def caption_verdict(caption: str, species: str, names: Sequence[str]) -> str | None:
    """Return None if a caption names the species and no other, else a line that says so."""
    return None if named_species(caption, names) == [species] else f"✗ wrong: it is {species}"


def _attends_to_patches(model: Any, memory: mmattn.Memory, grid: tuple[int, int] | None) -> bool:
    """Return True unless a resampler or a pooled encoder hides the patches."""
    resampled = any(adapter.resampler is not None for adapter in model.adapters.values())
    return grid is not None and grid[0] * grid[1] == memory.length and not resampled
