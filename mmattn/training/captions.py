"""Texts beside the memories they are about: ids, padded batches, an order of pairs, small disturbances."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError, ShapeError, TextError, check_float, check_int
from mmattn.memory import Memory
from mmattn.tokenization import tokenize

IGNORED = -100


@dataclass(frozen=True)
class TextBatch:
    """Rows of text padded on the right, and the memory each row is read with.

    Attributes:
        input_ids: (b, l) int. attention_mask: (b, l) int, 1 = text.
        labels: (b, l) int, the ids themselves and -100 on the padding.
        memory: b rows, or None for text alone.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    memory: Memory | None = None

    def to(self, device: torch.device | str) -> TextBatch:
        """The same batch on another device."""
        memory = None if self.memory is None else self.memory.to(device)
        return TextBatch(self.input_ids.to(device), self.attention_mask.to(device), self.labels.to(device), memory)

    def kwargs(self) -> dict[str, Any]:
        """What a host with adapters is called with; a bare host takes the same where there is no memory."""
        made: dict[str, Any] = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        if self.memory is not None:
            made["memory"] = self.memory
        return made


def begin_and_end(tokenizer: Any) -> tuple[int, int]:
    """The ids that open and close a text; a tokenizer without the one uses the other for both.

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


def encode_texts(tokenizer: Any, texts: Sequence[str], max_length: int | None = None) -> list[list[int]]:
    """Ids of each text between the begin and the end token, special tokens in a text taken as letters.

    Raises:
        TextError: not a string, an empty text, or one longer than `max_length` ids with begin and end.
    """
    begin, end = begin_and_end(tokenizer)
    rows, _ = tokenize(tokenizer, texts)
    for number, row in enumerate(rows):
        if not row:
            raise TextError(f"text {number} is empty: there would be nothing to learn from it; leave it out")
        if max_length is not None and len(row) + 2 > max_length:
            raise TextError(
                f"text {number} has {len(row) + 2} tokens with its begin and end, and at most {max_length} fit: "
                f"shorten it ({texts[number]!r:.60})"
            )
    return [[begin, *row, end] for row in rows]


def check_prompt(ids: Tensor, mask: Tensor, config: Any, new_tokens: int = 0) -> None:
    """Refuse ids (b, l) with their mask (b, l) that a language model of this config cannot read.

    Args:
        new_tokens: how many more will be written behind them.

    Raises:
        TextError: no tokens, a row of padding only, an id without embedding, or more tokens than positions.
    """
    if not ids.shape[1]:
        raise TextError("the prompt is empty: begin it with the begin token, at least")
    blank = (~mask.bool().any(1)).nonzero()[:, 0].tolist()
    if blank:
        raise TextError(f"rows {blank[:5]} of the prompt are padding only: leave them out, or begin them with a token")
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


def collate(rows: Sequence[Sequence[int]], memory: Memory | None = None, pad: int = 0) -> TextBatch:
    """Pad rows of ids on the right to one batch.

    Raises:
        ShapeError: no rows, or a memory with another number of rows.

    >>> collate([[5, 6, 7], [8]]).labels.tolist()
    [[5, 6, 7], [8, -100, -100]]
    """
    if not rows or not all(len(row) for row in rows):
        raise ShapeError(f"a batch needs rows of at least one id, got {len(rows)} rows; leave empty texts out")
    if memory is not None and memory.batch != len(rows):
        raise ShapeError(f"{len(rows)} texts need {len(rows)} rows of memory, got {memory.batch}")
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    real = torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in rows])
    return TextBatch(ids, real.long(), ids.masked_fill(~real, IGNORED), memory)


class PairOrder:
    """Which text goes with which item at which step: every item once an epoch, with one of its texts.

    A function of seed and step alone: runs that differ in what they train see the same pairs, and a run taken up again
    at a step goes on as if it had never stopped.

    Args:
        choices: for each item the texts that may go with it. batch: pairs per step. seed: of the order.

    Raises:
        ConfigError: no items, or one without texts.

    >>> order = PairOrder([[0], [1, 2], [1, 2]], batch=2, seed=7)
    >>> order.pairs(0) == PairOrder([[0], [1, 2], [1, 2]], batch=2, seed=7).pairs(0)
    True
    """

    def __init__(self, choices: Sequence[Sequence[int]], batch: int, seed: int = 0) -> None:
        if not choices or not all(len(texts) for texts in choices):
            raise ConfigError(f"every item needs at least one text; got {len(choices)} items, or one without")
        self.choices = [list(texts) for texts in choices]
        self.batch = check_int("batch", batch)
        self.seed = check_int("seed", seed, at_least=0)
        self._epoch: tuple[int, list[tuple[int, int]]] | None = None

    def pairs(self, step: int) -> list[tuple[int, int]]:
        """(item, text) of each row of the batch at `step`, counted from 0."""
        first = check_int("step", step, at_least=0) * self.batch
        return [self._pair(first + row) for row in range(self.batch)]

    def _pair(self, number: int) -> tuple[int, int]:
        epoch, place = divmod(number, len(self.choices))
        if self._epoch is None or self._epoch[0] != epoch:
            rng = random.Random(f"{self.seed}/{epoch}")
            items = list(range(len(self.choices)))
            rng.shuffle(items)
            self._epoch = (epoch, [(item, rng.choice(self.choices[item])) for item in items])
        return self._epoch[1][place]


def disturb(memory: Memory, *, keep: float = 1.0, noise: float = 0.0, seed: int = 0) -> Memory:
    """A memory for training: a random share of the slots of each row, with noise on what is left.

    Args:
        keep: share of slots kept, at least one; rows keep different ones. Needs a memory without padding where < 1.
        noise: standard deviation of the noise, in units of the standard deviation of each width's values.
        seed: of the slots and the noise.

    Raises:
        ConfigError: a share outside (0, 1]. ShapeError: slots cannot be left out of a padded memory.
    """
    if not 0 < check_float("keep", keep) <= 1:
        raise ConfigError(f"keep must be above 0 and at most 1, got {keep}")
    check_float("noise", noise, at_least=0)
    tokens, random_ = memory.tokens, torch.Generator(memory.device).manual_seed(seed)
    kept = max(1, round(keep * memory.length))
    if kept < memory.length:
        if memory.mask is not None:
            raise ShapeError("slots are left out at random of memories without padding; give keep=1 for this one")
        order = torch.rand(tokens.shape[:2], generator=random_, device=tokens.device).argsort(1)[:, :kept]
        tokens = tokens.gather(1, order[..., None].expand(-1, -1, memory.dim))
    if noise:
        spread = tokens.flatten(0, 1).std(0) if tokens.shape[0] * tokens.shape[1] > 1 else torch.zeros(memory.dim)
        tokens = tokens + noise * spread * torch.randn(tokens.shape, generator=random_, device=tokens.device)
    if kept < memory.length:
        return Memory(tokens, check_finite=False)
    return memory.replace(tokens)
