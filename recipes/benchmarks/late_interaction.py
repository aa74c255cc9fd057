"""MaxSim over the token states of MiniLM beside its one vector, on real text: recall, time and bytes.

    python -m recipes.benchmarks late_interaction [--quick]

Two tasks, each with one right entry:

- sentences: a sentence of Python's own documentation (`pydoc_data`) finds its paragraph, from which it was removed,
  among all paragraphs (the inverse cloze task, arXiv 1906.00300);
- facts: "What is the currency of Inde?" finds "The currency of Inde is Indian Rupee." among facts of 140 languages.

The one vector finds 10, 50 or 200 hits, and MaxSim ranks them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

import torch

import mmattn
from mmattn.retrieval import Hits
from recipes.benchmarks.timing import Tables, interleaved, ratio
from recipes.rag.data import load_facts
from recipes.rag.documents import load_topics, paragraphs

TOP, QUERIES = 10, 500
CANDIDATES = (10, 50, 200)

Task = tuple[list[str], list[str], list[int]]


def sentences(count: int, seed: int = 0) -> Task:
    """Return paragraphs, the sentences removed from some of them, and the paragraph of each sentence."""
    random = Random(seed)
    texts = [
        " ".join(part.split()) for topics in load_topics() for text in topics.values() for part in paragraphs(text)
    ]
    texts = list(dict.fromkeys(text for text in texts if len(text) > 40))
    parts = {row: re.split(r"(?<=[.!?])\s+", text) for row, text in enumerate(texts)}
    rows = random.sample([row for row, part in parts.items() if len(part) > 1], count)
    queries = []
    for row in rows:
        queries.append(parts[row].pop(random.randrange(len(parts[row]))))
        texts[row] = " ".join(parts[row])
    return texts, queries, rows


def facts(count: int, seed: int = 0) -> Task:
    """Return facts of the held-out languages, questions, and the fact that answers each."""
    held = load_facts()[1]
    rows = Random(seed).sample(range(len(held)), count)
    return [fact.sentence for fact in held], [held[row].question for row in rows], rows


def measure(task: str, count: int = QUERIES, seconds: float = 20.0) -> dict[str, dict[str, float]]:
    """Return the recall with and without reranking, and times for each unit of the one vector's."""
    texts, queries, right = {"sentences": sentences, "facts": facts}[task](count)
    pooled, states = mmattn.TextEncoder(), mmattn.TextEncoder(pooling="none")
    memory = states.encode(texts)
    index = mmattn.Index.build(texts, encoder=pooled, tokens=memory)
    hits = index.search(queries, max(CANDIDATES))
    rows = {"one vector": _recall(hits.first(TOP), right)}
    ways = {"one vector": lambda: index.search(queries[:1], TOP)}
    for limit in CANDIDATES:
        name = f"MaxSim of {limit} hits"
        rows[name] = _recall(hits.first(limit).rerank(queries, states).first(TOP), right)
        ways[name] = lambda limit=limit: index.search(queries[:1], limit).rerank(queries[:1], states)
    times = interleaved(ways, seconds=seconds)
    for name in times:
        rows[name]["time of a search"] = ratio(times, name, "one vector")
    rows["one vector"]["bytes of an entry"] = 4.0 * index.dim
    rows[f"MaxSim of {TOP} hits"]["bytes of an entry"] = 4.0 * index.dim * (1 + sum(memory.lengths) / len(index))
    rows["one vector"]["entries"] = float(len(index))
    return rows


def _recall(hits: Hits, right: Sequence[int]) -> dict[str, float]:
    pairs = list(zip(hits.ids or (), right, strict=True))
    return {f"recall@{k}": sum(row in ids[:k] for ids, row in pairs) / len(pairs) for k in (1, TOP)}


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield MaxSim over token states, beside the one vector of the same network."""
    for task in ("sentences", "facts"):
        rows = measure(task, *((20, 1.0) if quick else ()))
        yield f"Late interaction, {task}: MiniLM's token states beside its one vector", "search", rows
