"""The states, or keys and values, that an augmenting model has computed of a text, and which of them still hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmattn.core.kv_cache import KeyValue
from mmattn.errors import ConditionError


@dataclass(frozen=True)
class AugmentedText:
    """The states that an augmenting model has computed in one call, of t tokens with padding."""

    real: Tensor  # (b, t) bool, which tokens are no padding
    ids: Tensor  # (b, t) token ids
    states: dict[int, Tensor]  # (b, t, e) by layer of the model
    cache: Any  # the model's own; None if nothing is cached
    projected: dict[int, KeyValue]  # keys and values of the first tokens, by layer of the host

    @property
    def length(self) -> int:
        """Number of tokens t, padding included."""
        return self.real.shape[1]

    def shared_with(self, real: Tensor, ids: Tensor) -> AugmentedText | None:
        """Return the part with which all rows of a text begin, in their order, or None; the cache is cut in place."""
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


@dataclass(frozen=True)
class AugmentedPrompt:
    """Prompts that `AugmentingModel.prefill` read: the memory of a `FusedCacheAdapter`, for any number of calls.

    Args:
        states: by layer of the model (b, p, e), keys of all heads, turned to position 0, and values.
        real: (b, p) bool, which tokens are no padding.
        ids: (b, p), of the tokens; a text that begins with others is refused. None if they are not known.
    """

    states: tuple[Tensor, ...]
    real: Tensor
    ids: Tensor | None = None

    @property
    def batch(self) -> int:
        """Number of rows b."""
        return len(self.real)

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> AugmentedPrompt:
        """Return some rows, by number, slice or list."""
        return self._map(lambda one: one[torch.arange(self.batch)[rows].reshape(-1)])

    def repeated(self, times: int) -> AugmentedPrompt:
        """Return each row several times, for the beams of a text."""
        return self if times == 1 else self._map(lambda one: one.repeat_interleave(times, 0))

    def _map(self, change: Callable[[Tensor], Tensor]) -> AugmentedPrompt:
        ids = None if self.ids is None else change(self.ids)
        return AugmentedPrompt(tuple(map(change, self.states)), change(self.real), ids)

    def nbytes(self) -> int:
        """Return the bytes of keys and values."""
        return sum(one.nbytes for one in self.states)

    def left_aligned(self) -> AugmentedPrompt:
        """Return the prompts with the real tokens of each row first, 0 after them."""
        longest = int(self.real.sum(1).max()) if self.real.numel() else 0
        order = torch.sort((~self.real).to(torch.uint8), dim=1, stable=True).indices[:, :longest]
        real = self.real.gather(1, order)
        states = tuple(
            one.gather(1, order[..., None].expand(-1, -1, one.shape[2])).masked_fill(~real[..., None], 0)
            for one in self.states
        )
        return AugmentedPrompt(states, real, None if self.ids is None else self.ids.gather(1, order))

    def check_begins(self, ids: Tensor, places: Tensor, visible: Tensor, name: str) -> None:
        """Check that a text begins with these prompts, which are left-aligned.

        Raises:
            ConditionError: another token.
        """
        if self.ids is None:
            return
        prompt = self.ids.to(ids.device)
        read = prompt.gather(1, places.clamp(max=max(prompt.shape[1] - 1, 0)))
        wrong = ((read != ids) & visible).nonzero()
        if len(wrong):
            row, token = wrong[0].tolist()
            raise ConditionError(
                f"adapter {name!r} was given what a model read of another prompt: token {token} of row {row} is "
                f"{int(ids[row, token])}, and it read {int(read[row, token])}; prefill the very prompt with which the "
                "text begins"
            )


def common_beginning(before: tuple[Tensor, Tensor], now: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return for each row of a text the row of an earlier one that begins most like it, and how many tokens ALL share.

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
    """Return the index of each token (b, t) among the real ones of its row.

    >>> token_places(torch.tensor([[False, True, True]]))
    tensor([[0, 0, 1]])
    """
    return (real.cumsum(1) - 1).clamp(min=0)
