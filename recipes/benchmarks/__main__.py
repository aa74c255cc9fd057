"""python -m recipes.benchmarks [PART ...] [--quick]: ratios of times on the CPU; on_a_card.py is for a GPU."""

from __future__ import annotations

import argparse
import importlib
import os
import platform

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# numpy's threads would stay awake for 30 ms after a product and take a core from the next candidate.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

import torch
from transformers.utils import logging

from recipes.benchmarks.timing import Rows

#: Module and function of each part.
PARTS = {
    "core": "core.tables",
    "decoding": "decoding.tables",
    "mllama": "mllama.tables",
    "ways": "decoding.way_tables",
    "prompting": "first_token.memory_tables",
    "passages": "first_token.passage_tables",
    "denoising": "denoising.tables",
    "search": "search.tables",
    "late_interaction": "late_interaction.tables",
    "training": "training_memory.tables",
}


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--quick", action="store_true", help="few sizes, short rounds: to see that it runs")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    logging.set_verbosity_error()  # layers without their model would warn about a config they do not need
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads")
    print("Every figure is a ratio of times measured in turn, round by round; its median over the rounds.\n")
    dtypes = [getattr(torch, name) for name in options.dtype]
    for part in options.parts or PARTS:
        module, function = PARTS[part].split(".")
        tables = getattr(importlib.import_module(f"recipes.benchmarks.{module}"), function)(dtypes, options.quick)
        for title, corner, rows in tables:
            print(f"## {title}\n\n{table(corner, rows)}\n", flush=True)


def figure(value: float) -> str:
    """Format a number with two digits behind the point, three below a tenth."""
    return f"{value:,.3f}" if abs(value) < 0.0995 else f"{value:,.2f}"


def table(corner: str, rows: Rows) -> str:
    """Return rows of figures as a markdown table; cells that a row lacks are empty."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [f"| {corner} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        cells = [figure(row[column]) if column in row else "" for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
