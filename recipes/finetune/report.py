"""The table of a run with its controls, and the pictures that a UNet draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mmattn
from mmattn import training

from .data import picture_files

COLUMNS = {
    "loss": ("held-out loss", 1, ".4f", ""),
    "perplexity": ("perplexity", 1, ".2f", ""),
    "saved": ("less than the LoRA", 1, "+.4f", ""),
    "parameters": ("trained parameters", 1, ",.0f", ""),
    "seconds": ("seconds", 1, ".0f", ""),
}
NOTE = "Loss in nats per token, of a UNet the weighted squared error per picture, over rows that were never trained on."
NOTES = {
    "adapter, shuffled": "Shuffled: each row with the memory of another row.",
    "LoRA": "LoRA: as many trained parameters, the same texts.",
    "linear probe": "Right: the share of held-out texts with the right word at this place. Linear probe: a logistic "
    "regression on the mean of each memory.",
}


def table_row(name: str, loss: float, parameters: int, seconds: float, host: str) -> dict[str, Any]:
    """Return a row of the table."""
    perplexity = math.exp(min(loss, 700.0)) if host == "language" and not math.isnan(loss) else math.nan
    return {"name": name, "loss": loss, "perplexity": perplexity, "parameters": parameters, "seconds": seconds}


def with_words(rows: list[dict[str, Any]], words: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Return the rows of the table with the shares of right words, those of the linear probe in a row of its own."""
    others = [dict.fromkeys(COLUMNS) | {"name": name} for name in words if name not in {row["name"] for row in rows}]
    return [row | words.get(row["name"], {}) for row in (*rows, *others)]


def table(contents: list[dict[str, Any]]) -> str:
    """Return the table of one or several `table.json`, with the loss that each row saves over the text-only LoRA."""
    runs = []
    for content in contents:
        lora = next((row["loss"] for row in content["rows"] if row["name"].startswith("LoRA")), None)
        losses = [row["loss"] for row in content["rows"]]
        saved = [None if lora is None or loss is None else lora - loss for loss in losses]
        runs.append([{**row, "saved": one} for row, one in zip(content["rows"], saved, strict=True)])
    rows = [row for run in runs for row in run]
    words = {
        name: (f"{name} right", 100, ".0f", " %") for row in rows for name in row if name not in ("name", *COLUMNS)
    }
    columns = {n: column for n, column in (COLUMNS | words).items() if any(row.get(n) is not None for row in rows)}
    runs = [[dict.fromkeys(columns) | row for row in run] for run in runs]
    notes = [note for start, note in NOTES.items() if any(row["name"].startswith(start) for row in rows)]
    return "\n\n".join((training.spread_table("", columns, runs), " ".join((NOTE, *notes))))


def plot_pictures(path: Path, rows: Sequence[dict[str, Any]], pictures: Any) -> None:
    """Plot for each row its example, if it has one, and below it the picture that was drawn."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6 * len(rows), 3.6))
    axes = figure.subplots(2, len(rows), squeeze=False)
    for row, picture, (above, below) in zip(rows, pictures, axes.T, strict=True):
        if examples := picture_files(row):
            above.imshow(mmattn.load_image(examples[0]))
        below.imshow(picture.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=1)
        below.set_xlabel(
            (row["text"] or " ".join(source for source in row["sources"] if source not in examples))[:40], fontsize=7
        )
        for axis in (above, below):
            axis.set(xticks=[], yticks=[])
    axes[0][0].set_ylabel("example", fontsize=8)
    axes[1][0].set_ylabel("drawn", fontsize=8)
    figure.savefig(path, dpi=110, bbox_inches="tight")
