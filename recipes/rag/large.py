"""Answers of trained adapters from indexes too large for a run: a million entries.

    python -m recipes.rag.large runs/rag-facts/seed-* [--size 1000000] [--store ivf] [--visited 8] \
        [--ways index hits]

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
from .data import Entries, EntrySet, embed, synthetic
from .measure import Measure, shares
from .settings import Config
from .train import FACTS, load_entries

#: Of the stores that attention searches in some of them.
LISTS = 2000
FURTHER = {"seconds": ("seconds a question", 1, ".2f", "")}


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, of one setting and several seeds")
    parser.add_argument("--size", type=int, default=1_000_000, help="entries of the index")
    parser.add_argument("--store", default="ivf", help="of the index that attention searches")
    parser.add_argument("--visited", type=int, default=8, help="lists; the best scores are always in view besides")
    parser.add_argument("--ways", nargs="+", default=["index", "hits"], help="see Measure")
    parser.add_argument("--ask", type=int, default=300, help="questions")
    parser.add_argument("--near-misses", type=int, default=0, help="further entries for each question; see there")
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
    if args.near_misses:
        add_near_misses(entries, one, args.near_misses, Path(data.cache))
    index = None
    if "index" in args.ways:
        settings = {"lists": LISTS, "visited": args.visited} if args.store in ("ivf", "ivfpq") else {}
        index = entries.index_of_slots(one.rows, args.store, **settings)
    runs: list[list[dict[str, Any]]] = []
    for run in args.runs:
        model = mmattn.load(lm, run / "adapter")
        runs.append([])
        for way in args.ways:
            start = time.perf_counter()
            answers = measure.answers(model, one, way, index)
            row: dict[str, Any] = {"name": f"{way}, {len(one.rows):,} entries", **shares(answers)}
            row["seconds"] = (time.perf_counter() - start) / len(answers)
            runs[-1].append(row)
            print(run, row, flush=True)
        model.unload()
    print(training.spread_table("", FACTS | FURTHER, runs))


def add_near_misses(entries: Entries, one: EntrySet, count: int, cache: Path) -> None:
    """Add this many near misses of each fact that is asked for; a million synthetic entries have 54."""
    facts = synthetic([entries.facts[row] for row in one.questions], count * len(one.questions), seed=1)
    assert entries.encoder is not None
    one.rows += range(len(entries.facts), len(entries.facts) + len(facts))
    entries.titles = torch.cat([entries.titles, embed(entries.encoder, [fact.title for fact in facts], cache)])
    row_of = {fact.value: row for fact, row in zip(entries.facts, entries.value_rows.tolist(), strict=True)}
    entries.value_rows = torch.cat([entries.value_rows, torch.tensor([row_of[fact.value] for fact in facts])])
    entries.facts += facts


if __name__ == "__main__":
    main()
