"""Which rows of a batch a host's `generate` goes on with, where some have ended or are written again.

Whisper writes long recordings segment by segment, for the recordings that have not ended, and writes a segment again at
a higher temperature where it failed. Each row that is left goes on with its own memory: its hidden states are put where
they stood in the whole batch, and taken from there again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.protocols import View
from mmattn.adapters.text_state import TextState
from mmattn.errors import ConditionError


class RowsLeft:
    """The rows that `generate` goes on with in one segment.

    Args:
        rows: numbers in the whole batch.
        batch: rows of the whole batch.
        padded: to how many rows a batch of fewer is filled up; they are nobody's.
    """

    def __init__(self, rows: Sequence[int], batch: int, padded: int = 0) -> None:
        self.segment, self.batch, self.padded = list(rows), batch, padded
        self.now, self._again = list(rows), list[int]()

    def wrote(self, index: int, again: bool) -> None:
        """One row was written; those that failed are the rows of the next attempt.

        Args:
            index: among the rows of this attempt.
            again: whether it is written again.
        """
        if again:
            self._again.append(self.now[index])
        if index == len(self.now) - 1:
            self.now, self._again = self._again or self.now, []

    def of(self, text: TextState) -> tuple[list[int], int]:
        """The rows of a forward, and how many beams each has.

        Raises:
            ConditionError: another number of rows.
        """
        # What Whisper compares with silence is the first attempt, without beams.
        for rows in (self.now, self.segment):
            count = max(len(rows), self.padded)
            times, rest = divmod(text.rows, count)
            if not rest and times in {1, *text.expansions}:
                return rows, times
        raise ConditionError(
            f"generate went on with {len(self.now)} of {self.batch} rows, and a forward has {text.rows}: which memory "
            "is theirs is not known; generate one row at a time"
        )


class RowsView(View):
    """What rows that are left see, of a view of the whole batch.

    Args:
        view: of the whole batch.
        places: (n,), where each row stands in it; further rows are nobody's, and pass through.
        batch: its rows.
    """

    def __init__(self, view: View, places: Tensor, batch: int) -> None:
        self.view, self.places, self.batch = view, places, batch

    def apply(self, x: Tensor, block: nn.Module, layer: int, adapter_scale: Any) -> Tensor:
        """What x (n, l, d) becomes at a site."""
        places = self.places.to(x.device)
        whole = x.new_zeros(self.batch, *x.shape[1:]).index_copy(0, places, x[: len(places)])
        seen: Tensor = self.view.apply(whole, block, layer, adapter_scale)
        return torch.cat([seen[places], x[len(places) :]])


def whole_text(left: RowsLeft, text: TextState) -> tuple[TextState, Tensor]:
    """A forward as it would be with all rows, and where its own rows stand in that.

    Args:
        left: which rows are left.
        text: of the forward.
    """
    rows, times = left.of(text)
    places = (torch.tensor(rows)[:, None] * times + torch.arange(times)).flatten()
    whole = left.batch * times
    return replace(text, rows=whole, inputs=None, expansions={*text.expansions, whole}), places
