"""The table over several seeds: mean ± spread (half the distance from the lowest to the highest).

python recipes/vision/table.py recipes/vision/config.yaml [key=value …] --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from report import HEADER
from train import main as train

from mmattn import training
from mmattn.recipes import read_settings

COLUMNS = {
    "perplexity": (1, ".2f", ""),
    "bits_saved": (1, "+.2f", ""),
    "species_perplexity": (1, ".2f", ""),
    "species_accuracy": (100, ".0f", " %"),
    "attribute_accuracy": (100, ".0f", " %"),
    "parameters": (1, ",.0f", ""),
    "seconds": (1, ".0f", ""),
}


def cell(values: list[float | None], scale: float, form: str, unit: str) -> str:
    """Mean ± half the range.

    >>> cell([3.0, 3.2, 3.1], 1, "+.2f", "")
    '+3.10 ± 0.10'
    """
    known = [scale * value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return "–"
    mean, spread = sum(known) / len(known), (max(known) - min(known)) / 2
    about = "" if len(known) == 1 or "," in form else f" ± {spread:{form.lstrip('+')}}"
    return f"{mean:{form}}{about}{unit}"


def aggregate(tables: list[dict[str, Any]]) -> str:
    """One markdown table from several `table.json`."""
    lines = []
    for place, first in enumerate(tables[0]["rows"]):
        rows = [table["rows"][place] for table in tables]
        lines.append([first["name"], *(cell([row[name] for row in rows], *how) for name, how in COLUMNS.items())])
    return training.markdown_table(HEADER, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_intermixed_args()
    settings = read_settings(given.config, given.overrides)
    settings.pop("recipe", None)
    out = Path(settings.get("out", "runs/vision"))
    tables = []
    for seed in given.seeds:
        run = out / f"seed-{seed}"
        if not (run / "table.json").is_file():
            train({**settings, "seed": seed, "out": str(run)})
        if not (run / "table.json").is_file():
            return  # stopped by Ctrl-C; what is finished is kept and used the next time
        tables.append(json.loads((run / "table.json").read_text(encoding="utf-8")))
    bound = tables[0]["bound_bits"]
    text = aggregate(tables)
    if bound:
        text += (
            f"\n\nlog2({tables[0]['species']} species) = {bound:.2f} bits; {len(tables)} seeds, mean ± half the range."
        )
    (out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
