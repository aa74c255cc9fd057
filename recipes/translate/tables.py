"""The table of translations, one or several seeds."""

from __future__ import annotations

from typing import Any

from mmattn import training

COLUMNS = {
    "exact": ("exactly right", 100, ".1f", " %"),
    "chrf": ("chrF", 1, ".1f", ""),
    "bleu": ("BLEU", 1, ".1f", ""),
    "parameters": ("trained parameters", 1, ",.0f", ""),
    "seconds": ("seconds of training", 1, ".0f", ""),
}


def table(tables: list[dict[str, Any]]) -> str:
    """The rows of one or several `table.json`, and what the pages of keys and values save."""
    runs = [[{"seconds": None, "parameters": None, **row} for row in one["rows"]] for one in tables]
    first = tables[0]
    lines = [training.spread_table("", COLUMNS, runs), ""]
    lines.append(f"{first['pairs']:,} pairs, {first['held_out']:,} held-out sentences, {first['steps']:,} steps.")
    for places in zip(*(one["pages"] for one in tables), strict=True):
        saved = [1 - page["paged"] / page["plain"] for page in places]
        same = "the same texts" if all(page["same"] for page in places) else "OTHER TEXTS"
        beams = f"{places[0]['beams']} beam{'s' if places[0]['beams'] > 1 else ''}"
        plain, paged = (sum(page[kind] for page in places) / len(places) / 2**20 for kind in ("plain", "paged"))
        share = training.mean_and_spread(saved, 100, ".0f", " %")
        lines.append(
            f"Keys and values of the targets, {beams}: {plain:.1f} MB in one piece, {paged:.1f} MB in pages of "
            f"{places[0]['page_size']} tokens ({share} saved), {same}."
        )
    return "\n".join(lines)
