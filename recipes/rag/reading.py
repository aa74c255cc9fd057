"""A frozen language model reads facts itself, in its chat template: in the prompt, or each read beforehand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mmattn
from mmattn import pipelines

from .answering import LONGEST
from .entries import Entries, EntrySet
from .settings import Config
from .territories import UNKNOWN
from .topics import TIMED, Asked, Question, is_right

SYSTEM = "Answer the question from the text, in a few words."
USER = '{passages}Question: {question}\nIf the text above does not say, answer "unknown".'


class Reader:
    """A language model that answers as `mmattn ask` does without an adapter, but for the words of the prompt.

    A way is "prompt", "passages" (facts read beforehand) or "closed" (neither).
    """

    def __init__(self, config: Config, lm: Any, tokenizer: Any) -> None:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]
        settings = pipelines.PipelineConfig(
            task="passage-answering",
            host=pipelines.ModelReference.of(config.lm, tokenizer),
            encoder=pipelines.EncoderReference(name="minilm"),
            memory=pipelines.MemoryConfig(top_k=config.data.in_prompt),
            prompt=tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
            generation={"max_new_tokens": LONGEST},
        )
        model = mmattn.attach(lm, mmattn.adapters.PassageAdapter()).eval()
        self.pipe = pipelines.PassageAnsweringPipeline(settings, model, tokenizer, Path(config.out))

    def answers(self, entries: Entries, one: EntrySet, way: str) -> list[str]:
        """Return the answers; one that has the right one, or "unknown", as words of its own counts as that."""
        asked, numbers, again = self.ask(entries, one, way)
        return [
            next((answer for answer in (UNKNOWN, question.answer) if is_right(answer, reply)), reply)
            for question, reply in zip(asked.questions, asked.all_replies(numbers, again), strict=True)
        ]

    def cost(self, entries: Entries, one: EntrySet, way: str) -> dict[str, float]:
        """Return the cost of a question, as `Measure.cost` does."""
        asked, numbers, again = self.ask(entries, replace(one, questions=one.questions[:TIMED]), way)
        first, speed = asked.time(numbers, again)
        passages = self.pipe.passages
        tokens = sum(len(passages.ids(number)) for row in numbers for number in row) / len(numbers)
        return {"first": first, "speed": speed, "bytes": tokens * passages.nbytes() / sum(passages.lengths)}

    def ask(self, entries: Entries, one: EntrySet, way: str) -> tuple[Asked, list[list[int]], int | None]:
        """Return the questions with their hits, the numbers of those to read, and how they are read."""
        facts = [entries.facts[row] for row in one.questions]
        self.pipe.index = entries.index(one.rows)
        asked = Asked(self.pipe, [Question("", fact.question, fact.value) for fact in facts])
        numbers = [[] for _ in facts] if way == "closed" else asked.numbers
        return asked, numbers, None if way == "prompt" else 0
