"""Questions to answers from the entries of an index, and indexes built of JSON lines with the fields of an adapter."""

from __future__ import annotations

import codecs
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmattn.data.text_batches import bos_and_eos
from mmattn.encoders import text as encoders
from mmattn.encoders.base import TextEncoderBase
from mmattn.errors import AdapterFileError, ConfigError, TextError, check_int
from mmattn.inspect.attention import attribute, record
from mmattn.inspect.trace import Trace
from mmattn.memory import Memory
from mmattn.pipelines.base import Pipeline
from mmattn.pipelines.build import check_encoder, resolve
from mmattn.pipelines.config import PipelineConfig
from mmattn.pipelines.generation import Prompt
from mmattn.retrieval.entries import Id
from mmattn.retrieval.index import Index
from mmattn.storage.files import open_regular
from mmattn.storage.json_files import MAX_JSON, parse_json
from mmattn.tokenization import check_text, tokenize

if TYPE_CHECKING:
    from os import PathLike

    from mmattn.pipelines.base import IndexSource
    from mmattn.retrieval.hits import Hits

_FORMAT = "an index for an adapter is made of JSON objects, one on each line"


@dataclass(frozen=True)
class Source:
    """An entry of an index that was attended to.

    Args:
        id: of the entry.
        text: of the entry.
        score: of the retriever.
        weight: its share of the attention.
    """

    id: Id | None
    text: str | None
    score: float
    weight: float


@dataclass(frozen=True)
class Answer:
    """An answer and the entries that it attended to.

    Args:
        text: of the answer.
        sources: the entries that were attended to at its first word, the largest weight first, passages in the order of
            the search; the rest of 1 went to "nothing here".
        refused: True if the answer says that nothing in the index answers.
    """

    text: str
    sources: tuple[Source, ...]
    refused: bool = False


class QuestionAnsweringPipeline(Pipeline):
    """Answers from the entries of an index: that of the pipeline, or the index given at a call."""

    def _set_up(self, index: IndexSource | None) -> None:
        self.encoder = load_text_encoder(self.config, self.folder, self.device)
        self.index = None if index is None else self._load_index(index)

    def _load_index(self, index: IndexSource) -> Index:
        loaded = index if isinstance(index, Index) else Index.open(index, encoder=self.encoder)
        assert self.config.memory is not None
        if self.config.memory.fields and len(loaded) and not loaded.has_tokens:
            fields = " and ".join(self.config.memory.fields)
            raise ConfigError(
                f"the entries of {index} have no encoded tokens. Build one of JSON lines with {fields}: "
                f"mmattn index build FILE -o DIR --for {shlex.quote(str(self.folder))}"
            )
        return loaded

    def _chosen_index(self, index: IndexSource | None) -> Index:
        """Return the index of a call, or that of the pipeline."""
        chosen = self.index if index is None else self._load_index(index)
        if chosen is None:
            raise ConfigError(
                f"{str(self.folder)!r} answers from an index, and there is none: give index=, such as that of its run, "
                "or build one with mmattn index build"
            )
        return chosen

    def __call__(
        self,
        questions: str | Sequence[str],
        *,
        index: IndexSource | None = None,
        passages: int | None = None,
        batch_size: int = 32,
        **options: object,
    ) -> Answer | list[Answer]:
        """Return the `Answer` to a question, or a list of them for a list of questions.

        Args:
            questions: one or a list.
            index: replaces the index of the pipeline in this call.
            passages: how many entries each question attends to; by default `top_k` and `margin` of the folder decide.
            batch_size: questions at once.
            **options: of `generate`; they override those of the adapter's folder.

        Raises:
            TextError: an empty question.
            ConfigError: there is no index, its entries have no encoded tokens, or `passages` is below 1.
        """
        texts = _check_questions(questions)
        answers: list[Answer] = []
        for start in range(0, len(texts), batch_size):
            answers += self._answer(texts[start : start + batch_size], index, passages, options)
        return answers[0] if isinstance(questions, str) else answers

    def stream(
        self, question: str, *, index: IndexSource | None = None, passages: int | None = None, **options: object
    ) -> Iterator[str]:
        """Yield the answer to a question piece by piece. Arguments and errors as for a call."""
        return self._stream(*self.inputs(question, index, passages), options)

    def trace(self, question: str, *, index: IndexSource | None = None) -> Trace:
        """Return the entries that each word of the answer attended to, and its probability without them."""
        prompt, memory = self.inputs(question, index)
        assert isinstance(prompt, str)
        (text,) = self._generate([prompt], memory, 1, {})
        begin, end = bos_and_eos(self.tokenizer)
        (prompt_ids, text_ids), _ = tokenize(self.tokenizer, [prompt, f" {text}"])
        ids = [begin, *prompt_ids, *text_ids, end]
        words = [self.tokenizer.decode([token]) for token in ids]
        return attribute(self.model, ids, memory, words, start=1 + len(prompt_ids), title=f"{prompt} {text}")

    def inputs(
        self, question: str, index: IndexSource | None = None, passages: int | None = None
    ) -> tuple[Prompt, Any]:
        """Return the prompt of a question, and the memory (one row) of its hits."""
        (question,) = _check_questions(question)
        return self.make_prompt(question), self.make_memory([question], index, passages)

    @torch.no_grad()
    def _answer(
        self, questions: list[str], index: IndexSource | None, passages: int | None, options: Mapping[str, object]
    ) -> list[Answer]:
        memory = self.make_memory(questions, index, passages)
        with record(self.model) as recorded:
            texts = self._generate(list(map(self.make_prompt, questions)), memory, len(questions), options)
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

    def make_prompt(self, text: str = "") -> Prompt:
        """Return the prompt of a question."""
        return self.config.prompt.replace("{question}", text.strip())

    def make_memory(self, questions: list[str], index: IndexSource | None = None, passages: int | None = None) -> Any:
        """Return the memory of the hits of questions."""
        assert self.config.memory is not None
        hits = self._hits(questions, index, passages)
        return hits.memory(tokens=self.config.memory.fields is not None).to(self.device)

    def _hits(self, questions: list[str], index: IndexSource | None, passages: int | None) -> Hits:
        """Return the entries that questions attend to."""
        assert self.config.memory is not None
        top_k = self.config.memory.top_k if passages is None else check_int("passages", passages)
        hits = self._chosen_index(index).search(questions, top_k)
        margin = self.config.memory.margin if passages is None else None
        return hits if margin is None else hits.near_best(margin)


def _check_questions(questions: str | Sequence[str]) -> list[str]:
    texts = check_text(questions)
    for number, question in enumerate(texts):
        if not question.strip():
            name = f"question {number}" if len(texts) > 1 else "the question"
            raise TextError(f"{name} is empty: ask something")
    return texts


def load_text_encoder(
    config: PipelineConfig, folder: Path, device: torch.device | str | None = None
) -> TextEncoderBase:
    """Load the encoder of the texts of an index; another encoder than that of the training raises."""
    reference = config.encoder
    assert reference is not None
    encoder = encoders.load_text_encoder(resolve(reference.name, folder), reference.pooling, device)
    check_encoder(encoder, reference.name, folder)
    return encoder


def read_entries(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Read the JSON objects of a file, one on each line; blank lines are left out.

    Args:
        path: of the file, in UTF-8.

    Raises:
        TextError: a line that is no JSON object, or no line at all.
        AdapterFileError: no such file.
    """
    rows: list[dict[str, Any]] = []
    with open_regular(path) as (file, _):
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = parse_json(f"line {number} of {str(path)!r}", line.removeprefix(codecs.BOM_UTF8), MAX_JSON)
            except AdapterFileError as error:
                raise TextError(f"{error}; {_FORMAT}") from error
            if not isinstance(row, dict):
                raise TextError(f"line {number} of {str(path)!r} must be a JSON object, got {row!r:.60}")
            rows.append(row)
    if not rows:
        raise TextError(f"{str(path)!r} has no entries; {_FORMAT}")
    return rows


def build_index(
    rows: Iterable[Mapping[str, object]],
    config: PipelineConfig,
    encoder: TextEncoderBase,
    *,
    store: str | None = None,
    progress: bool = False,
) -> Index:
    """Build an index for an adapter: searched by the first field, with the vectors of all fields as one token.

    For an adapter whose host reads the texts ("passage-answering"), it is an index of the field "text".

    Args:
        rows: JSON objects with the fields that the adapter reads, and optionally "id" and "text".
        config: settings in the folder of the adapter.
        encoder: of the texts.
        store: as in `Index.build`.
        progress: show a bar.

    Raises:
        ConfigError: the adapter reads no fields.
        TextError: a row without one of them.
    """
    entries: list[Any] = list(rows)
    ids = [row["id"] for row in entries] if entries and all("id" in row for row in entries) else None
    if config.task == "passage-answering":
        return Index.build(_texts_of(entries, "text"), encoder=encoder, ids=ids, store=store)
    if config.memory is None or config.memory.fields is None:
        raise ConfigError(
            f"an adapter for {config.task} reads no entries made of fields: build an index without --for, or use that "
            "of its run"
        )
    fields = config.memory.fields
    columns = [_texts_of(entries, field) for field in fields]
    vectors = [_encode_unique(encoder, texts, progress) for texts in columns]
    template = config.memory.text or ": ".join(f"{{{field}}}" for field in fields)
    texts = [template.format_map(row) if row.get("text") in (None, "") else row["text"] for row in entries]
    tokens = Memory(torch.cat(vectors, -1)[:, None]) if entries else None
    return Index.build(vectors[0] if entries else [], encoder=encoder, ids=ids, texts=texts, tokens=tokens, store=store)


def _texts_of(entries: Sequence[Mapping[str, object]], field: str) -> list[str]:
    """Return the text of a field of each entry."""
    texts = []
    for number, row in enumerate(entries):
        text = row.get(field)
        if not isinstance(text, str) or not text.strip():
            raise TextError(f"entry {number} has no {field}, which this adapter reads; got {dict(row)!r:.120}")
        texts.append(text)
    return texts


def _encode_unique(encoder: TextEncoderBase, texts: list[str], progress: bool) -> Tensor:
    """Return vectors (n, e) of n texts; equal texts are encoded once."""
    unique = list(dict.fromkeys(texts))
    number = {text: row for row, text in enumerate(unique)}
    encode = getattr(encoder, "encode_document", encoder.encode)
    vectors = encode(unique, batch_size=128, progress=progress).tokens[:, 0]
    return vectors[[number[text] for text in texts]].cpu()
