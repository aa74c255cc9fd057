"""The tokenizer of a run, and batches of sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmattn import training

from .pairs import Pair

PAD, START, END = "<pad>", "<s>", "</s>"


def train_tokenizer(pairs: Sequence[Pair], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer for both sides: any text goes in and comes back unchanged."""
    bare = Tokenizer(models.BPE())
    # A first word is then the same token as further on.
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bare.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bare.train_from_iterator([text for pair in pairs for text in (pair.source, pair.target)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bare, pad_token=PAD, bos_token=START, eos_token=END)


def read_sources(tokenizer: Any, texts: Sequence[str], max_tokens: int | None = None) -> list[list[int]]:
    """Ids of each source, without a begin and an end.

    Raises:
        TextError: a text is empty, no string, or longer than `max_tokens` with begin and end.
    """
    cleaned = [text.strip() if isinstance(text, str) else text for text in texts]
    return [ids[1:-1] for ids in training.encode_texts(tokenizer, cleaned, max_tokens)]


def padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor | None]:
    """Ids (b, l), and which of them are tokens; None where all are."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    mask = torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]
    return ids.to(device), None if bool(mask.all()) else mask.to(device)


@dataclass(frozen=True)
class Batches:
    """Pairs as ids, in batches of like length without end, the same for every model of a run."""

    sources: list[list[int]]
    targets: list[list[int]]
    batch: int
    seed: int

    @staticmethod
    def of(tokenizer: Any, pairs: Sequence[Pair], max_tokens: int, batch: int, seed: int) -> Batches:
        """Pairs of which neither side has more than `max_tokens` tokens."""
        sources = training.encode_texts(tokenizer, [pair.source for pair in pairs])
        targets = training.encode_texts(tokenizer, [pair.target for pair in pairs])
        kept = [row for row, both in enumerate(zip(sources, targets, strict=True)) if max(map(len, both)) <= max_tokens]
        return Batches([sources[row][1:-1] for row in kept], [targets[row] for row in kept], batch, seed)

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
        lengths = [len(source) + len(target) for source, target in zip(self.sources, self.targets, strict=True)]
        order = training.LengthGroupedSampler(lengths, self.batch, self.seed)
        for epoch in count():
            for rows in order.batches(epoch):
                yield [self.sources[row] for row in rows], [self.targets[row] for row in rows]
