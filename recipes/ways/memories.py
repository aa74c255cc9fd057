"""What a request is given to read: slots for adapters, and where it is text, its passages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import mmattn


@dataclass(frozen=True)
class Memories:
    """The memories of some requests."""

    slots: mmattn.Memory
    passages: Sequence[Sequence[Sequence[int]]] | None = None

    def __len__(self) -> int:
        return self.slots.batch

    def __getitem__(self, rows: Sequence[int]) -> Memories:
        """Some requests, by number."""
        passages = None if self.passages is None else [self.passages[row] for row in rows]
        return Memories(self.slots[torch.tensor(rows)], passages)
