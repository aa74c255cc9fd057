"""Rows to a batch of a language model: ids of prompt and text, labels of the text alone, and the memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mmattn.data.rows import Row, Values, check_mapping, make_row, row_memory, stack_memories
from mmattn.data.text_batches import IGNORED, TextBatch, bos_and_eos, collate, pack
from mmattn.errors import ConfigError, TextError, check_float, check_int
from mmattn.memory import Memory
from mmattn.tokenization import tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RowCollator:
    """A `data_collator` for `transformers.Trainer`: pads rows of prompt and text, with start and end tokens.

    The prompt has no labels. A call returns the keyword arguments of the adapted model, including labels and `memory`.
    Rows have the columns of `make_row`, and `encode_dataset` has encoded their pictures and passages.

    Args:
        tokenizer: tokenizer of the host.
        max_length: maximum number of ids of a row; None for any length.
        truncation: truncate the text of a longer row, but not its end token; False raises.
        text_only: leave out the memories, for a control that sees only the text.
        packing: pack several rows of data into each row of the batch, each with its memory, to save padding.

    Raises:
        ConfigError: a length below 3.
        TextError: the tokenizer has neither a start nor an end token.

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
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None = None,
        truncation: bool = False,
        text_only: bool = False,
        packing: bool = False,
    ) -> None:
        self.text_only, self.packing = text_only, packing
        self.tokenizer, self.truncation = tokenizer, truncation
        self.max_length = None if max_length is None else check_int("max_length", max_length, at_least=3)
        self._ends = bos_and_eos(tokenizer)

    def ids(self, rows: Sequence[Row], first: int = 0) -> tuple[list[list[int]], list[int]]:
        """Return the ids of each row, and the number of its first ids without labels.

        Args:
            rows: of any length.
            first: number of the first row in messages.

        Raises:
            TextError: a row is too long, or its text has no tokens.
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
                    f"row {number} has {len(prompt) + len(text) + 2} tokens with start and end, and at most "
                    f"{self.max_length} fit: shorten it, or set truncation=True ({rows[number - first].text!r:.60})"
                )
            out.append([begin, *prompt, *text[:room], end])
        # Where nothing stands before the text, its labels are the ids themselves: nothing predicts the first.
        return out, [1 + len(prompt) if prompt else 0 for prompt in prompts]

    def check(self, rows: Iterable[Row | Values]) -> None:
        """Refuse rows that could not be learned: TextError as `ids` raises it."""
        remaining = iter(rows)
        for first in itertools.count(0, 256):
            batch = [row if isinstance(row, Row) else make_row(row) for row in itertools.islice(remaining, 256)]
            if not batch:
                return
            self.ids(batch, first)

    def batch(self, rows: Sequence[Row | Values]) -> TextBatch:
        """Return the padded or packed batch with its memory, or none if no row has any.

        Raises:
            TextError: as `ids`.
            ConfigError: rows with pictures or passages that are not encoded.
        """
        examples = [row if isinstance(row, Row) else make_row(row) for row in rows]
        if not self.text_only and any(row.images or row.passages for row in examples):
            raise ConfigError(
                "rows have pictures or passages, and a RowCollator takes vectors: encode them with encode_dataset, or "
                "give text_only=True for a text-only control"
            )
        ids, unlearned = self.ids(examples)
        memory = None if self.text_only else stack_memories(examples)
        pad = self._ends[1] if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        if self.packing:
            return pack(ids, memory, unlearned, pad)
        padded = collate(ids, memory, pad)
        labels = padded.labels.clone()
        for row, count in enumerate(unlearned):
            labels[row, :count] = IGNORED
        return replace(padded, labels=labels)

    def __call__(self, rows: Sequence[Row | Values]) -> dict[str, object]:
        """Return keyword arguments of the adapted model, labels included."""
        batch = self.batch(rows)
        return {**batch.kwargs(), "labels": batch.labels}


class MemoryCollator:
    """A `data_collator` for rows of a `datasets.Dataset` with a column of memories of any length.

    A collator of transformers or TRL makes the batch of the other columns, and the memories are padded to a `Memory`. A
    value of the column is a memory (m, e) as nested lists, array or tensor, a `Memory` of one row, the path of a saved
    memory, or None.

    Args:
        collator: collator of the other columns, such as `transformers.DataCollatorForSeq2Seq(tokenizer)`.
        column: name of the column of memories.
        memory_dim: width e; only needed if all rows of a batch may lack a memory.

    >>> from transformers import default_data_collator
    >>> rows = [{"input_ids": [5, 6], "memory": [[0.5, 1.0]]}, {"input_ids": [7, 8], "memory": None}]
    >>> MemoryCollator(default_data_collator)(rows)["memory"]
    Memory(b=2, m=1, e=2, float32, lengths=[1, 0])
    """

    def __init__(
        self,
        collator: Callable[[list[dict[str, object]]], Mapping[str, object]],
        column: str = "memory",
        memory_dim: int | None = None,
    ) -> None:
        self.collator, self.column = collator, column
        self.memory_dim = None if memory_dim is None else check_int("memory_dim", memory_dim)

    def __call__(self, rows: Sequence[Values]) -> dict[str, object]:
        """Return keyword arguments of the adapted model, without `memory` if no row has any and the width is not known.

        Args:
            rows: of the dataset.

        Raises:
            ConfigError: a row without the column.
            ShapeError: a memory that is none, or memories of several widths.
        """
        for row in rows:
            check_mapping(row)
            if self.column not in row:
                raise ConfigError(
                    f"the rows have no column {self.column!r} of memories, only {', '.join(row)}: name it with "
                    "column=, and give a Trainer remove_unused_columns=False"
                )
        batch = dict(self.collator([{key: row[key] for key in row if key != self.column} for row in rows]))
        memories = [row_memory(row[self.column]) for row in rows]
        width = next((memory.dim for memory in memories if memory is not None), self.memory_dim)
        if width is not None:
            blank = Memory(torch.zeros(1, 0, width))
            batch["memory"] = Memory.stack([blank if memory is None else memory for memory in memories])
        return batch


def augment_memory(memory: Memory, *, keep_fraction: float, seed: int = 0) -> Memory:
    """Return a memory with random slots of each row masked.

    Args:
        memory: (b, m, e).
        keep_fraction: share of the slots that stay, at least one; different ones in each row.
        seed: of the slots.

    Raises:
        ConfigError: a fraction outside (0, 1].
    """
    if not 0 < check_float("keep_fraction", keep_fraction) <= 1:
        raise ConfigError(f"keep_fraction must be above 0 and at most 1, got {keep_fraction}")
    if keep_fraction == 1:
        return memory
    generator, real = torch.Generator(memory.device).manual_seed(seed), memory.real_slots()
    order = torch.rand(real.shape, generator=generator, device=memory.device).masked_fill(~real, 2).argsort(1)
    counts = (keep_fraction * real.sum(1, keepdim=True)).round().clamp(min=1)
    chosen = torch.arange(memory.length, device=memory.device) < counts
    mask = real & torch.zeros_like(real).scatter(1, order, chosen)
    return Memory(
        memory.tokens, mask, memory.segments, memory.scores, memory.sources, check_finite=memory.finite_checked
    )
