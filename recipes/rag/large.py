"""Answers of trained adapters from indexes too large for a run: a million entries.

    python -m recipes.rag.large runs/rag-facts/seed-* [--size 1000000] [--store ivf] [--ways index hits] \
        [--query-scale 0.8]

The same held-out questions for every adapter, half of them without an answer in the index. One row for each way of
`Measure` with the mean and half the range over the adapters, and the seconds that one question took. Up to a hundred
thousand entries it also prints how much of the weights of an exact search an approximate one finds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import yaml

import mmattn
from mmattn import inspect, training

from .answering import batches_of, load_lm
from .entries import EntrySet
from .facts import prompt
from .measure import Measure, shares
from .settings import Config
from .train import FACTS, load_entries

EXACT_UP_TO, COMPARED = 100_000, 16
#: Besides the hits of attention in so many lists, the entries with the best scores are always in view.
SETTINGS: dict[str, dict[str, Any]] = {"ivf": {"visited": 16}}
FURTHER = {"seconds": ("seconds a question", 1, ".2f", ""), "found": ("weights found", 100, ".1f", " %")}


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
    index = exact = None
    if "index" in args.ways:
        index = entries.index_of_slots(one.rows, args.store, **SETTINGS.get(args.store, {}))
        if args.store != "exact" and args.size <= EXACT_UP_TO:
            exact = entries.index_of_slots(one.rows)
    runs: list[list[dict[str, Any]]] = []
    for run in args.runs:
        model = mmattn.load(lm, run / "adapter")
        scale_queries(model, args.query_scale)
        runs.append([])
        for way in args.ways:
            start = time.perf_counter()
            answers = measure.answers(model, one, way, index)
            row: dict[str, Any] = {"name": f"{way}, {args.size:,} entries", **shares(answers), "found": None}
            row["seconds"] = (time.perf_counter() - start) / len(answers)
            if way == "index" and exact is not None:
                row["found"] = share_found(measure, model, one, index, exact)
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


@torch.no_grad()
def share_found(measure: Measure, model: Any, one: EntrySet, *indexes: mmattn.Index | None) -> float:
    """Return the share of the weights over the hits of an exact index (the second) on hits of an approximate one."""
    prompts = [prompt(measure.entries.facts[row]) for row in one.questions[:COMPARED]]
    weights = []
    for index in indexes:
        memory_of = measure.memory_of(one, "index", index)
        with inspect.record(model) as recorded:
            for rows, inputs in batches_of(model, measure.tokenizer, prompts, 1):
                model(**inputs, memory=memory_of(rows))
        weights.append([call for calls in recorded.values() for call in calls])
    pairs = zip(*weights, strict=True)
    parts = [(exact * (found > 0)).sum(-1) / exact.sum(-1).clamp(min=1e-9) for found, exact in pairs]
    return float(torch.cat([part.flatten() for part in parts]).mean())


if __name__ == "__main__":
    main()
