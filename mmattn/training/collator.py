"""Rows to a batch for a language model: prompt and text as ids, labels on the text alone, memory padded beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mmattn.errors import TextError, check_int
from mmattn.tokenization import tokenize
from mmattn.training.captions import IGNORED, TextBatch, begin_and_end, collate
from mmattn.training.memories import RowMemories
from mmattn.training.rows import Row


class RowCollator:
    """Pads rows to one batch: begin, prompt, text, end. The prompt is read and not learned.

    Usable as `data_collator` of a `transformers.Trainer`: calling it gives what the host is called with, labels and
    `memory` included.

    Args:
        tokenizer: the host's own. memories: of the rows; None where the host is to see the text alone.
        max_length: ids of the longest row; a longer text is cut, its end token kept, if `cut`, and refused otherwise.

    >>> from types import SimpleNamespace
    >>> class Letters(SimpleNamespace):
    ...     bos_token_id, eos_token_id, pad_token_id, unk_token_id, all_special_ids = 1, 2, 0, None, [0, 1, 2]
    ...     def __call__(self, texts, **options):
    ...         return {"input_ids": [[ord(letter) for letter in text] for text in texts]}
    >>> RowCollator(Letters())([Row("ab", prompt="?"), Row("c")])["labels"].tolist()
    [[-100, -100, 97, 98, 2], [1, 99, 2, -100, -100]]
    """

    def __init__(
        self, tokenizer: Any, memories: RowMemories | None = None, max_length: int | None = None, cut: bool = False
    ) -> None:
        self.tokenizer, self.memories, self.cut = tokenizer, memories, cut
        self.max_length = None if max_length is None else check_int("max_length", max_length, at_least=3)
        self._ends = begin_and_end(tokenizer)

    def ids(self, rows: Sequence[Row], first: int = 0) -> tuple[list[list[int]], list[int]]:
        """Ids of each row, and how many at its beginning are not learned.

        Args:
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
            if room is not None and len(text) > room and not (self.cut and room > 0):
                raise TextError(
                    f"row {number} has {len(prompt) + len(text) + 2} tokens with its begin and end, and at most "
                    f"{self.max_length} fit: shorten it, or let texts be cut ({rows[number - first].text!r:.60})"
                )
            out.append([begin, *prompt, *text[:room], end])
        # Where nothing stands before the text, its labels are the ids themselves: nothing predicts the first.
        return out, [1 + len(prompt) if prompt else 0 for prompt in prompts]

    def check(self, rows: Sequence[Row]) -> None:
        """Refuse rows that could not be learned, before anything is trained.

        Raises:
            TextError: as `ids`.
        """
        for start in range(0, len(rows), 256):
            self.ids(rows[start : start + 256], start)

    def batch(self, rows: Sequence[Row]) -> TextBatch:
        """The padded batch (b, l) with its memory (b, m, e), or none if no row has any."""
        ids, unlearned = self.ids(rows)
        memory = None if self.memories is None else self.memories.of(rows)
        pad = self.tokenizer.pad_token_id
        made = collate(ids, memory, self._ends[1] if pad is None else pad)
        labels = made.labels.clone()
        for row, count in enumerate(unlearned):
            labels[row, :count] = IGNORED
        return replace(made, labels=labels)

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        """What a host with adapters is called with, labels included."""
        made = self.batch(rows)
        return {**made.kwargs(), "labels": made.labels}
