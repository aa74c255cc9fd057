"""Answers of trained adapters from indexes too large for a run: a million entries.

    python -m recipes.rag.large runs/rag-facts/seed-* [--size 1000000] [--store ivf] [--ways index hits] \
        [--query-scale 0.8]

The same held-out questions for every adapter, half of them without an answer in the index. One row for each way of
`Measure.rows` with the mean and half the range over the adapters, and the seconds that one question took. Up to a
hundred thousand entries it also tells how much of the weights of an exact search an approximate one finds.
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

from .answering import batches, load_lm
from .entries import World
from .facts import prompt
from .measure import Measure, count
from .settings import Config
from .tables import FACTS
from .train import load_entries

EXACT_UP_TO, COMPARED = 100_000, 16
#: Besides what attention finds in so many lists it always sees the entries with the best scores.
SETTINGS: dict[str, dict[str, Any]] = {"ivf": {"visited": 16}}
FURTHER = {"seconds": ("seconds a question", 1, ".2f", ""), "found": ("weights found", 100, ".1f", " %")}


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, of one setting and several seeds")
    parser.add_argument("--size", type=int, default=1_000_000, help="entries of the index")
    parser.add_argument("--store", default="ivf", help="of the index that attention searches")
    parser.add_argument("--ways", nargs="+", default=["index", "hits"], help="see Measure.rows")
    parser.add_argument("--ask", type=int, default=300, help="questions")
    parser.add_argument("--query-scale", type=float, default=1.0, help="of attention's queries; see scale_queries")
    given = parser.parse_args()
    if given.size < 5 * given.ask:
        parser.error(f"{given.ask} questions need an index of {5 * given.ask:,} entries at least: give a smaller --ask")
    config = Config.model_validate(yaml.safe_load((given.runs[0] / "config.resolved.yaml").read_text()))
    # One world for all of them, and one index of each kind.
    data = config.data.model_copy(update={"sizes": (given.size,), "ask": given.ask})
    config = config.model_copy(update={"data": data, "seed": 0})
    lm, tokenizer = load_lm(config.lm)
    _, entries, held_out = load_entries(config)
    measure = Measure(config, tokenizer, entries, held_out)
    (world,) = measure.worlds[given.size]
    index = None
    if "index" in given.ways:
        index = entries.index_of_slots(world.rows, given.store, **SETTINGS.get(given.store, {}))
    exact = None
    if index is not None and given.store != "exact" and given.size <= EXACT_UP_TO:
        exact = entries.index_of_slots(world.rows)
    runs: list[list[dict[str, Any]]] = []
    for run in given.runs:
        model = mmattn.load(lm, run / "adapter")
        scale_queries(model, given.query_scale)
        runs.append([])
        for way in given.ways:
            began = time.perf_counter()
            said = measure.answers(model, world, way, index)
            row: dict[str, Any] = {"name": f"{way}, {given.size:,} entries", **count(said), "found": None}
            row["seconds"] = (time.perf_counter() - began) / len(said)
            if way == "index" and exact is not None:
                row["found"] = share_found(measure, model, world, index, exact)
            runs[-1].append(row)
            print(run, row, flush=True)
        model.unload()
    print(training.spread_table("", FACTS | FURTHER, runs))


@torch.no_grad()
def scale_queries(model: Any, factor: float) -> None:
    """Multiply what attention adds to the scores of the search.

    The largest of n random inner products grows with the root of log n: of more entries than in training, those that
    fit no better weigh more. A factor below 1 takes that back.

    Args:
        model: with the adapter, which is changed.
        factor: of the queries of every layer.
    """
    for attention in model.attentions().values():
        attention.q_proj.weight.mul_(factor)


@torch.no_grad()
def share_found(measure: Measure, model: Any, world: World, *indexes: Any) -> float:
    """The share of the weights over what an exact index finds that lies on what an approximate one finds too.

    Args:
        indexes: the approximate one, and the exact one.
    """
    prompts = [prompt(measure.entries.facts[row]) for row in world.asked[:COMPARED]]
    weights = []
    for index in indexes:
        attended = measure.attended(world, "index", index)
        with inspect.record(model) as recorded:
            for rows, given in batches(model, measure.tokenizer, prompts, 1):
                model(**given, memory=attended(rows))
        weights.append([call for calls in recorded.values() for call in calls])
    parts = [
        (wanted * (found > 0)).sum(-1) / wanted.sum(-1).clamp(min=1e-9) for found, wanted in zip(*weights, strict=True)
    ]
    return float(torch.cat([part.flatten() for part in parts]).mean())


if __name__ == "__main__":
    main()
