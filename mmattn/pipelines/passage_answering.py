"""Questions to answers from passages that the language model itself has read: found by an index, read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mmattn.adapters.passages import PassageAdapter
from mmattn.errors import AdapterFileError, ConfigError
from mmattn.hosts.attach import attach
from mmattn.inspect.trace import Trace
from mmattn.kv_store.passages import PassageCache, PassageSelection
from mmattn.pipelines.build import load_host
from mmattn.pipelines.config import EncoderReference, MemoryConfig, ModelReference, PipelineConfig
from mmattn.pipelines.generation import Prompt, template_ids
from mmattn.pipelines.question_answering import QuestionAnsweringPipeline, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mmattn.pipelines.base import IndexSource

#: Keys and values of passages that were read beforehand, in the folder of the adapter.
FILE = "passages.safetensors"
#: Entries that a question attends to at most, and how much lower than the best their scores may be: small models answer
#: better from the best entry alone where it is far ahead.
TOP_K, MARGIN = 4, 0.02
#: Of keys and values in memory, beside those of running calls; other passages are read again.
MAX_BYTES = 4 << 30
#: Messages of the system and of the user in the chat template.
SYSTEM = "Answer the question from the text, in a few words."
USER = "{passages}Question: {question}\nAnswer with a word or a short phrase from the texts."


class _PassageHits(PassageSelection):
    """Selected passages with the sources of each row, their weights still 0."""

    def __init__(self, passages: PassageCache, numbers: list[list[int]], sources: list[list[Source]]) -> None:
        super().__init__(passages, passages.select(numbers).rows)
        self.sources = sources


class PassageAnsweringPipeline(QuestionAnsweringPipeline):
    """Answers from the texts of an index, as the language model has read them. Arguments: `QuestionAnsweringPipeline`.

    Passages in the adapter's `passages.safetensors` were read beforehand; other texts are read when they are first
    found, and kept as far as 4 GB of keys and values reach. Where the prompt has {passages}, the text before
    stands before the passages of each question, and special tokens of the prompt are tokens.

    Attributes:
        passages: a `PassageCache`.
    """

    @classmethod
    def of_host(
        cls,
        name: str,
        encoder: str,
        device: torch.device,
        dtype: torch.dtype | None = None,
        index: IndexSource | None = None,
        revision: str | None = None,
    ) -> PassageAnsweringPipeline:
        """Load a language model that answers from the texts of an index without training, in its chat template.

        Args:
            name: "smollm2", any other causal language model of the hub, or a folder.
            encoder: of the texts of the index, by name.
            device: of all models.
            dtype: of the weights, float32 by default.
            index: as for `pipeline`.
            revision: of a name on the hub.
        """
        folder = Path(name)
        host, tokenizer = load_host(ModelReference(name=name, revision=revision), folder, device, dtype)
        config = PipelineConfig(
            task="passage-answering",
            host=ModelReference.of(name, tokenizer, revision=revision),
            encoder=EncoderReference.of(encoder),
            memory=MemoryConfig(top_k=TOP_K, margin=MARGIN),
            prompt=passage_prompt(tokenizer),
            generation={"max_new_tokens": 32},
        )
        return cls(config, attach(host, PassageAdapter()).eval(), tokenizer, folder, index)

    def _set_up(self, index: IndexSource | None) -> None:
        super()._set_up(index)
        before, has_passages, after = self.config.prompt.partition("{passages}")
        prefix = template_ids(self.tokenizer, before, {}) if has_passages else []
        self._template = after if has_passages else None
        file = self.folder / FILE
        if file.is_file():
            self.passages = PassageCache.load(self.model, file, self.tokenizer, mapped=True)
            if list(self.passages.prefix) != prefix:
                raise AdapterFileError(
                    f"the passages in {str(file)!r} were read after another text than the prompt has before "
                    "{passages}: read them again, or restore the prompt"
                )
        else:
            self.passages = PassageCache(self.model, self.tokenizer, prefix=prefix, max_bytes=MAX_BYTES)

    def read(self, texts: Sequence[str], *, progress: bool = False) -> list[int]:
        """Have the language model read texts beforehand; return the number of each in `passages`.

        Args:
            texts: as an index has them.
            progress: show it.
        """
        end = "" if self._template is None else "\n\n"
        return self.passages.add([f"{text}{end}" for text in texts], progress=progress)

    def save(self, folder: str | PathLike[str]) -> None:
        """Save the pipeline for `mmattn.pipeline(folder)`, with all passages that were read.

        Args:
            folder: where to.
        """
        self.model.save_adapter(folder, encoder=self.encoder.fingerprint)
        self.config.save(folder)
        if len(self.passages):
            self.passages.save(Path(folder) / FILE)

    def make_prompt(self, text: str = "") -> Prompt:
        """Return the prompt of a question; of a template with "{passages}" what stands behind them."""
        if self._template is None:
            return super().make_prompt(text)
        return template_ids(self.tokenizer, self._template, {"{question}": text.strip()})

    def trace(self, question: str, *, index: IndexSource | None = None) -> Trace:
        """Raise ConfigError: passages are K/V of every layer, and a trace leaves out slots of a memory."""
        raise ConfigError(
            "passages have no trace: use mmattn.inspect.record(pipe.model), or the weights of the sources"
        )

    def make_memory(
        self, questions: list[str], index: IndexSource | None = None, passages: int | None = None
    ) -> _PassageHits:
        """Return the passages that are hits of questions."""
        hits = self._hits(questions, index, passages)
        numbers: list[list[int]] = []
        sources: list[list[Source]] = []
        for row, real in enumerate(hits.mask.tolist()):
            texts = hits.texts[row] if hits.texts is not None else [None] * len(real)
            ids = hits.ids[row] if hits.ids is not None else [None] * len(real)
            columns = zip(ids, texts, hits.scores[row].tolist(), real, strict=True)
            # The best hit stands last, next to the question.
            entries = [Source(id_, text, score, 0.0) for id_, text, score, is_real in columns if is_real and text][::-1]
            numbers.append(self.read([str(entry.text) for entry in entries]))
            sources.append(entries)
        return _PassageHits(self.passages, numbers, sources)

    def _sources(self, memory: _PassageHits, row: int, weights: Sequence[float]) -> tuple[Source, ...]:
        begin, sources = len(self.passages.prefix), []
        for source, ids in zip(memory.sources[row], memory.rows[row], strict=True):
            end = begin + len(ids)
            sources.append(replace(source, weight=sum(weights[begin:end])))
            begin = end
        # A share of the attention follows the length and place of a passage more than its use.
        return tuple(sources[::-1])


def passage_prompt(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the prompt for a question about passages, in the chat template of the tokenizer if it has one."""
    if tokenizer.chat_template is None:
        return f"{tokenizer.bos_token or ''}{{passages}}Question: {{question}}\nAnswer:"
    from jinja2 import TemplateError

    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError:  # a template without a system
        return str(tokenizer.apply_chat_template(messages[1:], tokenize=False, add_generation_prompt=True))
