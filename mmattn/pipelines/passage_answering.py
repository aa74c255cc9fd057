"""Questions to answers from passages that the language model itself has read: found by an index, read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from mmattn.errors import ConfigError
from mmattn.hosts.base import AdaptedModel
from mmattn.inspect.trace import Trace
from mmattn.kv_store.passages import PassageCache, PassageSelection
from mmattn.pipelines.config import EncoderReference, MemoryConfig, ModelReference, PipelineConfig, Settings
from mmattn.pipelines.question_answering import QuestionAnsweringPipeline, Source

if TYPE_CHECKING:
    from mmattn.pipelines.base import IndexSource

#: Keys and values of passages that were read beforehand, in the folder of the adapter.
FILE = "passages.safetensors"


class _PassageHits(PassageSelection):
    """Selected passages with the sources of each row, their weights still 0."""

    def __init__(self, passages: PassageCache, numbers: list[list[int]], sources: list[list[Source]]) -> None:
        chosen = passages.select(numbers)
        super().__init__(chosen.check, chosen.capture, chosen.rows)
        self.sources = sources


class PassageAnsweringPipeline(QuestionAnsweringPipeline):
    """Answers from the texts of an index, as the language model has read them. Arguments as for `IndexPipeline`.

    Passages in the adapter's `passages.safetensors` were read beforehand; other texts are read when they are first
    found, and kept.

    Attributes:
        passages: a `PassageCache`.
    """

    def _set_up(self, index: IndexSource | None) -> None:
        super()._set_up(index)
        file = self.folder / FILE
        if file.is_file():
            self.passages = PassageCache.load(self.model, file, self.tokenizer, mapped=True)
        else:
            self.passages = PassageCache(self.model, self.tokenizer)

    def trace(self, question: str, *, index: IndexSource | None = None) -> Trace:
        """Raise ConfigError: passages are K/V of every layer, and a trace leaves out slots of a memory."""
        raise ConfigError(
            "passages have no trace: use mmattn.inspect.record(pipe.model), or the weights of the sources"
        )

    def _memory(self, questions: list[str], index: IndexSource | None) -> _PassageHits:
        assert self.config.memory is not None
        hits = self._chosen_index(index).search(list(questions), top_k=self.config.memory.top_k)
        numbers: list[list[int]] = []
        sources: list[list[Source]] = []
        for row, real in enumerate(hits.mask.tolist()):
            texts = hits.texts[row] if hits.texts is not None else [None] * len(real)
            ids = hits.ids[row] if hits.ids is not None else [None] * len(real)
            columns = zip(ids, texts, hits.scores[row].tolist(), real, strict=True)
            # The best hit stands last, next to the question.
            entries = [Source(id_, text, score, 0.0) for id_, text, score, is_real in columns if is_real and text][::-1]
            read = [str(entry.text) for entry in entries]
            numbers.append(list(self.passages.add(read, progress=False)) if read else [])
            sources.append(entries)
        return _PassageHits(self.passages, numbers, sources)

    def _sources(self, memory: _PassageHits, row: int, weights: Sequence[float]) -> tuple[Source, ...]:
        begin, sources = 0, []
        for source, passage in zip(memory.sources[row], memory.rows[row], strict=True):
            end = begin + len(passage.ids)
            sources.append(replace(source, weight=sum(weights[begin:end])))
            begin = end
        return tuple(sorted(sources, key=lambda source: -source.weight))


def save_passages(
    folder: str | PathLike[str],
    model: AdaptedModel,
    host: ModelReference,
    encoder: EncoderReference,
    fingerprint: str | None,
    passages: PassageCache | None = None,
    *,
    top_k: int = 4,
    prompt: str = "{question}",
    generation: Settings | None = None,
) -> PipelineConfig:
    """Save a passage adapter as a pipeline, with passages that were read beforehand.

    Args:
        folder: where to.
        model: the adapted model.
        host: its language model by name.
        encoder: of the texts of the index, by name.
        fingerprint: of that encoder.
        passages: read beforehand.
        top_k: entries that a question attends to.
        prompt: begin of the text; "{question}" stands for the question.
        generation: arguments of `generate`.
    """
    config = PipelineConfig(
        task="passage-answering",
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
