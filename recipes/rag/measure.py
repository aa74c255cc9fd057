"""What is asked of a model with or without facts, and how its answers are counted."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch

import mmattn

from .answering import Attended, looks, trace, write_answers
from .entries import Entries, World, worlds
from .facts import UNKNOWN, prompt
from .neighbours import answer_by_neighbours, answer_states
from .settings import Config

TOLD = 6  # facts in a prompt, as the language model was trained to read them
READ_ALL = ("prompt", "knn", "all")  # ways that read every entry
LOOKS = ("index", "all", "hits")  # ways of which it is told what was attended to


class Measure:
    """Held-out questions over indexes of every size."""

    def __init__(self, config: Config, tokenizer: Any, entries: Entries, held_out: int) -> None:
        self.config, self.tokenizer, self.entries = config, tokenizer, entries
        data = config.data
        self.worlds = {size: worlds(entries, held_out, size, data.ask, config.seed) for size in data.sizes}

    def rows(self, name: str, model: Any, how: str | None, keep: Path | None = None) -> list[dict[str, Any]]:
        """One row for each size; without a memory the size says nothing, and there is one row.

        Args:
            how: None; "index" (attention searches the index), "all" (it reads all entries), "hits" (it reads those that
                the retriever found), "shuffled" (the hits of another question), "random" (any entries of the index),
                "prompt" or "knn".
        """
        rows, kept = [], []
        for size, made in self.worlds.items():
            if how in READ_ALL and size > self.config.data.small:
                continue
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
        hits = self.entries.index(world.rows).search(self.entries.questions[asked], self._view(world))
        memory = hits.memory(tokens=True)
        prompts = [prompt(self.entries.facts[row]) for row in asked]
        said = write_answers(model, self.tokenizer, prompts, memory.__getitem__)
        rows = enumerate(zip(prompts, said, strict=True))
        return [trace(model, self.tokenizer, one, answer, memory[row]) for row, (one, answer) in rows]

    def answers(
        self, model: Any, world: World, how: str | None, index: mmattn.Index | None = None
    ) -> list[dict[str, Any]]:
        """For each question of a world what was right, what was said, and what was attended to most; see `attended`."""
        entries, facts = self.entries, [self.entries.facts[row] for row in world.asked]
        prompts = [prompt(fact) for fact in facts]
        first: list[Any] = [None] * len(facts)
        if how == "knn":
            told = [entries.facts[row] for row in world.rows]
            questions, values = [prompt(fact) for fact in told], [fact.value for fact in told]
            states = answer_states(model, self.tokenizer, questions, values)
            said = answer_by_neighbours(model, self.tokenizer, prompts, *states)
        elif how == "prompt":
            found = entries.index(world.rows).search(entries.questions[world.asked], TOLD).ids
            told = [[entries.facts[row] for row in reversed(ids)] for ids in found]
            said = write_answers(model, self.tokenizer, list(map(prompt, facts, told)), None)
        else:
            attended = None if how is None else self.attended(world, how, index)
            batch = 1 if how == "all" else 32
            said = write_answers(model, self.tokenizer, prompts, attended, batch)
            if attended is not None and how in LOOKS:
                # The weights of all entries are told, for each token and head.
                batch = max(1, min(batch, 200_000 // len(world.rows)))
                first = looks(model, self.tokenizer, prompts, attended, batch)
                if how != "hits":
                    first = [world.rows[place] for place in first]
        return [
            {
                "question": fact.question,
                "right": fact.value if here else UNKNOWN,
                "said": text,
                "looked_right": None if top is None else top == row,
            }
            for fact, row, here, text, top in zip(facts, world.asked, world.present, said, first, strict=True)
        ]

    def attended(self, world: World, how: str, index: mmattn.Index | None = None) -> Attended:
        """What some questions of a world attend to.

        Args:
            how: see `rows`.
            index: what attention searches, made of the world where it is not given.
        """
        entries, asked = self.entries, world.asked
        if how == "index":
            searched = entries.index_of_slots(world.rows) if index is None else index
            queries = entries.queries(asked)
            return lambda part: searched.as_memory(self.config.data.per_query, queries=queries[part])
        if how == "all":
            slots, titles = entries.slots(world.rows), entries.titles[world.rows]
            return lambda part: mmattn.Memory(
                slots.expand(len(part), -1, -1), scores=entries.questions[[asked[one] for one in part]] @ titles.T
            )
        if how == "random":
            random = Random(self.config.seed)
            drawn = torch.tensor([random.sample(world.rows, self._view(world)) for _ in asked])
            scores = (entries.titles[drawn] @ entries.questions[asked][..., None])[..., 0]
            return mmattn.Memory(entries.slots(drawn), scores=scores).__getitem__
        memory = entries.nearest(world.rows, asked, self._view(world))
        return memory[[(row + (how == "shuffled")) % len(asked) for row in range(len(asked))]].__getitem__

    def _view(self, world: World) -> int:
        return min(self.config.data.per_query, len(world.rows))


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
