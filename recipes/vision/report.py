"""What a run leaves behind: the table, the losses, the captions, and what the adapter attended to."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

import mmattn
from mmattn import training

from .data import Data
from .measure import Row, named_species

COLUMNS = {
    "perplexity": ("held-out perplexity", 1, ".2f", ""),
    "bits_saved": ("bits saved per description", 1, "+.2f", ""),
    "species_perplexity": ("perplexity of the species word", 1, ".2f", ""),
    "species_accuracy": ("species right in caption", 100, ".0f", " %"),
    "attribute_accuracy": ("attributes right in caption", 100, ".0f", " %"),
    "parameters": ("trained parameters", 1, ",.0f", ""),
    "seconds": ("seconds", 1, ".0f", ""),
}


def bits_saved(row: Row, control: Row) -> float:
    """Mean over pairs of what a description costs less than under the control, in bits."""
    pairs = zip(row.nats, control.nats, strict=True)
    return sum((b - a) / math.log(2) for a, b in pairs) / len(row.nats)


def table(contents: list[dict[str, Any]]) -> str:
    """The table of one or several `table.json`, and the lines under it that say how to read it."""
    first, lines = contents[0], []
    if len(contents) > 1:
        lines.append(f"{len(contents)} seeds, mean ± half the range.")
    if first["species"] > 1:
        bound = first["bound_bits"]
        lines.append(f"log2({first['species']} species) = {bound:.2f} bits: all that the species can save.")
    lines.append(
        f"Means over {first['pairs']} pairs of one of {first['held_out_pictures']} held-out pictures and a description "
        "true of it. The descriptions were seen in training, with other pictures and by the LoRA as well."
    )
    if first["species"]:
        lines.append("Shuffled: each picture replaced by one of another species. No picture: the host's own output.")
    rows = training.spread_table("", COLUMNS, [content["rows"] for content in contents])
    return "\n".join([rows, "", *(f"- {line}" for line in lines)])


def content_of(rows: Sequence[Row], data: Data, seed: int) -> dict[str, Any]:
    """What `table.json` holds."""
    return {
        "species": len(data.species),
        "bound_bits": math.log2(len(data.species)) if data.species else None,
        "held_out_pictures": len(data.held_out),
        "pairs": len(rows[0].nats),
        "seed": seed,
        "rows": [row.figures() for row in rows],
    }


def samples(data: Data, shown: Sequence[int], captions: Sequence[str]) -> str:
    """The species of some held-out pictures, and what was said of them."""
    return "\n".join(
        f"{species_of(data, i) or 'picture ' + str(i)}: {text}" for i, text in zip(shown, captions, strict=True)
    )


def all_captions(data: Data, captions: Sequence[str]) -> list[dict[str, Any]]:
    """The caption of every held-out picture, for whoever wants to count again."""
    return [
        {
            "picture": picture.image if isinstance(picture.image, str) else i,
            "species": species_of(data, i),
            "caption": text,
        }
        for i, (picture, text) in enumerate(zip(data.held_out, captions, strict=True))
    ]


def species_of(data: Data, held_out: int) -> str | None:
    """The species on a held-out picture."""
    place = data.held_out[held_out].species
    return None if place is None else data.species[place].name


def plot_losses(path: Path, losses: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """Training losses over steps, as the metrics have them: each the mean over twenty."""
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = _figure(7, 4)
    for name, points in losses.items():
        axes.plot(*zip(*points, strict=True), label=name)
    axes.set(xlabel="step", ylabel="nats per token", yscale="log")
    # Numbers as one reads them, and more than one of them where the loss stays within a power of ten.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110, bbox_inches="tight")


@torch.no_grad()
def looked_at(model: Any, ids: torch.Tensor, memory: mmattn.Memory, spans: Sequence[slice]) -> torch.Tensor:
    """Share of attention per slot (b, m) while the tokens of each row's span were written, over blocks and heads."""
    with mmattn.inspect.record(model) as weights:
        model(input_ids=ids, memory=memory)
    (mean,) = weights.mean()
    return torch.stack([row[span].mean(0) for row, span in zip(mean, spans, strict=True)])


def picture_grid(
    path: Path,
    model: Any,
    tokenizer: Any,
    data: Data,
    held_out: mmattn.Memory,
    shown: Sequence[int],
    grid: tuple[int, int] | None,
) -> list[str]:
    """Held-out pictures, their captions, and the patches looked at while the caption was written; the captions."""
    images = [data.held_out[i].image for i in shown]
    names, species = [one.name for one in data.species], [species_of(data, i) for i in shown]
    memory = held_out[torch.tensor(list(shown))]
    return caption_grid(path, model, tokenizer, images, memory, grid, species=species, names=names)


def caption_grid(
    path: Path,
    model: Any,
    tokenizer: Any,
    images: Sequence[Any],
    memory: mmattn.Memory,
    grid: tuple[int, int] | None,
    *,
    species: Sequence[str | None],
    names: Sequence[str],
) -> list[str]:
    """Write captions of pictures and draw each picture twice: plain, and under the attention it got.

    Args:
        path: the file.
        model: the adapted language model.
        tokenizer: its tokenizer.
        images: the pictures.
        memory: a row of each.
        grid: rows and columns of their patches.
        species: what is on each; a caption that names another is marked as wrong.
        names: of all species.
    """
    from .measure import write_captions

    captions = write_captions(model, tokenizer, memory)
    rows = training.encode_texts(tokenizer, [text or " " for text in captions])
    batch = training.collate(rows)
    heat = None
    if grid is not None and grid[0] * grid[1] == memory.length and _reads_patches(model):
        spans = [slice(0, len(row) - 1) for row in rows]
        heat = looked_at(model, batch.input_ids.to(memory.device), memory, spans).view(-1, *grid)
    columns = min(4, len(images))
    lines = -(-len(images) // columns)
    figure, axes = _figure(4.4 * columns, 3.1 * lines, lines, 2 * columns)
    axes = numpy.array(axes).reshape(lines, 2 * columns)
    for ax in axes.flat:
        ax.axis("off")
    for place, (source, text, one) in enumerate(zip(images, captions, species, strict=True)):
        picture = mmattn.load_image(source)
        verdict = caption_verdict(text, one, names)
        left, right = axes[place // columns, 2 * (place % columns) : 2 * (place % columns) + 2]
        left.imshow(picture)
        lines_of_text = [*textwrap.wrap(text, 52), *([verdict] if verdict else [])]
        left.set_title(
            "\n".join(lines_of_text), fontsize=7, loc="left", color="black" if verdict is None else "#b3261e"
        )
        right.imshow(picture.convert("L"), cmap="gray")
        if heat is not None:
            edges = (0, picture.width, picture.height, 0)
            right.imshow(heat[place].cpu().numpy(), cmap="inferno", alpha=0.55, extent=edges, interpolation="bilinear")
    figure.savefig(path, dpi=110, bbox_inches="tight")
    return captions


def caption_verdict(caption: str, species: str | None, names: Sequence[str]) -> str | None:
    """What is wrong with a caption: the species that it should have named; None where it names that one alone.

    Args:
        caption: the caption.
        species: what is on the picture; None where that is not known.
        names: of all species.
    """
    if species is None or named_species(caption, names) == [species]:
        return None
    return f"✗ wrong: it is {species}"


def traces(
    model: Any, tokenizer: Any, images: Sequence[Any], captions: Sequence[str], memory: mmattn.Memory, grid: Any
) -> list[mmattn.inspect.Trace]:
    """What each word of each caption looked at; none where the adapter does not look at patches."""
    if grid is None or grid[0] * grid[1] != memory.length or not _reads_patches(model):
        return []
    made = []
    for place, (image, text) in enumerate(zip(images, captions, strict=True)):
        (ids,) = training.encode_texts(tokenizer, [text or " "])
        words = [tokenizer.decode([one]) for one in ids]
        picture = mmattn.load_image(image)
        made.append(mmattn.inspect.attribute(model, ids, memory[place], words, grid=grid, picture=picture, title=text))
    return made


def _reads_patches(model: Any) -> bool:
    return all(adapter.resampler is None for adapter in model.adapters.values())


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """A figure of its own, without pyplot's list of open windows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="tight")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns)
