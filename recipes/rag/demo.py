"""Questions about facts whose keys were never trained on: what `mmattn demo` does with the shipped adapter."""

from __future__ import annotations

import shlex
from pathlib import Path
from random import Random

import mmattn
from mmattn import inspect

from .ask import Asked
from .entries import Entries
from .facts import Fact, load_facts
from .train import some

ENTRIES, QUESTIONS = 300, 4


def build(folder: Path, cache: Path) -> list[Fact]:
    """Make an index of held-out facts in a folder; they, and after them some that are not in it."""
    _, held = load_facts()
    facts = some(held, ENTRIES + 20, 0)
    Entries.of(facts, mmattn.TextEncoder(), cache).index(range(ENTRIES)).save(folder)
    return facts


def demo(run: Path) -> Path:
    """Make an index of held-out facts, ask some of them and one that is not in it, and show what was attended to."""
    folder = run / "facts"
    facts = build(folder, run / "cache")
    asked, picks = Asked(folder), Random(2)
    print(f"\n{ENTRIES} facts in {folder}, whose keys the adapter was never trained on:")
    rows = [*picks.sample(range(ENTRIES), QUESTIONS - 1), picks.randrange(ENTRIES, len(facts))]
    traces = []
    for row in rows:
        answer, sources = asked(facts[row].question)
        note = "" if row < ENTRIES else " (not in the index)"
        print(f"  {facts[row].question}{note} {answer}\n    {sources[0].weight:4.0%} on: {sources[0].text}")
        traces.append(asked.trace(facts[row].question))
    (run / "answers").mkdir(exist_ok=True)
    inspect.save_traces(traces, run / "answers")
    print("try  " + shlex.join(["mmattn", "ask", facts[rows[0]].question, "--index", str(folder)]))
    return folder
