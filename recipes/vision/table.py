"""The table over several seeds: mean ± spread (half the distance from the lowest to the highest).

python -m recipes.vision.table recipes/vision/config.yaml [key=value …] --seeds 0 1 2
"""

from __future__ import annotations

from typing import Any

from mmattn import training
from mmattn.recipes import over_seeds

from .report import HEADER
from .train import main as train

HOW = {
    "perplexity": (1, ".2f", ""),
    "bits_saved": (1, "+.2f", ""),
    "species_perplexity": (1, ".2f", ""),
    "species_accuracy": (100, ".0f", " %"),
    "attribute_accuracy": (100, ".0f", " %"),
    "parameters": (1, ",.0f", ""),
    "seconds": (1, ".0f", ""),
}
COLUMNS = {name: (head, *how) for head, (name, how) in zip(HEADER[1:], HOW.items(), strict=True)}


def aggregate(tables: list[dict[str, Any]]) -> str:
    """One markdown table from several `table.json`, and the bound."""
    text = training.spread_table(HEADER[0], COLUMNS, [table["rows"] for table in tables])
    bound = tables[0].get("bound_bits")
    if not bound:
        return text
    seeds = f"{len(tables)} seeds, mean ± half the range."
    return f"{text}\n\nlog2({tables[0]['species']} species) = {bound:.2f} bits; {seeds}"


if __name__ == "__main__":
    over_seeds(__doc__ or "", train, aggregate)
