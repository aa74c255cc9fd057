"""What an augmenting model has read of a text that is still being written, and which part of it still holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmattn.core.kv_cache import KeyValue


@dataclass(frozen=True)
class AugmentedText:
    """What an augmenting model has read in one call, t tokens with padding.

    Args:
        real: (b, t) bool, which tokens are no padding.
        ids: (b, t) token ids.
        states: (b, t, e) by layer of the model.
        cache: the model's own, None where nothing is cached.
        projected: keys and values of the first tokens, by layer of the host.
    """

    real: Tensor
    ids: Tensor
    states: dict[int, Tensor]
    cache: Any
    projected: dict[int, KeyValue]

    @property
    def length(self) -> int:
        """Number of tokens t, padding included."""
        return self.real.shape[1]

    def shared_with(self, real: Tensor, ids: Tensor) -> AugmentedText | None:
        """The part of this with which all rows of a text begin, in their order; None where there is none.

        The cache is changed in place: what is not shared is gone.
        """
        rows, length = common_beginning((self.real, self.ids), (real, ids))
        if not length:
            return None
        if rows.tolist() != list(range(self.real.shape[0])):
            self.cache.reorder_cache(rows)
        if length < self.length:
            self.cache.crop(length - self.length)
        return AugmentedText(
            real[:, :length],
            ids[:, :length],
            {layer: states[rows.to(states.device), :length] for layer, states in self.states.items()},
            self.cache,
            {layer: one.pick(rows.to(one.keys.device), length) for layer, one in self.projected.items()},
        )


def common_beginning(before: tuple[Tensor, Tensor], now: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """For each row of a text the row of an earlier one that begins most like it, and how many tokens ALL rows share so.

    Args:
        before: which tokens of the earlier text are real (n, t) bool, and their ids (n, t).
        now: the same of the text, (b, t').

    >>> before, now = torch.tensor([[5, 6, 7], [5, 8, 9]]), torch.tensor([[5, 8, 9, 1], [5, 8, 3, 1]])
    >>> common_beginning(*((torch.ones_like(ids, dtype=torch.bool), ids) for ids in (before, now)))
    (tensor([1, 1]), 2)
    """
    rows, length = now[1].shape[0], min(before[1].shape[1], now[1].shape[1])
    if not (before[1].shape[0] and rows):
        return torch.zeros(rows, dtype=torch.long, device=now[1].device), 0
    same = now[1][:, None, :length] == before[1][:, :length]
    same &= now[0][:, None, :length] == before[0][:, :length]
    most, index = same.long().cumprod(2).sum(2).max(1)
    return index, int(most.min())


def token_places(real: Tensor) -> Tensor:
    """The index of each token (b, t) among the real ones of its row.

    >>> token_places(torch.tensor([[False, True, True]]))
    tensor([[0, 0, 1]])
    """
    return (real.cumsum(1) - 1).clamp(min=0)
