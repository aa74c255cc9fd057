"""Questions to answers: a retriever, a language model, and an adapter that attends to the hits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from mmattn.data.text_batches import bos_and_eos
from mmattn.errors import TextError
from mmattn.inspect.attribution import attribute
from mmattn.inspect.record_attention import record
from mmattn.inspect.trace import Trace
from mmattn.memory import Memory
from mmattn.pipelines.generation import generate_texts, stream_text
from mmattn.pipelines.index_pipeline import IndexPipeline, build_index
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
    """An answer, or a continuation of a text, and the entries that it attended to.

    Args:
        text: of the answer.
        sources: the entries that were attended to, the largest weight first; of an answer at its first word, where
            the rest of 1 went to "nothing here"; of a continuation the mean over all its words.
        refused: True if the answer says that nothing in the index answers.
    """

    text: str
    sources: tuple[Source, ...]
    refused: bool = False


class QuestionAnsweringPipeline(IndexPipeline):
    """Answers from the entries of an index."""

    def __call__(
        self,
        questions: str | Sequence[str],
        *,
        index: Index | str | PathLike[str] | None = None,
        batch_size: int = 32,
        **options: Any,
    ) -> Any:
        """Return the `Answer` to a question, or a list of them for a list of questions.

        Args:
            questions: one or a list.
            index: replaces the index of the pipeline in this call.
            batch_size: questions at once.
            **options: of `generate`; they override those of the adapter's folder.

        Raises:
            TextError: an empty question.
            ConfigError: there is no index, or its entries have no encoded tokens.
        """
        texts = _check_questions(questions)
        answers: list[Answer] = []
        for start in range(0, len(texts), batch_size):
            answers += self._answer(texts[start : start + batch_size], index, options)
        return answers[0] if isinstance(questions, str) else answers

    def stream(
        self, question: str, *, index: Index | str | PathLike[str] | None = None, **options: Any
    ) -> Iterator[str]:
        """Yield the answer to a question piece by piece. Arguments and errors as for a call."""
        prompt, memory = self.inputs(question, index)
        return stream_text(self.model, self.tokenizer, prompt, memory, options=self.config.generation | options)

    def trace(self, question: str, *, index: Index | str | PathLike[str] | None = None) -> Trace:
        """Return the entries that each word of the answer attended to, and its probability without them."""
        prompt, memory = self.inputs(question, index)
        (text,) = generate_texts(self.model, self.tokenizer, [prompt], memory, options=self.config.generation)
        begin, end = bos_and_eos(self.tokenizer)
        prompt_ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ids = [begin, *prompt_ids, *self.tokenizer(f" {text}", add_special_tokens=False)["input_ids"], end]
        words = [self.tokenizer.decode([token]) for token in ids]
        return attribute(self.model, ids, memory, words, start=1 + len(prompt_ids), title=f"{prompt} {text}")

    def make_index(self, rows: Sequence[Mapping[str, Any]]) -> Index:
        """Build an index of JSON objects with the fields that the adapter reads, as `build_index` does."""
        return build_index(rows, self.config, self.encoder)

    def inputs(self, question: str, index: Index | str | PathLike[str] | None = None) -> tuple[str, Any]:
        """Return the prompt of a question, and the memory (one row) of its hits."""
        (prompt,) = self._prompts(_check_questions(question))
        return prompt, self._memory([question], index)

    @torch.no_grad()
    def _answer(
        self, questions: list[str], index: Index | str | PathLike[str] | None, options: dict[str, Any]
    ) -> list[Answer]:
        memory = self._memory(questions, index)
        with record(self.model) as recorded:
            texts = generate_texts(
                self.model,
                self.tokenizer,
                self._prompts(questions),
                memory,
                batch_size=len(questions),
                options=self.config.generation | options,
            )
        # The first call of `generate` reads the prompts; its last token predicts the first word, once for each beam.
        weights = recorded.mean()[0][:, -1]
        weights = weights[:: len(weights) // len(questions)]
        return [
            Answer(text, self._sources(memory, row, weights[row].tolist()), text == self.config.refusal)
            for row, text in enumerate(texts)
        ]

    def _sources(self, memory: Any, row: int, weights: Sequence[float]) -> tuple[Source, ...]:
        """Return the entries in the slots of a row, the largest weight first."""
        entries = memory.sources[row] if memory.sources else []
        scores = memory.scores[row].tolist() if memory.scores is not None else [0.0] * len(entries)
        sources = [
            Source(entry.get("id"), entry.get("text"), score, weight)
            for entry, score, weight in zip(entries, scores, weights, strict=False)
            if entry
        ]
        return tuple(sorted(sources, key=lambda source: -source.weight))

    def _prompts(self, questions: list[str]) -> list[str]:
        return [self.config.prompt.replace("{question}", question.strip()) for question in questions]

    def _memory(self, questions: list[str], index: Index | str | PathLike[str] | None) -> Any:
        assert self.config.memory is not None
        hits = self._chosen_index(index).search(questions, top_k=self.config.memory.top_k)
        memory: Memory = hits.memory(tokens=self.config.memory.fields is not None)
        return memory.to(self.device)


def _check_questions(questions: str | Sequence[str]) -> list[str]:
    texts = check_text(questions)
    for number, question in enumerate(texts):
        if not question.strip():
            name = f"question {number}" if len(texts) > 1 else "the question"
            raise TextError(f"{name} is empty: ask something")
    return texts
