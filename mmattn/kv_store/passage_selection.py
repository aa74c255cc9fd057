"""Selected passages: their keys and values put one after the other, before the text of each row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmattn.adapters.joined.joint_softmax import JoinedSlots, JoinedView
from mmattn.adapters.passages.adapter import PassageLayers, Passages
from mmattn.adapters.protocols import Site
from mmattn.errors import ConditionError
from mmattn.kv_store.passage_files import Entry
from mmattn.kv_store.passage_kv import capture


class PassageSelection(Passages):
    """Passages of a `PassageCache` before the texts of a call, given to it as `memory=`; made by its `select`.

    Keys and values are put together at the first call, and used by all later ones.

    Args:
        cache: the passages that were read.
        rows: for each row of text its passages, in the order in which they stand.
        recomputed_tokens: of each passage but the first, how many tokens are read again where they stand.
    """

    def __init__(self, cache: Any, rows: Sequence[Sequence[Entry]], recomputed_tokens: int = 0) -> None:
        self.cache, self.rows, self.recomputed_tokens = cache, [list(row) for row in rows], recomputed_tokens
        self._slots: JoinedSlots | None = None

    @property
    def batch(self) -> int:
        """Number of rows b."""
        return len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Any) -> PassageSelection:
        """Some rows, by number, slice or list."""
        numbers = torch.arange(len(self.rows))[rows].reshape(-1).tolist()
        return PassageSelection(self.cache, [self.rows[number] for number in numbers], self.recomputed_tokens)

    def nbytes(self) -> int:
        """Bytes of keys and values, once they were put together."""
        return 0 if self._slots is None else self._slots.nbytes()

    def slots(self, adapter: PassageLayers) -> JoinedSlots:
        """Keys and values of every layer.

        Raises:
            ConditionError: they were read by another host, or by other weights.
        """
        self.cache.check_adapter(adapter)
        self.cache.check_current()
        if self._slots is None:
            with torch.inference_mode(False), torch.no_grad():
                self._slots = self._put_together(adapter)
        return self._slots

    def _put_together(self, adapter: PassageLayers) -> JoinedSlots:
        moved = adapter.rotations is not None
        starts = [_starts(row) if moved else [0] * len(row) for row in self.rows]
        positions = [
            torch.cat([_NOWHERE, *(start + torch.arange(len(one.ids)) for start, one in zip(begin, row, strict=True))])
            for begin, row in zip(starts, self.rows, strict=True)
        ]
        lengths = torch.tensor([len(one) for one in positions])
        slots = JoinedSlots(
            {site.layer: self._keys(adapter, site, starts) for site in adapter.sites},
            {site.layer: self._values(site) for site in adapter.sites},
            torch.arange(int(lengths.max())) < lengths[:, None],
            pad_sequence(positions, batch_first=True),
            torch.tensor([int(one.max()) + 1 if len(one) else 0 for one in positions]),
        )
        return self._recomputed(adapter, slots) if self.recomputed_tokens else slots

    def _keys(self, adapter: PassageLayers, site: Site, starts: Sequence[Sequence[int]]) -> Tensor:
        rotation = None if adapter.rotations is None else adapter.rotations[site.layer]

        def turned(one: Entry, start: int) -> Tensor:
            keys = one.keys[site.layer].to(site.device)
            return keys if rotation is None or not start else rotation(keys.transpose(0, 1), start).transpose(0, 1)

        rows = [
            [turned(one, start) for one, start in zip(row, begin, strict=True)]
            for row, begin in zip(self.rows, starts, strict=True)
        ]
        assert site.heads is not None
        return _padded(rows, site.heads.num_kv_heads, site.heads.head_dim, site.device)

    def _values(self, site: Site) -> Tensor:
        rows = [[one.values[site.layer].to(site.device) for one in row] for row in self.rows]
        assert site.heads is not None
        return _padded(rows, site.heads.num_kv_heads, site.heads.value_dim or site.heads.head_dim, site.device)

    def _recomputed(self, adapter: PassageLayers, slots: JoinedSlots) -> JoinedSlots:
        """The slots with the first tokens of passages as the host reads them where they now stand.

        Raises:
            ConditionError: the host's keys cannot be moved, or its tokens see back over a limited number of others.
        """
        windows = any(one.has_windows for row in self.rows for one in row)
        if adapter.rotations is None or windows:
            why = "whose layers see back over a window" if windows else "with learned positions"
            raise ConditionError(
                f"recomputed_tokens={self.recomputed_tokens} reads first tokens of passages again where they stand, "
                f"which is not done in a host {why}: leave it out"
            )
        again = [_first_tokens(row, self.recomputed_tokens) for row in self.rows]
        if not any(again):
            return slots
        length = max(map(len, again))
        # A row without any repeats its first slot, whose outcome nobody looks at.
        padded = torch.tensor([row + [row[-1] if row else 0] * (length - len(row)) for row in again])
        ids = [[token for one in row for token in one.ids] or [0] for row in self.rows]
        tokens = torch.tensor([[own[slot] for slot in row] for own, row in zip(ids, padded.tolist(), strict=True)])
        real = torch.arange(length) < torch.tensor([[max(len(row), 1)] for row in again])
        positions = slots.positions.gather(1, padded) if slots.positions.shape[1] else padded
        kept = slots.mask.clone()
        for number, row in enumerate(again):
            kept[number, row] = False
        before = slots.positions[:, None] < positions[..., None]
        own = JoinedSlots(slots.keys, slots.values, kept, slots.positions, torch.zeros_like(slots.offsets))
        found = capture(self.cache.model, self.cache.name, tokens, real, positions, JoinedView(own, before))
        for layer in adapter.layers:
            for number, row in enumerate(again):
                slots.keys[layer][number, :, row] = found.keys[layer][number, :, : len(row)]
                slots.values[layer][number, :, row] = found.values[layer][number, :, : len(row)]
        return slots


_NOWHERE = torch.zeros(0, dtype=torch.long)


def _starts(row: Sequence[Entry]) -> list[int]:
    """Where each passage of a row begins."""
    return [0, *accumulate(len(one.ids) for one in row)][: len(row)]


def _first_tokens(row: Sequence[Entry], count: int) -> list[int]:
    """The numbers of the first slots of each passage but the first."""
    starts = _starts(row)
    return [
        start + token
        for start, one in list(zip(starts, row, strict=True))[1:]
        for token in range(min(count, len(one.ids)))
    ]


def _padded(rows: Sequence[Sequence[Tensor]], heads: int, width: int, device: torch.device) -> Tensor:
    """Slots (m, g, k) of each row as (b, g, m, k), shorter rows filled with zeros."""
    first = next((one for row in rows for one in row), None)
    nothing = torch.zeros(0, heads, width, device=device, dtype=None if first is None else first.dtype)
    return pad_sequence([torch.cat([nothing, *row]) for row in rows], batch_first=True).transpose(1, 2).contiguous()
