"""Rows of a batch with which a host's `generate` continues, when others have ended.

Whisper generates long recordings segment by segment, for the recordings that have not ended, and generates a segment
again at a higher temperature where it failed. Each row keeps its memory: its hidden states are put at its place in the
whole batch, and taken from there.
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
    """The rows with which `generate` continues in one segment.

    Args:
        rows: numbers in the whole batch.
        batch: rows of the whole batch.
        padded: number of rows to which a smaller batch is padded.
    """

    def __init__(self, rows: Sequence[int], batch: int, padded: int = 0) -> None:
        self.segment, self.batch, self.padded = list(rows), batch, padded
        self.now, self._again = list(rows), list[int]()

    def wrote(self, index: int, again: bool) -> None:
        """Note that a row was generated; those that failed are the rows of the next attempt."""
        if again:
            self._again.append(self.now[index])
        if index == len(self.now) - 1:
            self.now, self._again = self._again or self.now, []

    def of(self, text: TextState) -> tuple[list[int], int]:
        """Return the rows of a forward, and the number of beams of each."""
        # Whisper compares the first attempt, without beams, with silence.
        for rows in (self.now, self.segment):
            count = max(len(rows), self.padded)
            times, rest = divmod(text.rows, count)
            if not rest and times in {1, *text.expansions}:
                return rows, times
        raise ConditionError(
            f"generate continues with {len(self.now)} of {self.batch} rows, but a forward has {text.rows}, so "
            "the memory of each is unknown: generate one row at a time"
        )


class RowsView(View):
    """A view of the whole batch for some of its rows.

    Args:
        view: of the whole batch.
        places: (n,), the row of the batch for each row; further rows are padding, and pass through.
        batch: rows of the whole batch.
    """

    def __init__(self, view: View, places: Tensor, batch: int) -> None:
        self.view, self.places, self.batch = view, places, batch

    def apply(self, x: Tensor, block: nn.Module, layer: int, adapter_scale: Any) -> Tensor:
        """Return x (n, l, d) with what the view adds."""
        places = self.places.to(x.device)
        whole = x.new_zeros(self.batch, *x.shape[1:]).index_copy(0, places, x[: len(places)])
        changed: Tensor = self.view.apply(whole, block, layer, adapter_scale)
        return torch.cat([changed[places], x[len(places) :]])


def whole_text(left: RowsLeft, text: TextState) -> tuple[TextState, Tensor]:
    """Return the text of a forward with all rows, and the places of its own rows in it."""
    rows, times = left.of(text)
    places = (torch.tensor(rows)[:, None] * times + torch.arange(times)).flatten()
    whole = left.batch * times
    return replace(text, rows=whole, inputs=None, expansions={*text.expansions, whole}), places
