"""Answers of trained adapters from indexes too large for a run: a million entries.

    python -m recipes.rag.large runs/rag-facts/seed-* [--size 1000000] [--store ivf] [--visited 8] \
        [--ways index hits] [--query-scale 0.8]

The same held-out questions for every adapter, half of them without an answer in the index. One row for each way of
`Measure` with the mean and half the range over the adapters, and the seconds that one question took. For "index" also
the recall of attention's own search, and with --time a token of a GPT-2 small that searches the same index.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

import mmattn
from mmattn import training

from .answering import load_lm
from .entries import Entries, EntrySet, embed
from .measure import Measure, shares
from .settings import Config
from .territories import prompt, synthetic
from .train import FACTS, load_entries

#: Of the stores that attention searches in some of them.
LISTS = 2000
RECALLED = 10  # questions whose searches are compared with all entries
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
    parser.add_argument("--time", action="store_true", help="of a token, too (with the benchmarks of the repository)")
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
    if args.near_misses:
        add_near_misses(entries, one, args.near_misses, Path(data.cache))
    index = None
    if "index" in args.ways:
        settings = {"lists": LISTS, "visited": args.visited} if args.store in ("ivf", "ivfpq") else {}
        index = entries.index_of_slots(one.rows, args.store, **settings)
        queries = entries.queries(one.questions[:RECALLED])
        if args.time:
            print(f"a token: {token_time(index, queries):.2f} of the host alone", flush=True)
    runs: list[list[dict[str, Any]]] = []
    for run in args.runs:
        model = mmattn.load(lm, run / "adapter")
        scale_queries(model, args.query_scale)
        runs.append([])
        if index is not None:
            prompts = [prompt(entries.facts[row]) for row in one.questions[:RECALLED]]
            print(
                f"recall@{config.data.per_query}: {recall(model, tokenizer, prompts, index, queries):.3f}", flush=True
            )
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
    """Add so many near misses of each fact that is asked for; among a million made-up entries it has 54."""
    facts = synthetic([entries.facts[row] for row in one.questions], count * len(one.questions), seed=1)
    assert entries.encoder is not None
    one.rows += range(len(entries.facts), len(entries.facts) + len(facts))
    entries.titles = torch.cat([entries.titles, embed(entries.encoder, [fact.title for fact in facts], cache)])
    row_of = {fact.value: row for fact, row in zip(entries.facts, entries.value_rows.tolist(), strict=True)}
    entries.value_rows = torch.cat([entries.value_rows, torch.tensor([row_of[fact.value] for fact in facts])])
    entries.facts += facts


@torch.no_grad()
def scale_queries(model: Any, factor: float) -> None:
    """Multiply what attention adds to the scores of the search.

    The largest of n random inner products grows with the root of log n: of more entries than in training, those that
    fit no better weigh more. A factor below 1 takes that back.
    """
    for attention in model.attentions().values():
        attention.q_proj.weight.mul_(factor)


@torch.no_grad()
def token_time(index: mmattn.Index, queries: torch.Tensor, seconds: float = 12.0) -> float:
    """Return the time of a token of a GPT-2 small with three adapters that search the index, over the host's alone."""
    from recipes.benchmarks.hosts import from_cache, make_host, open_gates
    from recipes.benchmarks.timing import interleaved, ratio

    torch.manual_seed(0)
    adapter = mmattn.GatedAdapter(index.dim, every=4, num_heads=8, head_dim=64, score_bias=True)
    model = mmattn.attach(make_host(torch.float32), adapter)
    open_gates(model, torch.float32)
    memory, ids = index.as_memory(queries=queries[:1]), torch.randint(5, 50_000, (1, 32))
    memories = {"alone": None, "searching": memory}
    caches = {name: model(ids, memory=one, use_cache=True).past_key_values for name, one in memories.items()}

    def token(name: str) -> None:
        model(ids[:, :1], memory=memories[name], **from_cache(model.host, caches[name]))
        caches[name].crop(-1)

    times = interleaved({name: partial(token, name) for name in memories}, seconds=seconds)
    return ratio(times, "searching", "alone")


@torch.no_grad()
def recall(model: Any, tokenizer: Any, prompts: list[str], index: mmattn.Index, queries: torch.Tensor) -> float:
    """Return the share of the best entries of every token, layer and head that the search of the index finds."""
    shares: list[torch.Tensor] = []
    for number, text in enumerate(prompts):
        memory = index.as_memory(queries=queries[number : number + 1])
        memory.entries = partial(compared, shares, memory.entries)  # type: ignore[method-assign]
        model(**tokenizer([text], return_tensors="pt"), memory=memory)
    return float(torch.stack(shares).mean())


def compared(shares: list[torch.Tensor], entries: Any, *args: Any) -> Any:
    """Return the entries of a call, whose searches note the share of the best entries that they find."""
    current = entries(*args)

    class Compared(type(current)):  # type: ignore[misc]
        def search(self, queries: torch.Tensor, count: int, score_weight: float | None = None) -> torch.Tensor:
            rows = super().search(queries, count, score_weight)
            vectors = self.version.entries.vectors
            if score_weight is not None:
                weighed = (self.queries * score_weight)[:, None].expand(-1, queries.shape[1], -1)
                queries = torch.cat([queries, weighed], 2)
            exact = (queries.flatten(0, 1) @ vectors.T).topk(min(count, len(vectors))).indices
            shares.extend(torch.isin(*pair).float().mean() for pair in zip(exact, rows.flatten(0, 1), strict=True))
            return rows

    return Compared(**vars(current))


if __name__ == "__main__":
    main()
