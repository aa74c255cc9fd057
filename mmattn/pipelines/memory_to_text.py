"""Texts about a memory that comes with each call: vectors of sound, of sensors, of another model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from mmattn.errors import ShapeError
from mmattn.memory import Memory
from mmattn.pipelines.base import Pipeline
from mmattn.pipelines.generation import generate_texts, stream_text
from mmattn.tokenization import check_text


class MemoryToTextPipeline(Pipeline):
    """Texts about vectors that the caller has encoded."""

    def __call__(
        self,
        text: str | Sequence[str],
        memory: Memory | Tensor | None = None,
        *,
        batch_size: int = 64,
        **options: object,
    ) -> str | list[str]:
        """Return the text that the model generates after a text, or a list of texts for a list.

        Args:
            text: one or a list; a question, or the begin of the answer.
            memory: (b, m, e), a row for each text; None for the bare host.
            batch_size: texts at once.
            **options: of `generate`; they override those of the adapter's folder.

        Raises:
            TextError: the prompt has a place for a question, and the text is empty.
            ShapeError: a memory of another width, or of another number of rows.
        """
        texts = check_text(text)
        rows = generate_texts(
            self.model,
            self.tokenizer,
            list(map(self.make_prompt, texts)),
            self._rows(memory, len(texts)),
            batch_size=batch_size,
            options=self.config.generation | options,
        )
        return rows[0] if isinstance(text, str) else rows

    def stream(self, text: str, memory: Memory | Tensor | None = None, **options: object) -> Iterator[str]:
        """Yield the text after a text piece by piece. Arguments and errors as for a call."""
        rows = self._rows(memory, 1)
        settings = self.config.generation | options
        return stream_text(self.model, self.tokenizer, self.make_prompt(text), rows, options=settings)

    def _rows(self, memory: Memory | Tensor | None, texts: int) -> Memory | None:
        if memory is None:
            return None
        memory = Memory(memory) if isinstance(memory, Tensor) else memory
        if len(memory) != texts:
            raise ShapeError(f"{texts} texts have a memory of {len(memory)} rows: give a row for each")
        return memory.to(self.device)
