"""Texts as token ids, and as padded batches with a memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmattn.errors import ShapeError, TextError
from mmattn.memory import Memory
from mmattn.tokenization import tokenize

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

IGNORED = -100


@dataclass(frozen=True)
class TextBatch:
    """Padded or packed rows of text, and their memory.

    Attributes:
        input_ids: (b, l) int.
        attention_mask: (b, l) int, 1 = text; None in packed rows, as transformers expects.
        labels: (b, l) int, the ids themselves and -100 on the padding.
        memory: a memory of b rows (packed: a row for each document); an index that attention searches; or None.
        position_ids: (b, l) int in packed rows, restarting in each document; else None.
    """

    input_ids: Tensor
    attention_mask: Tensor | None
    labels: Tensor
    memory: Any = None
    position_ids: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TextBatch:
        """Return the batch on another device; an index stays where it is.

        Args:
            device: where it is needed.
            non_blocking: as of `Tensor.to`.
        """
        return self._map(methodcaller("to", device, non_blocking=non_blocking))

    def pin_memory(self) -> TextBatch:
        """Return the batch in page-locked memory, as a `DataLoader` with `pin_memory=True` asks for."""
        return self._map(methodcaller("pin_memory"))

    def _map(self, move: Callable[[Any], Any]) -> TextBatch:
        values = (getattr(self, field.name) for field in fields(self))
        return TextBatch(*(move(value) if isinstance(value, (Tensor, Memory)) else value for value in values))

    def kwargs(self) -> dict[str, object]:
        """Return the keyword arguments of an adapted model, or of a bare host if there is no memory."""
        kwargs: dict[str, object] = {"input_ids": self.input_ids}
        if self.position_ids is None:
            kwargs["attention_mask"] = self.attention_mask
        else:  # with a cache, transformers would not keep documents apart
            kwargs |= {"position_ids": self.position_ids, "use_cache": False}
        if self.memory is not None:
            kwargs["memory"] = self.memory
        return kwargs


def bos_and_eos(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the ids of the tokens that begin and end a text; a tokenizer without the one uses the other for both.

    Raises:
        TextError: it has neither.
    """
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if begin is None and end is None:
        raise TextError(
            "the tokenizer has neither a bos nor an eos token, so a caption could not begin or end; set "
            "tokenizer.eos_token"
        )
    return (end if begin is None else begin), (begin if end is None else end)


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int | None = None
) -> list[list[int]]:
    """Return the ids of each text, with start and end tokens; special tokens in a text are plain text.

    Args:
        tokenizer: a tokenizer of transformers.
        texts: any number of strings.
        max_length: maximum number of ids, with start and end tokens; None for any length.

    Raises:
        TextError: not a string, an empty text, or one longer than `max_length`.
    """
    begin, end = bos_and_eos(tokenizer)
    rows, _ = tokenize(tokenizer, texts)
    for number, row in enumerate(rows):
        if not row:
            raise TextError(f"text {number} is empty: there would be nothing to learn from it; leave it out")
        if max_length is not None and len(row) + 2 > max_length:
            raise TextError(
                f"text {number} has {len(row) + 2} tokens with start and end, and at most {max_length} fit: "
                f"shorten it ({texts[number]!r:.60})"
            )
    return [[begin, *row, end] for row in rows]


def check_prompt(ids: Tensor, mask: Tensor, config: PretrainedConfig, new_tokens: int = 0) -> None:
    """Refuse a prompt (b, l) with its mask (b, l) that a language model cannot read, or not with its new tokens."""
    if not ids.shape[1]:
        raise TextError("the prompt is empty: give at least the start token")
    blank = (~mask.bool().any(1)).nonzero()[:, 0].tolist()
    if blank:
        raise TextError(f"rows {blank[:5]} of the prompt are padding only: leave them out, or start them with a token")
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise TextError(
            f"the prompt has ids from {int(ids.min())} to {int(ids.max())} and the language model knows 0 to "
            f"{vocabulary - 1}: tokenise with its own tokenizer"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and ids.shape[1] + new_tokens > positions:
        raise TextError(
            f"{ids.shape[1]} tokens and {new_tokens} to be written are more than the {positions} positions of the "
            "language model: shorten the prompt or max_new_tokens"
        )


def collate(rows: Sequence[Sequence[int]], memory: Any = None, pad: int = 0) -> TextBatch:
    """Pad rows of ids on the right to a batch.

    Args:
        rows: the ids of each row.
        memory: (b, m, e), or a `Memory` with the same rows; an index that attention searches, `index.as_memory()`; or
            None.
        pad: id of the padding.

    Raises:
        ShapeError: no rows, or a memory with another number of rows.

    >>> collate([[5, 6, 7], [8]]).labels.tolist()
    [[5, 6, 7], [8, -100, -100]]
    """
    memory = Memory(memory) if isinstance(memory, Tensor) else memory
    _check_rows(rows, memory)
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    real = torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in rows])
    return TextBatch(ids, real.long(), ids.masked_fill(~real, IGNORED), memory)


def fill_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Return which documents share a row, by first-fit decreasing: no row is longer than the longest document."""
    longest = max(lengths)
    rows: list[list[int]] = []
    left: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda document: -lengths[document]):
        row = next((row for row, room in enumerate(left) if room >= lengths[number]), None)
        if row is None:
            rows.append([])
            left.append(longest)
            row = len(rows) - 1
        rows[row].append(number)
        left[row] -= lengths[number]
    return rows


def pack(
    documents: Sequence[Sequence[int]],
    memory: Memory | Tensor | None = None,
    unlearned: Sequence[int] | None = None,
    pad: int = 0,
) -> TextBatch:
    """Pack documents into rows. Positions restart in each document; the rest of a row is a document without memory.

    Args:
        documents: the ids of each document.
        memory: a memory with a row for each document, or None.
        unlearned: number of first ids of each document without a label; the first id never has one.
        pad: id of the padding.

    Raises:
        ShapeError: no documents, an empty one, or a memory with another number of rows.

    >>> batch = pack([[5, 6, 7], [8], [9, 4]])
    >>> batch.input_ids.tolist(), batch.position_ids.tolist(), batch.labels.tolist()
    ([[5, 6, 7], [9, 4, 8]], [[0, 1, 2], [0, 1, 0]], [[-100, 6, 7], [-100, 4, -100]])
    """
    memory = Memory(memory) if isinstance(memory, Tensor) else memory
    _check_rows(documents, memory)
    counts = [1] * len(documents) if unlearned is None else [max(1, count) for count in unlearned]
    labels = [[IGNORED] * len(ids[:n]) + list(ids[n:]) for ids, n in zip(documents, counts, strict=True)]
    longest = max(map(len, documents))
    packed: list[tuple[list[int], list[int], list[int]]] = []
    order: list[int] = []
    for row in fill_rows([len(document) for document in documents]):
        rest = longest - sum(len(documents[number]) for number in row)
        ids = [token for number in row for token in documents[number]] + [pad] * rest
        positions = [place for number in row for place in range(len(documents[number]))] + list(range(rest))
        packed.append((ids, positions, [label for number in row for label in labels[number]] + [IGNORED] * rest))
        order += row + [-1] * bool(rest)
    all_ids, all_positions, targets = (torch.tensor(part) for part in zip(*packed, strict=True))
    return TextBatch(all_ids, None, targets, None if memory is None else _ordered(memory, order), all_positions)


def _check_rows(rows: Sequence[Sequence[int]], memory: Any) -> None:
    if not rows or not all(len(row) for row in rows):
        raise ShapeError(f"a batch needs rows of at least one id, got {len(rows)} rows; leave empty texts out")
    count = None if memory is None else memory.batch  # of an index without queries None, too
    if count is not None and count != len(rows):
        raise ShapeError(f"{len(rows)} texts need {len(rows)} rows of memory, got {count}")


def _ordered(memory: Memory, order: Sequence[int]) -> Memory:
    """Return the rows of a memory in this order; -1 is one without any slot."""
    chosen, present = memory[[max(0, row) for row in order]], torch.tensor(order, device=memory.device) >= 0
    mask = chosen.real_slots() & present[:, None]
    return Memory(chosen.tokens, mask, chosen.segments, chosen.scores, check_finite=chosen.finite_checked)
