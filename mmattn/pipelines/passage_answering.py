"""Questions to answers from passages that the language model itself has read: found by an index, read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from mmattn.encoders.registry import AnyTextEncoder
from mmattn.errors import ConfigError, TextError
from mmattn.inspect.trace import Trace
from mmattn.kv_store.passages import PassageCache, PassageSelection
from mmattn.pipelines.config import EncoderReference, MemoryConfig, ModelReference, PipelineConfig
from mmattn.pipelines.question_answering import QuestionAnsweringPipeline, Source
from mmattn.retrieval.index import Index

#: In the adapter's folder, keys and values of passages that were read beforehand.
FILE = "passages.safetensors"


@dataclass(frozen=True)
class FoundEntry:
    """An entry of an index whose text is a passage.

    Args:
        id: of the entry.
        text: of the entry.
        score: of the retriever.
        passage: its number in the cache.
    """

    id: Any
    text: str
    score: float
    passage: int


class PassageAnsweringPipeline(QuestionAnsweringPipeline):
    """Answers from the texts of an index, as the language model has read them.

    What lies in the adapter's folder as `passages.safetensors` was read beforehand; other texts are read when they are
    first found, and kept.

    Args:
        config: what the adapter's folder says.
        model: the adapted language model.
        tokenizer: of its host.
        folder: of the adapter.
        fingerprint: of the encoder of the index.
        index: the index, its folder or its address; or give one at each call.

    Attributes:
        passages: what the model has read, a `PassageCache`.
    """

    def __init__(
        self,
        config: PipelineConfig,
        model: Any,
        tokenizer: Any,
        folder: Path,
        fingerprint: str | None,
        index: Index | str | PathLike[str] | None = None,
    ) -> None:
        super().__init__(config, model, tokenizer, folder, fingerprint, index)
        file = Path(folder) / FILE
        if file.is_file():
            self.passages = PassageCache.load(model, file, tokenizer, mapped=True)
        else:
            self.passages = PassageCache(model, tokenizer)

    def trace(self, question: str, *, index: Any = None) -> Trace:
        """Refused: a trace leaves out slots of a memory, and passages are keys and values of every layer.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "passages have no trace: the sources of an answer say what was attended to, and "
            "mmattn.inspect.record(pipe.model) records the weights of every layer"
        )

    def make_index(self, rows: Sequence[Mapping[str, Any]]) -> Index:
        """An index of texts.

        Args:
            rows: JSON objects with "text".

        Raises:
            TextError: a row without a text.
        """
        return text_index(rows, self.encoder)

    def _memory(self, questions: list[str], index: Any) -> FoundPassages:
        assert self.config.memory is not None
        hits = self._chosen_index(index).search(list(questions), top_k=self.config.memory.top_k)
        rows: list[list[FoundEntry]] = []
        for row, real in enumerate(hits.mask.tolist()):
            texts = hits.texts[row] if hits.texts is not None else [None] * len(real)
            names = hits.ids[row] if hits.ids is not None else [None] * len(real)
            columns = zip(names, texts, hits.scores[row].tolist(), real, strict=True)
            found = [(name, text, score) for name, text, score, is_real in columns if is_real and text]
            numbers = self.passages.add([text for _, text, _ in found], progress=False) if found else []
            # The best stands last, next to the question.
            entries = [FoundEntry(*one, number) for one, number in zip(found, numbers, strict=True)][::-1]
            rows.append(entries)
        return FoundPassages(self.passages, rows)

    def _sources(self, memory: Any, row: int, weights: Sequence[float]) -> tuple[Source, ...]:
        sources: tuple[Source, ...] = memory.sources(row, weights)
        return sources


class FoundPassages(PassageSelection):
    """Passages that were found for each question, and the entries that they are.

    Args:
        passages: what the model has read.
        found: of each row the entries, in the order in which they stand.
    """

    def __init__(self, passages: PassageCache, found: Sequence[Sequence[FoundEntry]]) -> None:
        selected = passages.select([[one.passage for one in row] for row in found])
        super().__init__(passages, selected.rows)
        self.found = found

    def sources(self, row: int, weights: Sequence[float]) -> tuple[Source, ...]:
        """The entries of a row, the largest share of the attention first.

        Args:
            row: its number.
            weights: of its slots.
        """
        begin, sources = 0, []
        for one, passage in zip(self.found[row], self.rows[row], strict=True):
            end = begin + len(passage.ids)
            sources.append(Source(one.id, one.text, one.score, sum(weights[begin:end])))
            begin = end
        return tuple(sorted(sources, key=lambda source: -source.weight))


def save_passages(
    folder: str | PathLike[str],
    model: Any,
    host: ModelReference,
    encoder: EncoderReference,
    fingerprint: str | None,
    passages: PassageCache | None = None,
    *,
    top_k: int = 4,
    prompt: str = "{question}",
    generation: dict[str, Any] | None = None,
) -> PipelineConfig:
    """Write a passage adapter with what a pipeline needs, and passages that were read beforehand.

    Args:
        folder: where to.
        model: the adapted model.
        host: its language model by name.
        encoder: of the texts of the index, by name.
        fingerprint: of that encoder.
        passages: what was read.
        top_k: entries that a question attends to.
        prompt: what the text begins with; "{question}" stands for what is asked.
        generation: arguments of `generate`.
    """
    config = PipelineConfig(
        task="question-answering",
        host=host,
        encoder=encoder,
        memory=MemoryConfig(top_k=top_k, host_layer=None),
        prompt=prompt,
        generation={"max_new_tokens": 64} if generation is None else generation,
    )
    model.save_adapter(folder, encoder=fingerprint)
    config.save(folder)
    if passages is not None and len(passages):
        passages.save(Path(folder) / FILE)
    return config


def text_index(rows: Sequence[Mapping[str, Any]], encoder: AnyTextEncoder, store: str | None = None) -> Index:
    """An index of texts, for an adapter whose host reads them itself.

    Args:
        rows: JSON objects with "text", and where they have it "id".
        encoder: of the texts.
        store: as in `Index.build`.

    Raises:
        TextError: a row without a text.
    """
    for number, row in enumerate(rows):
        if not isinstance(row.get("text"), str) or not row["text"].strip():
            raise TextError(f"entry {number} has no text, which this adapter reads; got {dict(row)!r:.120}")
    ids = [row["id"] for row in rows] if rows and all("id" in row for row in rows) else None
    return Index.build([row["text"] for row in rows], encoder=encoder, ids=ids, store=store)
