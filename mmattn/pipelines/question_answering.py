"""Questions to answers: a retriever, a language model, and an adapter that attends to the hits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmattn.data.text_batches import bos_and_eos
from mmattn.errors import TextError
from mmattn.inspect.attribution import attribute
from mmattn.inspect.record_attention import record
from mmattn.inspect.trace import Trace
from mmattn.memory import Memory
from mmattn.pipelines.base import IndexPipeline
from mmattn.pipelines.generation import generate_texts, left_padded, prompt_rows, stream_text
from mmattn.pipelines.index_loading import build_index
from mmattn.retrieval.index import Index
from mmattn.tokenization import check_text


@dataclass(frozen=True)
class Source:
    """An entry of an index that was attended to.

    Args:
        id: of the entry.
        text: of the entry.
        score: of the retriever.
        weight: its share of the attention.
    """

    id: Any
    text: str | None
    score: float
    weight: float


@dataclass(frozen=True)
class Answer:
    """An answer, or a continuation of a text, and what it attended to.

    Args:
        text: what was written.
        sources: the entries that were attended to, the largest weight first; of an answer at its first word, where
            what is left of 1 went to "nothing here"; of a continuation the mean over all its words.
        refused: whether the answer says that nothing in the index answers.
    """

    text: str
    sources: tuple[Source, ...]
    refused: bool = False


class QuestionAnsweringPipeline(IndexPipeline):
    """Answers from the entries of an index."""

    def __call__(
        self, questions: str | Sequence[str], *, index: Any = None, batch_size: int = 32, **options: Any
    ) -> Any:
        """The `Answer` to a question, or a list of them for a list of questions.

        Args:
            questions: one or a list.
            index: answers from this index, or folder of one, instead of that of the pipeline.
            batch_size: questions at once.
            **options: of `generate`, before those of the adapter's folder.

        Raises:
            TextError: an empty question.
            ConfigError: there is no index, or its entries have no encoded tokens.
        """
        asked = self._asked(questions)
        answers: list[Answer] = []
        for start in range(0, len(asked), batch_size):
            answers += self._answer(asked[start : start + batch_size], index, options)
        return answers[0] if isinstance(questions, str) else answers

    def stream(self, question: str, *, index: Any = None, **options: Any) -> Iterator[str]:
        """The answer to a question, piece by piece.

        Args:
            question: one.
            index: as in a call.
            **options: as in a call.

        Raises:
            TextError: an empty question.
            ConfigError: as in a call.
        """
        prompt, memory = self.inputs(question, index)
        return stream_text(self.model, self.tokenizer, prompt, memory, options=self.config.generation | options)

    def trace(self, question: str, *, index: Any = None) -> Trace:
        """The answer word by word: which entries each attended to, and what it would be without them.

        Args:
            question: one.
            index: as in a call.

        Raises:
            TextError: an empty question.
            ConfigError: as in a call.
        """
        prompt, memory = self.inputs(question, index)
        (text,) = generate_texts(self.model, self.tokenizer, [prompt], memory, options=self.config.generation)
        begin, end = bos_and_eos(self.tokenizer)
        given = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ids = [begin, *given, *self.tokenizer(f" {text}", add_special_tokens=False)["input_ids"], end]
        words = [self.tokenizer.decode([one]) for one in ids]
        return attribute(self.model, ids, memory, words, start=1 + len(given), title=f"{prompt} {text}")

    def make_index(self, rows: Sequence[Mapping[str, Any]]) -> Index:
        """An index of some entries, as this pipeline answers from.

        Args:
            rows: JSON objects with what the adapter reads of an entry.

        Raises:
            TextError: a row without it.
        """
        return build_index(rows, self.config, self.encoder)

    def inputs(self, question: str, index: Any = None) -> tuple[str, Any]:
        """The prompt of a question, and the memory, of one row, of what the index holds for it.

        Args:
            question: one.
            index: as in a call.

        Raises:
            TextError: an empty question.
            ConfigError: as in a call.
        """
        (prompt,) = self._prompts(self._asked(question))
        return prompt, self._memory([question], index)

    def _answer(self, questions: list[str], index: Any, options: dict[str, Any]) -> list[Answer]:
        prompts, memory = self._prompts(questions), self._memory(questions, index)
        texts = generate_texts(
            self.model,
            self.tokenizer,
            prompts,
            memory,
            batch_size=len(prompts),
            options=self.config.generation | options,
        )
        weights = self._first_weights(prompts, memory)
        return [
            Answer(text, self._sources(memory, row, weights[row].tolist()), text == self.config.refusal)
            for row, text in enumerate(texts)
        ]

    @torch.no_grad()
    def _first_weights(self, prompts: Sequence[str], memory: Any) -> Tensor:
        """For each prompt the weights (b, m) of the slots at its last token: the mean over layers and heads."""
        ids, mask = left_padded(self.tokenizer, prompt_rows(self.tokenizer, prompts), self.device)
        with record(self.model) as weights:
            self.model(input_ids=ids, attention_mask=mask, memory=memory)
        return weights.mean()[0][:, -1].cpu()

    def _sources(self, memory: Any, row: int, weights: Sequence[float]) -> tuple[Source, ...]:
        return sources_of(memory, row, weights)

    def _asked(self, questions: str | Sequence[str]) -> list[str]:
        asked = check_text(questions)
        for number, question in enumerate(asked):
            if not question.strip():
                raise TextError(
                    f"question {number} is empty: ask something"
                    if len(asked) > 1
                    else "the question is empty: ask something"
                )
        return asked

    def _prompts(self, questions: list[str]) -> list[str]:
        return [self.config.prompt.replace("{question}", question.strip()) for question in questions]

    def _memory(self, questions: list[str], index: Any) -> Any:
        assert self.config.memory is not None
        hits = self._chosen_index(index).search(questions, top_k=self.config.memory.top_k)
        memory: Memory = hits.memory(tokens=self.config.memory.fields is not None)
        return memory.to(self.device)


def sources_of(memory: Memory, row: int, weights: Sequence[float]) -> tuple[Source, ...]:
    """The entries that the slots of a row of memory came from, the largest weight first.

    Args:
        memory: as hits give it.
        row: its number.
        weights: of the slots of the row.
    """
    named = memory.sources[row] if memory.sources else []
    scores = memory.scores[row].tolist() if memory.scores is not None else [0.0] * len(named)
    found = [
        Source(one.get("id"), one.get("text"), score, weight)
        for one, score, weight in zip(named, scores, weights, strict=False)
        if one
    ]
    return tuple(sorted(found, key=lambda source: -source.weight))
