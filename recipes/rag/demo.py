"""Questions about facts whose keys were never trained on: what `mmattn demo` does with the shipped adapter."""

from __future__ import annotations

import shlex
from pathlib import Path
from random import Random
from typing import Any

import mmattn
from mmattn import inspect, pipelines

from .facts import Fact, load_facts
from .train import some

ENTRIES, QUESTIONS = 300, 4


def build(folder: Path, pipe: Any) -> list[Fact]:
    """Make an index of held-out facts in a folder; they, and after them some that are not in it."""
    _, held = load_facts()
    facts = some(held, ENTRIES + 20, 0)
    rows = [{"title": fact.title, "value": fact.value, "text": fact.sentence} for fact in facts[:ENTRIES]]
    pipelines.build_index(rows, pipe.config, pipe.encoder).save(folder)
    return facts


def demo(run: Path) -> Path:
    """Make an index of held-out facts, ask some of them and one that is not in it, and show what was attended to."""
    folder = run / "facts"
    pipe: Any = mmattn.pipeline("assets/rag/adapter")
    facts, picks = build(folder, pipe), Random(2)
    print(f"\n{ENTRIES} facts in {folder}, whose keys the adapter was never trained on:")
    rows = [*picks.sample(range(ENTRIES), QUESTIONS - 1), picks.randrange(ENTRIES, len(facts))]
    traces = []
    for row in rows:
        answer = pipe(facts[row].question, index=folder)
        note = "" if row < ENTRIES else " (not in the index)"
        first = answer.sources[0]
        print(f"  {facts[row].question}{note} {answer.text}\n    {first.weight:4.0%} on: {first.text}")
        traces.append(pipe.trace(facts[row].question, index=folder))
    (run / "answers").mkdir(exist_ok=True)
    inspect.save_traces(traces, run / "answers")
    print("try  " + shlex.join(["mmattn", "ask", facts[rows[0]].question, "--index", str(folder)]))
    return folder
