"""The third part of `mmattn demo`: questions about facts whose keys the shipped adapter was never trained on."""

from __future__ import annotations

import shlex
from pathlib import Path
from random import Random
from typing import Any

import mmattn
from mmattn import inspect, pipelines

from .territories import Fact, load_facts
from .train import some

ENTRIES, QUESTIONS = 300, 4


def build(folder: Path, pipe: Any) -> list[Fact]:
    """Save an index of held-out facts in a folder; return them, and after them some that are not in it."""
    _, held_out = load_facts()
    facts = some(held_out, ENTRIES + 20, 0)
    rows = [{"title": fact.title, "value": fact.value, "text": fact.sentence} for fact in facts[:ENTRIES]]
    pipelines.build_index(rows, pipe.config, pipe.encoder).save(folder)
    return facts


def demo(run: Path) -> Path:
    """Ask about some facts of an index and about one that is not in it, and print the entries attended to."""
    folder = run / "facts"
    pipe: Any = mmattn.pipeline("assets/rag/adapter")
    facts, random = build(folder, pipe), Random(2)
    print(f"\n{ENTRIES} facts in {folder}, whose keys the adapter was never trained on:")
    rows = [*random.sample(range(ENTRIES), QUESTIONS - 1), random.randrange(ENTRIES, len(facts))]
    for row in rows:
        answer = pipe(facts[row].question, index=folder)
        note = "" if row < ENTRIES else " (not in the index)"
        first = answer.sources[0]
        print(f"  {facts[row].question}{note} {answer.text}\n    {first.weight:4.0%} on: {first.text}")
    (run / "answers").mkdir(exist_ok=True)
    inspect.save_traces([pipe.trace(facts[row].question, index=folder) for row in rows], run / "answers")
    print("try  " + shlex.join(["mmattn", "ask", facts[rows[0]].question, "--index", str(folder)]))
    return folder
