"""What is asked of a model with or without facts, and how its answers are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mmattn

from .answering import looks, trace, write_answers
from .entries import Entries, World, worlds
from .facts import UNKNOWN, prompt
from .neighbours import answer_by_neighbours, answer_states
from .settings import Config

TOLD = 6  # facts in a prompt, as the language model was trained to read them


class Measure:
    """Held-out questions over indexes of every size."""

    def __init__(self, config: Config, tokenizer: Any, entries: Entries, held_out: int) -> None:
        self.config, self.tokenizer, self.entries = config, tokenizer, entries
        data = config.data
        self.worlds = {size: worlds(entries, held_out, size, data.ask, config.seed) for size in data.sizes}

    def rows(self, name: str, model: Any, how: str | None, keep: Path | None = None) -> list[dict[str, Any]]:
        """One row for each size; without a memory the size says nothing, and there is one row.

        Args:
            how: None, "hits", "shuffled" (the hits of another question), "prompt" or "knn".
        """
        rows, kept = [], []
        for size, made in self.worlds.items():
            said: list[dict[str, Any]] = [line for world in made for line in self.answers(model, world, how)]
            kept += [{"entries": size, **line} for line in said]
            rows.append({"name": name, "entries": size if how else None, **count(said)})
            if how is None:
                break
        if keep is not None:
            keep.write_text(json.dumps(kept, indent=1, ensure_ascii=False), encoding="utf-8")
        return rows

    def traces(self, model: Any, count: int = 6) -> list[mmattn.inspect.Trace]:
        """What the answers to some questions over the smallest index attended to."""
        world = self.worlds[min(self.worlds)][0]
        asked = world.asked[:count]
        top_k = min(self.config.data.view, len(world.rows))
        hits = self.entries.index(world.rows).search(self.entries.questions[asked], top_k)
        memory = hits.memory(tokens=True)
        prompts = [prompt(self.entries.facts[row]) for row in asked]
        said = write_answers(model, self.tokenizer, prompts, memory)
        rows = enumerate(zip(prompts, said, strict=True))
        return [trace(model, self.tokenizer, one, answer, memory[row]) for row, (one, answer) in rows]

    def answers(self, model: Any, world: World, how: str | None) -> list[dict[str, Any]]:
        """For each question of a world what was right, what was said, and what was attended to most."""
        entries, facts = self.entries, [self.entries.facts[row] for row in world.asked]
        prompts, memory, hits = [prompt(fact) for fact in facts], None, None
        if how is not None:
            top_k = TOLD if how == "prompt" else min(self.config.data.view, len(world.rows))
            hits = entries.index(world.rows).search(entries.questions[world.asked], top_k)
        if how == "prompt":
            prompts = [
                prompt(fact, [entries.facts[row] for row in reversed(found)])
                for fact, found in zip(facts, hits.ids, strict=True)
            ]
        elif how in ("hits", "shuffled"):
            memory = hits.memory(tokens=True)
            if how == "shuffled":
                memory = memory[[(row + 1) % len(facts) for row in range(len(facts))]]
        if how == "knn":
            told = [entries.facts[row] for row in world.rows]
            questions, values = [prompt(fact) for fact in told], [fact.value for fact in told]
            said = answer_by_neighbours(
                model, self.tokenizer, prompts, *answer_states(model, self.tokenizer, questions, values)
            )
        else:
            said = write_answers(model, self.tokenizer, prompts, memory)
        first: list[Any] = [None] * len(facts)
        if how == "hits":
            weights = looks(model, self.tokenizer, prompts, memory)[:, : memory.length]
            first = [memory.sources[row][slot]["id"] for row, slot in enumerate(weights.argmax(1).tolist())]
        return [
            {
                "question": fact.question,
                "right": fact.value if here else UNKNOWN,
                "said": text,
                "looked_right": None if top is None else top == row,
            }
            for fact, row, here, text, top in zip(facts, world.asked, world.present, said, first, strict=True)
        ]


def count(said: list[dict[str, Any]]) -> dict[str, float | None]:
    """Shares: answers right where there is one, first looks right, and precision and recall of "unknown"."""

    def share(part: list[dict[str, Any]], good: Any) -> float | None:
        return sum(map(good, part)) / len(part) if part else None

    answerable = [line for line in said if line["right"] != UNKNOWN]
    looked = [line for line in answerable if line["looked_right"] is not None]
    refused = [line for line in said if line["said"] == UNKNOWN]
    return {
        "accuracy": share(answerable, lambda line: line["said"] == line["right"]),
        "looked": share(looked, lambda line: line["looked_right"]),
        "precision": share(refused, lambda line: line["right"] == UNKNOWN),
        "recall": share([line for line in said if line["right"] == UNKNOWN], lambda line: line["said"] == UNKNOWN),
    }
