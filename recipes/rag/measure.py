"""Held-out questions over indexes of every size: ways to read the entries, and the shares of right answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch

import mmattn

from .answering import LONGEST, MemoryOf, most_attended, write_answers
from .data import UNKNOWN, Entries, EntrySet, Fact, entry_sets, prompt
from .settings import Config

RECORDED = ("index", "all", "hits")  # ways whose attention is measured


class Measure:
    """Measure models on the same held-out questions.

    A way of reading the entries is None; "index" (attention searches the index), "all" (attention to all entries),
    "hits" (to those of a search), "shuffled" (to the hits of another question), "random" (to any entries of the
    index), "prompt".
    """

    def __init__(self, config: Config, tokenizer: Any, entries: Entries, held_out: int) -> None:
        self.config, self.tokenizer, self.entries = config, tokenizer, entries
        data = config.data
        self.sets = {size: entry_sets(entries, held_out, size, data.ask, config.seed) for size in data.sizes}

    def rows(self, name: str, model: Any, way: str | None) -> list[dict[str, Any]]:
        """Return one row of the table for each size; a single one without a memory, when the size does not matter."""
        rows = []
        for size, sets in self.sets.items():
            if way == "all" and size > self.config.data.small:
                continue
            answers = [line for one in sets for line in self.answers(model, one, way)]
            rows.append({"name": name, "entries": None if way is None else size, **shares(answers)})
            if way is None:
                break
        return rows

    def answers(
        self, model: Any, one: EntrySet, way: str | None, index: mmattn.Index | None = None
    ) -> list[dict[str, Any]]:
        """Return for each question of a set the right and the given answer, and if the right entry has most weight."""
        facts = [self.entries.facts[row] for row in one.questions]
        prompts = [prompt(fact) for fact in facts]
        attended: list[Any] = [None] * len(facts)
        if way == "prompt":
            texts = self.from_prompts(model, one)
        else:
            memory_of = None if way is None else self.memory_of(one, way, index)
            batch = 1 if way == "all" else 32
            texts = write_answers(model, self.tokenizer, prompts, memory_of, batch)
            if memory_of is not None and way in RECORDED:
                batch = max(1, min(batch, 8_000_000 // len(one.rows)))  # the weights of all entries are recorded
                attended = most_attended(model, self.tokenizer, prompts, memory_of, batch)
                if way != "hits":
                    attended = [one.rows[place] for place in attended]
        return [
            {
                "question": fact.question,
                "right": fact.value if here else UNKNOWN,
                "answer": text,
                "attended_right": None if top is None else top == row,
            }
            for fact, row, here, text, top in zip(facts, one.questions, one.present, texts, attended, strict=True)
        ]

    def from_prompts(self, lm: Any, one: EntrySet) -> list[str]:
        """Answer without an adapter, with the best entries in the prompt."""
        entries = self.entries
        hits = entries.index(one.rows).search(entries.questions[one.questions], self.config.data.in_prompt).ids
        context = [[entries.facts[row] for row in reversed(ids)] for ids in hits]
        with_facts = [
            self.prompt_that_fits(lm, entries.facts[row], facts)
            for row, facts in zip(one.questions, context, strict=True)
        ]
        return write_answers(lm, self.tokenizer, with_facts)

    def prompt_that_fits(self, lm: Any, question: Fact, facts: Sequence[Fact]) -> str:
        """Return a question after the facts that fit the model's positions beside an answer, the best fact last."""
        text = prompt(question, facts)
        while facts and len(self.tokenizer(text).input_ids) + 1 + LONGEST > lm.config.max_position_embeddings:
            facts = facts[1:]
            text = prompt(question, facts)
        return text

    def memory_of(self, one: EntrySet, way: str, index: mmattn.Index | None = None) -> MemoryOf:
        """Return the function from numbers of questions to their memory; `index` is one of the slots of the set."""
        entries, questions = self.entries, one.questions
        if way == "index":
            searched = entries.index_of_slots(one.rows) if index is None else index
            queries = entries.queries(questions)
            return lambda part: searched.as_memory(self.config.data.per_query, queries=queries[part])
        if way == "all":
            slots, titles = entries.slots(one.rows), entries.titles[one.rows]
            return lambda part: mmattn.Memory(
                slots.expand(len(part), -1, -1), scores=entries.questions[[questions[row] for row in part]] @ titles.T
            )
        count = min(self.config.data.per_query, len(one.rows))
        if way == "random":
            random = Random(self.config.seed)
            rows = torch.tensor([random.sample(one.rows, count) for _ in questions])
            scores = (entries.titles[rows] @ entries.questions[questions][..., None])[..., 0]
            return mmattn.Memory(entries.slots(rows), scores=scores).__getitem__
        memory = entries.nearest(one.rows, questions, count)
        return memory[[(row + (way == "shuffled")) % len(questions) for row in range(len(questions))]].__getitem__


def shares(answers: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the shares of right answers and right entries, and precision and recall of "unknown"."""

    def share(part: list[Mapping[str, Any]], good: Callable[[Mapping[str, Any]], bool]) -> float | None:
        return sum(map(good, part)) / len(part) if part else None

    answerable = [line for line in answers if line["right"] != UNKNOWN]
    recorded = [line for line in answerable if line["attended_right"] is not None]
    refused = [line for line in answers if line["answer"] == UNKNOWN]
    return {
        "accuracy": share(answerable, lambda line: line["answer"] == line["right"]),
        "attended": share(recorded, lambda line: line["attended_right"]),
        "precision": share(refused, lambda line: line["right"] == UNKNOWN),
        "recall": share([line for line in answers if line["right"] == UNKNOWN], lambda line: line["answer"] == UNKNOWN),
    }
