"""Keys and values that another language model has computed of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ConditionError


@dataclass(frozen=True)
class AugmentedPrompt:
    """What `AugmentingModel.prefill` read: the memory of a `FusedCacheAdapter`, for any number of calls.

    Args:
        states: by layer of the model (b, p, e), keys of all heads, turned to position 0, and values.
        real: (b, p) bool, which tokens are no padding.
        ids: (b, p), of the tokens; a text that begins with others is refused. None where they are not known.
    """

    states: tuple[Tensor, ...]
    real: Tensor
    ids: Tensor | None = None

    @property
    def batch(self) -> int:
        """Number of rows b."""
        return len(self.real)

    def __getitem__(self, rows: Any) -> AugmentedPrompt:
        """Some rows, by number, slice or list."""
        chosen = torch.arange(self.batch)[rows].reshape(-1)
        ids = None if self.ids is None else self.ids[chosen]
        return AugmentedPrompt(tuple(one[chosen] for one in self.states), self.real[chosen], ids)

    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(one.nbytes for one in self.states)

    def left_aligned(self) -> AugmentedPrompt:
        """The same with the real tokens of each row first, 0 after them."""
        real = self.real
        longest = int(real.sum(1).max()) if real.numel() else 0
        order = torch.sort((~real).to(torch.uint8), dim=1, stable=True).indices[:, :longest]
        kept = real.gather(1, order)
        states = tuple(
            one.gather(1, order[..., None].expand(-1, -1, one.shape[2])).masked_fill(~kept[..., None], 0)
            for one in self.states
        )
        return AugmentedPrompt(states, kept, None if self.ids is None else self.ids.gather(1, order))

    def check_begins(self, ids: Tensor, places: Tensor, visible: Tensor, name: str) -> None:
        """Refuse a text that begins otherwise than this, which is left-aligned.

        Args:
            ids: (b, t), of a text.
            places: (b, t), the number of each token among the real ones of its row.
            visible: (b, t) bool, tokens that belong to the prompt.
            name: of the adapter that reads this.

        Raises:
            ConditionError: another token.
        """
        if self.ids is None:
            return
        known = self.ids.to(ids.device)
        read = known.gather(1, places.clamp(max=max(known.shape[1] - 1, 0)))
        wrong = ((read != ids) & visible).nonzero()
        if len(wrong):
            row, token = wrong[0].tolist()
            raise ConditionError(
                f"adapter {name!r} was given what a model read of another prompt: token {token} of row {row} is "
                f"{int(ids[row, token])}, and it read {int(read[row, token])}; prefill the very prompt with which the "
                "text begins"
            )
