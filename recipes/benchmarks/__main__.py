"""python -m recipes.benchmarks [PART ...] [--device cuda] [--quick] [--json FILE]: ratios of times."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
from pathlib import Path

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
    "prompting": "prompting.tables",
    "passages": "passages.tables",
    "denoising": "denoising.tables",
    "search": "search.tables",
    "late_interaction": "late_interaction.tables",
    "requests": "requests.tables",
    "training": "training_memory.tables",
    "ways": "ways.tables",
}
#: Parts that run on other devices than the CPU.
ON_DEVICES = ("core", "decoding", "prompting", "passages", "denoising", "requests", "ways")


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--device", help=f"such as cuda, for {', '.join(ON_DEVICES)}")
    parser.add_argument("--beside", choices=["mllama"], help="decoding beside another implementation, same weights")
    parser.add_argument("--quick", action="store_true", help="few sizes, short rounds: to see that it runs")
    parser.add_argument("--json", type=Path, help="also write every ratio to this file")
    options = parser.parse_args()
    if options.beside and options.parts != ["decoding"]:
        parser.error("--beside belongs to the part decoding: give that part alone")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.device is not None and not set(options.parts or PARTS) <= set(ON_DEVICES):
        parser.error(f"--device belongs to the parts {', '.join(ON_DEVICES)}: name some of them")
    logging.set_verbosity_error()  # layers without their model would warn about a config they do not need
    if options.device is not None:
        torch.set_default_device(options.device)
    card = f", {torch.cuda.get_device_name()}" if torch.get_default_device().type == "cuda" else ""
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads{card}")
    print("Every figure is a ratio of times measured in turn, round by round; its median over the rounds.\n")
    dtypes = [getattr(torch, name) for name in options.dtype]
    results: dict[str, dict[str, Rows]] = {}
    for part in options.parts or PARTS:
        module, function = ["mllama", "tables"] if options.beside else PARTS[part].split(".")
        tables = getattr(importlib.import_module(f"recipes.benchmarks.{module}"), function)(dtypes, options.quick)
        results[part] = {}
        for title, corner, rows in tables:
            print(f"## {title}\n\n{table(corner, rows)}\n", flush=True)
            results[part][title] = rows
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


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
