"""Answers of trained adapters from indexes too large for a run: a million entries.

    python -m recipes.rag.large runs/rag-facts/seed-* [--size 1000000] [--store hnsw] [--ways index hits]

The same held-out questions for every adapter, half of them without an answer in the index. One row for each way of
`Measure.rows` with the mean and half the range over the adapters, and the seconds that one question took.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import yaml

import mmattn
from mmattn import training

from .answering import load_lm
from .measure import Measure, count
from .settings import Config
from .tables import FACTS
from .train import load_entries


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, of one setting and several seeds")
    parser.add_argument("--size", type=int, default=1_000_000, help="entries of the index")
    parser.add_argument("--store", default="hnsw", help="of the index that attention searches")
    parser.add_argument("--ways", nargs="+", default=["index", "hits"], help="see Measure.rows")
    parser.add_argument("--ask", type=int, default=300, help="questions")
    given = parser.parse_args()
    config = Config.model_validate(yaml.safe_load((given.runs[0] / "config.resolved.yaml").read_text()))
    data = config.data.model_copy(update={"sizes": (given.size,), "ask": given.ask})
    config = config.model_copy(update={"data": data, "seed": 0})
    lm, tokenizer = load_lm(config.lm)
    _, entries, held_out = load_entries(config)
    measure = Measure(config, tokenizer, entries, held_out)
    runs: list[list[dict[str, object]]] = []
    for run in given.runs:
        model = mmattn.load(lm, run / "adapter")
        runs.append([])
        for way in given.ways:
            began = time.perf_counter()
            (world,) = measure.worlds[given.size]
            said = measure.answers(model, world, way, given.store)
            row = {"name": f"{way}, {given.size:,} entries", **count(said)}
            row["seconds"] = (time.perf_counter() - began) / len(said)
            runs[-1].append(row)
            print(run, row, flush=True)
        model.unload()
    print(training.spread_table("", {**FACTS, "seconds": ("seconds a question", 1, ".2f", "")}, runs))


if __name__ == "__main__":
    main()
