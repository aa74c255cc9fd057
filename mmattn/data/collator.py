"""Rows to a batch of a language model: ids of prompt and text, labels of the text alone, and the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmattn.data.memory_collator import row_memory
from mmattn.data.packing import pack
from mmattn.data.row_memories import MemorySource
from mmattn.data.rows import Row, make_row
from mmattn.data.text_batches import IGNORED, TextBatch, bos_and_eos, collate
from mmattn.errors import ConfigError, TextError, check_int
from mmattn.tokenization import tokenize


class RowCollator:
    """A `data_collator` of `transformers.Trainer`: pads rows of begin, prompt, text, end to one batch.

    The prompt is read and not learned. Calling it returns the keyword arguments of the adapted model, labels and
    `memory` included. Rows may also be those of a `datasets.Dataset`, with the keys that `make_row` takes; their
    memory may be a table of numbers (m, e), too.

    Args:
        tokenizer: the host's own.
        memories: of the rows; None where they have none.
        max_length: ids of the longest row; None for any length.
        truncation: shorten the text of a longer row, its end token kept; False refuses it.
        text_only: leave the memories of the rows out, for a control that sees the text alone.
        packing: several rows of data share a row of the batch, each with its own memory, so that little is padding.

    Raises:
        ConfigError: a length below 3, or memories that would be left out.
        TextError: the tokenizer has neither a token that begins a text nor one that ends it.

    >>> from types import SimpleNamespace
    >>> class Letters(SimpleNamespace):
    ...     bos_token_id, eos_token_id, pad_token_id, unk_token_id, all_special_ids = 1, 2, 0, None, [0, 1, 2]
    ...     def __call__(self, texts, **options):
    ...         return {"input_ids": [[ord(letter) for letter in text] for text in texts]}
    >>> RowCollator(Letters())([Row("ab", prompt="?"), Row("c")])["labels"].tolist()
    [[-100, -100, 97, 98, 2], [1, 99, 2, -100, -100]]
    """

    def __init__(
        self,
        tokenizer: Any,
        memories: MemorySource | None = None,
        max_length: int | None = None,
        truncation: bool = False,
        text_only: bool = False,
        packing: bool = False,
    ) -> None:
        if text_only and memories is not None:
            raise ConfigError("text_only=True leaves memories out, and memories= was given: give one of them")
        self.text_only, self.packing = text_only, packing
        self.tokenizer, self.memories, self.truncation = tokenizer, memories, truncation
        self.max_length = None if max_length is None else check_int("max_length", max_length, at_least=3)
        self._ends = bos_and_eos(tokenizer)

    def ids(self, rows: Sequence[Row], first: int = 0) -> tuple[list[list[int]], list[int]]:
        """Ids of each row, and how many at its beginning are not learned.

        Args:
            rows: of any length.
            first: number of the first row in messages.

        Raises:
            TextError: a row that is too long, or whose text has no tokens.
        """
        begin, end = self._ends
        prompts, _ = tokenize(self.tokenizer, [row.prompt for row in rows])
        texts, _ = tokenize(self.tokenizer, [row.text for row in rows])
        out = []
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), start=first):
            if not text:
                raise TextError(f"row {number} has a text without tokens: there is nothing to learn from it")
            room = None if self.max_length is None else self.max_length - len(prompt) - 2
            if room is not None and len(text) > room and not (self.truncation and room > 0):
                raise TextError(
                    f"row {number} has {len(prompt) + len(text) + 2} tokens with its begin and end, and at most "
                    f"{self.max_length} fit: shorten it, or set truncation=True ({rows[number - first].text!r:.60})"
                )
            out.append([begin, *prompt, *text[:room], end])
        # Where nothing stands before the text, its labels are the ids themselves: nothing predicts the first.
        return out, [1 + len(prompt) if prompt else 0 for prompt in prompts]

    def check(self, rows: Sequence[Row]) -> None:
        """Refuse rows that could not be learned.

        Raises:
            TextError: as `ids`.
        """
        for start in range(0, len(rows), 256):
            self.ids(rows[start : start + 256], start)

    def batch(self, rows: Sequence[Row | Mapping[str, Any]]) -> TextBatch:
        """The padded or packed batch with its memory, or none if no row has any.

        Raises:
            TextError: as `ids`.
            ConfigError: rows with a memory, and no `memories` to read it with.
        """
        given = [_row_of(row) for row in rows]
        if self.memories is None and not self.text_only and any(row.has_memory for row in given):
            raise ConfigError(
                "rows have a memory, and this RowCollator, made without memories=, would drop it: give it a "
                "RowMemories, or text_only=True for a control that sees the text alone"
            )
        ids, unlearned = self.ids(given)
        memory = None if self.memories is None else self.memories.of(given)
        pad = self._ends[1] if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        if self.packing:
            return pack(ids, memory, unlearned, pad)
        padded = collate(ids, memory, pad)
        labels = padded.labels.clone()
        for row, count in enumerate(unlearned):
            labels[row, :count] = IGNORED
        return replace(padded, labels=labels)

    def __call__(self, rows: Sequence[Row | Mapping[str, Any]]) -> dict[str, Any]:
        """Keyword arguments of the adapted model, labels included."""
        batch = self.batch(rows)
        return {**batch.kwargs(), "labels": batch.labels}


def _row_of(given: Row | Mapping[str, Any]) -> Row:
    if isinstance(given, Row):
        return given
    memory = given.get("memory")
    return make_row({**given, "memory": memory if isinstance(memory, str) else row_memory(memory)})
