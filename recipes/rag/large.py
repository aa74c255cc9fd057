"""Answers of trained adapters from indexes too large for a run: a million entries.

    python -m recipes.rag.large runs/rag-facts/seed-* [--size 1000000] [--store ivf] [--ways index hits] \
        [--query-scale 0.8]

The same held-out questions for every adapter, half of them without an answer in the index. One row for each way of
`Measure` with the mean and half the range over the adapters, and the seconds that one question took.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import yaml

import mmattn
from mmattn import training

from .answering import load_lm
from .measure import Measure, shares
from .settings import Config
from .train import FACTS, load_entries

#: Besides the hits of attention in so many lists, the entries with the best scores are always in view.
SETTINGS: dict[str, dict[str, Any]] = {"ivf": {"visited": 16}}
FURTHER = {"seconds": ("seconds a question", 1, ".2f", "")}


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, of one setting and several seeds")
    parser.add_argument("--size", type=int, default=1_000_000, help="entries of the index")
    parser.add_argument("--store", default="ivf", help="of the index that attention searches")
    parser.add_argument("--ways", nargs="+", default=["index", "hits"], help="see Measure")
    parser.add_argument("--ask", type=int, default=300, help="questions")
    parser.add_argument("--query-scale", type=float, default=1.0, help="of attention's queries; see scale_queries")
    args = parser.parse_args()
    if args.size < 5 * args.ask:
        parser.error(f"{args.ask} questions need an index of {5 * args.ask:,} entries at least: give a smaller --ask")
    config = Config.model_validate(yaml.safe_load((args.runs[0] / "config.resolved.yaml").read_text()))
    data = config.data.model_copy(update={"sizes": (args.size,), "ask": args.ask})
    config = config.model_copy(update={"data": data, "seed": 0})
    lm, tokenizer = load_lm(config.lm)
    _, entries, held_out = load_entries(config)
    measure = Measure(config, tokenizer, entries, held_out)
    (one,) = measure.sets[args.size]
    index = None
    if "index" in args.ways:
        index = entries.index_of_slots(one.rows, args.store, **SETTINGS.get(args.store, {}))
    runs: list[list[dict[str, Any]]] = []
    for run in args.runs:
        model = mmattn.load(lm, run / "adapter")
        scale_queries(model, args.query_scale)
        runs.append([])
        for way in args.ways:
            start = time.perf_counter()
            answers = measure.answers(model, one, way, index)
            row: dict[str, Any] = {"name": f"{way}, {args.size:,} entries", **shares(answers)}
            row["seconds"] = (time.perf_counter() - start) / len(answers)
            runs[-1].append(row)
            print(run, row, flush=True)
        model.unload()
    print(training.spread_table("", FACTS | FURTHER, runs))


@torch.no_grad()
def scale_queries(model: Any, factor: float) -> None:
    """Multiply what attention adds to the scores of the search.

    The largest of n random inner products grows with the root of log n: of more entries than in training, those that
    fit no better weigh more. A factor below 1 takes that back.
    """
    for attention in model.attentions().values():
        attention.q_proj.weight.mul_(factor)


if __name__ == "__main__":
    main()
