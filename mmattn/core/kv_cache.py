"""`KeyValue`: keys and values of a memory for one layer, computed once and attended to many times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KeyValue:
    """Keys and values of a memory for one layer, as `CrossAttention.project` computes them.

    It has one of three layouts, by `lengths` and `absorbed`:

    * padded: keys (b, g, m, k), values (b, g, m, k), with `mask` (b, m) or None;
    * packed (`lengths` given): keys (1, g, n, k) hold the real slots of all rows one after the other, n in all;
      padding is neither projected nor attended to; `mask` still tells which of the m slots they were;
    * absorbed: keys and values are the memory itself, (b, 1, m, e) or packed (1, 1, n, e), shared by every layer; the
      projections are applied to the query and to the result instead. With `lengths` and b rows, only the first slots
      of each row are read.

    Args:
        keys: in one of the layouts.
        values: likewise.
        mask: (b, m) bool, which slots are real; None where all are.
        bias: (b, m) or packed (1, n) float, added to the scores of each slot.
        lengths: number of real slots of each row, where only those are there.
        absorbed: keys and values are the memory itself.
        null: a learned first slot has been put in front of every row.
        finite: known to hold neither NaN nor infinity, so that masks over queries need not look for them.
        seen: (b, 1, 1, 1) bool, which rows have a slot that may be seen, or True where all are known to; None where it
            is not known.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None
    lengths: tuple[int, ...] | None = None
    absorbed: bool = False
    null: bool = False
    finite: bool = False
    seen: Tensor | bool | None = None
    #: Number of rows b.
    batch: int = field(init=False)
    #: Number of slots m of the memory, padding included and a null slot not.
    slots: int = field(init=False)
    #: Nothing but keys and values of slots that all may be seen.
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        if self.lengths is None:
            batch, slots = self.keys.shape[0], self.keys.shape[2] - self.null
        else:
            assert self.mask is not None
            batch, slots = len(self.lengths), self.mask.shape[1]
        object.__setattr__(self, "batch", batch)
        object.__setattr__(self, "slots", slots)
        special = self.lengths is not None or self.mask is not None or self.bias is not None
        object.__setattr__(self, "plain", slots > 0 and not (special or self.absorbed or self.null))

    def rows(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Keys (1, g, m_i, k), values and bias (m_i,) of each row whose length is known, as views."""
        assert self.lengths is not None
        bias: Iterable[Tensor | None] = [None] * len(self.lengths)
        if self.keys.shape[0] != len(self.lengths):
            # Split, not sliced: the gradient of a slice is as large as all rows together.
            keys, values = self.keys.split(self.lengths, 2), self.values.split(self.lengths, 2)
            if self.bias is not None:
                bias = self.bias[0].split(self.lengths)
            yield from zip(keys, values, bias, strict=True)
            return
        if self.bias is not None:
            bias = self.bias.unbind()
        for length, key, value, own in zip(self.lengths, self.keys.unbind(), self.values.unbind(), bias, strict=True):
            yield key[None, :, :length], value[None, :, :length], None if own is None else own[:length]

    def row(self, number: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys (g, m_i, k), values, bias (m_i,) and mask (m_i,) of one row, as views; None for what there is not."""
        if self.lengths is None:
            bias, mask = (None if one is None else one[number] for one in (self.bias, self.mask))
            return self.keys[number], self.values[number], bias, mask
        shared = self.keys.shape[0] != len(self.lengths)
        begin, holder = (sum(self.lengths[:number]), 0) if shared else (0, number)
        own = slice(begin, begin + self.lengths[number])
        bias = None if self.bias is None else self.bias[holder, own]
        return self.keys[holder, :, own], self.values[holder, :, own], bias, None

    @staticmethod
    def gather(rows: Sequence[tuple[KeyValue, int]]) -> KeyValue:
        """Rows of one or several `KeyValue`, alike in `absorbed` and `null`, as one batch padded to the longest.

        Args:
            rows: for each row of the result the `KeyValue` that holds it, and its number there.
        """
        first = rows[0][0]
        if [number for _, number in rows] == list(range(first.batch)) and all(holder is first for holder, _ in rows):
            return first
        keys, values, biases, masks = zip(*(holder.row(number) for holder, number in rows), strict=True)
        lengths = [key.shape[1] for key in keys]
        longest = max(lengths)

        def stack(parts: Sequence[Tensor]) -> Tensor:
            return torch.stack([F.pad(part, (0, 0, 0, longest - part.shape[1])) for part in parts])

        mask = bias = None
        if len(set(lengths)) > 1 or any(own is not None for own in masks):
            slots = [key.new_ones(key.shape[1] - first.null, dtype=torch.bool) for key in keys]
            given = [real if own is None else own for real, own in zip(slots, masks, strict=True)]
            mask = torch.nn.utils.rnn.pad_sequence(given, batch_first=True)
        if first.bias is not None:
            bias = torch.nn.utils.rnn.pad_sequence(list(biases), batch_first=True)
        stacked = stack(keys)
        return KeyValue(
            stacked,
            stacked if first.absorbed else stack(values),
            mask,
            bias,
            absorbed=first.absorbed,
            null=first.null,
            finite=all(holder.finite for holder, _ in rows),
        )

    def pick(self, rows: Tensor, slots: int) -> KeyValue:
        """The first `slots` slots of some rows, in the padded layout without a mask."""
        assert not self.absorbed and self.mask is None and self.bias is None
        keys, values = (whole[rows, :, : self.null + slots] for whole in (self.keys, self.values))
        return KeyValue(keys, values, null=self.null, finite=self.finite)

    def append(self, more: KeyValue) -> KeyValue:
        """These slots and `more` of the same rows after them, in the padded layout without a mask."""
        assert not (self.absorbed or more.absorbed) and self.mask is None and more.mask is None
        keys = torch.cat([self.keys, more.keys[:, :, more.null :]], 2)
        values = torch.cat([self.values, more.values[:, :, more.null :]], 2)
        return KeyValue(keys, values, null=self.null, finite=self.finite and more.finite)

    def without_null(self) -> KeyValue:
        """The same without the learned first slot, as views."""
        if not self.null:
            return self
        bias = None if self.bias is None else self.bias[:, 1:]
        return replace(self, keys=self.keys[:, :, 1:], values=self.values[:, :, 1:], bias=bias, null=False)

    def unchecked(self) -> list[Tensor]:
        """What of keys, values and bias is not known to be finite."""
        own = [] if self.finite else [self.keys, self.values]
        return own if self.bias is None else [*own, self.bias]

    def nbytes(self) -> int:
        """Bytes held, counting storage shared by keys and values once."""
        size = self.keys.nbytes
        return size if self.values is self.keys else size + self.values.nbytes


def real_slots_first(mask: Tensor, lengths: tuple[int, ...]) -> bool:
    """Whether in each row of mask (b, m) all real slots come before the padding."""
    ends = torch.tensor(lengths, device=mask.device)[:, None]
    return bool((mask == (torch.arange(mask.shape[1], device=mask.device) < ends)).all())


def pack(tensor: Tensor, mask: Tensor, lengths: tuple[int, ...], first: bool) -> Tensor:
    """The real slots of all rows of a tensor (b, m, …), one after the other (1, n, …).

    Args:
        tensor: (b, m, …).
        mask: (b, m) bool, which slots are real.
        lengths: number of real slots of each row.
        first: whether the real slots come before the padding in every row.
    """
    if first:
        return torch.cat([row[:length] for row, length in zip(tensor.unbind(), lengths, strict=True)])[None]
    return tensor.flatten(0, 1).index_select(0, mask.flatten().nonzero()[:, 0])[None]
