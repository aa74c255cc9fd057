"""Every token of some documents as a slot, and indexes of them without a text's own document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

import mmattn
from mmattn.pipelines import read_passages


@dataclass(frozen=True)
class Text:
    """Some tokens of one document, which belongs to a fold."""

    ids: list[int]
    fold: int


def texts(documents: Sequence[Sequence[int]], size: int, folds: int = 1) -> list[Text]:
    """Documents cut into texts of `size` tokens; document i belongs to fold i mod `folds`."""
    return [
        Text(list(ids[start : start + size]), number % folds)
        for number, ids in enumerate(documents)
        for start in range(0, len(ids), size)
        if len(ids) > start + 1
    ]


def batches(known: Sequence[Text], count: int, seed: int) -> Iterator[list[Text]]:
    """Texts of one fold at a time, as often as it has texts."""
    random = Random(seed)
    while True:
        fold = random.choice(known).fold
        own = [text for text in known if text.fold == fold]
        yield random.sample(own, min(count, len(own)))


class Library:
    """Every token of some documents as a slot: what came before it, as a language model reads that, and the token.

    Args:
        lm: the frozen language model.
        documents: their ids; document i belongs to fold i mod `folds`.
        layer: whose states say what came before.
        size: tokens that are read together; each is read with half as many before it, where there are so many.
        folds: how many.
    """

    def __init__(self, lm: Any, documents: Sequence[Sequence[int]], layer: int, size: int, folds: int) -> None:
        slots: list[list[Tensor]] = [[] for _ in range(folds)]
        half = size // 2
        for number, ids in enumerate(documents):
            starts = range(0, max(1, len(ids) - half), half)
            read = read_passages(lm, [ids[start : start + size] for start in starts], layer, batch_size=16)
            # Of the first token nothing is known that came before.
            slots[number % folds] += [part[half if start else 1 :] for start, part in zip(starts, read, strict=True)]
        self.folds = [torch.cat(parts) for parts in slots]

    def __len__(self) -> int:
        return sum(map(len, self.folds))

    def slots(self, without: int | None = None) -> Tensor:
        """The slots (n, 2 d) of all documents, or of those of all folds but one."""
        return torch.cat([part for fold, part in enumerate(self.folds) if fold != without])

    def index(self, without: int | None = None) -> mmattn.Index:
        """An index of `slots`: approximate for training, which goes without a fold, else exact."""
        settings: dict[str, Any] = {"store": "exact"} if without is None else {"store": "ivf", "visited": 24}
        return mmattn.Index.build(self.slots(without), metric="ip", **settings)

    def some(self, count: int, seed: int, without: int | None = None) -> mmattn.Index:
        """An index of some tokens at random: the control."""
        slots = self.slots(without)
        rows = torch.randperm(len(slots), generator=torch.Generator().manual_seed(seed))[:count]
        return mmattn.Index.build(slots[rows], metric="ip")

    def exchanged(self, seed: int) -> mmattn.Index:
        """An index of all tokens, each after what came before another one: the control."""
        slots = self.slots()
        before, said = slots.chunk(2, 1)
        rows = torch.randperm(len(slots), generator=torch.Generator().manual_seed(seed))
        return mmattn.Index.build(torch.cat([before, said[rows]], 1), metric="ip", store="exact")
