"""The table of answers by size of the index, beside its controls, and its plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from mmattn import training

FACTS = {
    "accuracy": ("answers right", 100, ".1f", " %"),
    "looked": ("right entry attended to most", 100, ".1f", " %"),
    "precision": ("refusals right", 100, ".1f", " %"),
    "recall": ("unanswerable refused", 100, ".1f", " %"),
}
DOCS = {
    "bits": ("bits per byte", 1, ".3f", ""),
    "against": ("against the LoRA of the same seed", 1, "+.4f", ""),
    "seconds": ("seconds of training", 1, ".0f", ""),
}


def table(contents: list[dict[str, Any]]) -> str:
    """The rows of one or several `table.json`, and what was trained."""
    facts = contents[0]["part"] == "facts"
    runs = [[{"seconds": None, **row, "name": label(row)} for row in one["rows"]] for one in contents]
    for rows in [] if facts else runs:
        lora = next(row["bits"] for row in rows if row["name"] == "LoRA, text only")
        for row in rows:
            row["against"] = row["bits"] - lora
    made = training.spread_table("", FACTS if facts else DOCS, runs)
    parameters = f"{contents[0]['parameters']:,} trained parameters"
    if not facts:
        held = f"{contents[0]['bytes']:,} bytes of held-out topics"
        if contents[0]["part"] == "tokens":
            return f"{made}\n\n{parameters}; {held}; {contents[0]['entries']:,} tokens to search."
        taken = f"{contents[0]['copies']:.1%} of the other topics were copies and are taken out"
        return f"{made}\n\n{parameters}; {held}; {taken}."
    seconds = training.mean_and_spread([one["seconds"] for one in contents], 1, ".0f", " s")
    return f"{made}\n\nadapter: {parameters}, {contents[0]['steps']} steps in {seconds}."


def label(row: dict[str, Any]) -> str:
    """A row's name with its size."""
    return row["name"] if row.get("entries") is None else f"{row['name']}, {row['entries']:,} entries"


def plot_sizes(rows: list[dict[str, Any]], path: Path) -> None:
    """Answers right by the size of the index; a dashed line for what knows no index."""
    figure, axis = plt.subplots(figsize=(5, 3.6))
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        values = [100 * row["accuracy"] for row in own]
        if own[0]["entries"] is None:
            axis.axhline(values[0], linestyle="--", linewidth=1, label=name, color=f"C{len(axis.lines)}")
        else:
            axis.plot([row["entries"] for row in own], values, marker="o", label=name, color=f"C{len(axis.lines)}")
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlabel("entries in the index")
    axis.set_ylabel("answers right, %")
    axis.set_ylim(-2, 102)
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def plot_bits(rows: list[dict[str, Any]], path: Path) -> None:
    """Bits per byte of every row but the frozen model's, which is a dashed line."""
    frozen, *others = rows
    figure, axis = plt.subplots(figsize=(7, 0.35 * len(others) + 1))
    axis.barh([row["name"] for row in others], [row["bits"] for row in others])
    axis.axvline(frozen["bits"], linestyle="--", color="grey", label=frozen["name"])
    bits = [row["bits"] for row in rows]
    axis.set_xlim(min(bits) - 0.1 * (max(bits) - min(bits)), max(bits) + 0.05 * (max(bits) - min(bits)))
    axis.invert_yaxis()
    axis.set_xlabel("bits per byte of held-out topics (the axis does not begin at 0)")
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
