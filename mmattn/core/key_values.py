"""`KeyValue`: keys and values of a memory for one layer, computed once and attended to many times.

Three layouts give the same numbers to rounding. *Padded* projects every slot. *Packed* projects and attends to real
slots only. *Absorbed* projects no slot at all: q (M Wk)ᵀ = (q Wkᵀ) Mᵀ and w (M Wv) = (w M) Wv, cheaper while there are
few queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# The absorbed form pays up to this share of the multiplications of projecting; processors with fast half-precision
# matrix products project so quickly that only a few queries are worth it, and only over that many slots.
ABSORB_MARGIN = 0.5
ABSORB_MARGIN_HALF = 0.2
ABSORB_LEAST_HALF = 512

# torch 2.6 cannot tell exporting from compiling.
_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


@dataclass(frozen=True, slots=True)
class KeyValue:
    """Keys and values of a memory for one layer, as `CrossAttention.project` computes them, in one of three layouts.

    * padded: keys and values (b, g, m, k), with `mask` (b, m) or None;
    * packed (`lengths` given): keys and values (1, g, n, k) hold the n real slots of all rows one after the other;
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
        visible: (b, 1, 1, 1) bool, which rows have a real slot, or True where all have; None where it is not known.
        additive: (b, 1, 1, m) float, the mask as it is added to scores; there only where values of other slots are 0,
            so that rows without a real slot give 0 by themselves.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None
    lengths: tuple[int, ...] | None = None
    absorbed: bool = False
    null: bool = False
    finite: bool = False
    visible: Tensor | bool | None = None
    additive: Tensor | None = None
    #: Number of rows b.
    batch: int = field(init=False)
    #: Number of slots m of the memory, padding included and a null slot not.
    slots: int = field(init=False)
    #: Nothing but keys and values of visible slots.
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        batch, slots = self.keys.shape[0], self.keys.shape[2] - int(self.null)
        if self.lengths is not None and self.mask is not None:
            batch, slots = self.mask.shape
        special = self.mask is not None or self.bias is not None or self.absorbed or self.null
        object.__setattr__(self, "batch", batch)
        object.__setattr__(self, "slots", slots)
        object.__setattr__(self, "plain", slots > 0 and not special)

    def rows(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield keys (1, g, m_i, k), values and bias (m_i,) of each row whose length is known, as views."""
        assert self.lengths is not None
        biases: Sequence[Tensor | None] = [None] * len(self.lengths)
        if self.keys.shape[0] != len(self.lengths):
            # Split, not sliced: the gradient of a slice is as large as all rows together.
            if self.bias is not None:
                biases = self.bias[0].split(self.lengths)
            yield from zip(self.keys.split(self.lengths, 2), self.values.split(self.lengths, 2), biases, strict=True)
            return
        if self.bias is not None:
            biases = self.bias.unbind()
        for length, key, value, bias in zip(
            self.lengths, self.keys.unbind(), self.values.unbind(), biases, strict=True
        ):
            yield key[None, :, :length], value[None, :, :length], None if bias is None else bias[:length]

    def row(self, number: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return keys (g, m_i, k), values, bias (m_i,) and mask (m_i,) of one row, as views."""
        if self.lengths is None:
            bias, mask = (None if one is None else one[number] for one in (self.bias, self.mask))
            return self.keys[number], self.values[number], bias, mask
        begin, length = 0, self.lengths[number]
        if self.keys.shape[0] != len(self.lengths):
            begin, number = sum(self.lengths[:number]), 0
        places = slice(begin, begin + length)
        bias = None if self.bias is None else self.bias[number, places]
        return self.keys[number, :, places], self.values[number, :, places], bias, None

    @staticmethod
    def gather(rows: Sequence[tuple[KeyValue, int]]) -> KeyValue:
        """Pad rows of `KeyValue`s that are not absorbed, each by its holder and its number there, to one batch."""
        first = rows[0][0]
        if [number for _, number in rows] == list(range(first.batch)) and all(holder is first for holder, _ in rows):
            return first
        keys, values, biases, masks = zip(*(holder.row(number) for holder, number in rows), strict=True)
        stacked = _stack(keys)
        bias = None if first.bias is None else pad_sequence(list(biases), batch_first=True)
        mask = _stack_masks(masks, [key.shape[1] - first.null for key in keys], stacked)
        finite = all(holder.finite for holder, _ in rows)
        return KeyValue(stacked, _stack(values), mask, bias, null=first.null, finite=finite)

    def pick(self, rows: Tensor, slots: int) -> KeyValue:
        """Return the first `slots` slots of some rows, in the padded layout without a mask."""
        assert not self.absorbed and self.mask is None and self.bias is None
        keys, values = (whole[rows, :, : self.null + slots] for whole in (self.keys, self.values))
        return KeyValue(keys, values, null=self.null, finite=self.finite)

    def append(self, more: KeyValue) -> KeyValue:
        """Return these slots and `more` of the same rows after them, in the padded layout without a mask."""
        assert not (self.absorbed or more.absorbed) and self.mask is None and more.mask is None
        keys = torch.cat([self.keys, more.keys[:, :, more.null :]], 2)
        values = torch.cat([self.values, more.values[:, :, more.null :]], 2)
        return KeyValue(keys, values, null=self.null, finite=self.finite and more.finite)

    def without_null(self) -> KeyValue:
        """Return the same without the learned first slot, as views."""
        if not self.null:
            return self
        bias = None if self.bias is None else self.bias[:, 1:]
        return replace(self, keys=self.keys[:, :, 1:], values=self.values[:, :, 1:], bias=bias, null=False)

    def unchecked(self) -> list[Tensor]:
        """Return the tensors that are not known to be finite."""
        unchecked = [] if self.finite else [self.keys, self.values]
        return unchecked if self.bias is None else [*unchecked, self.bias]

    def nbytes(self) -> int:
        """Return the bytes held, counting storage shared by keys and values once."""
        return self.keys.nbytes + (0 if self.values is self.keys else self.values.nbytes)


def _stack(rows: Sequence[Tensor]) -> Tensor:
    """Stack rows (g, m_i, k) to (b, g, m, k), padded to the longest."""
    longest = max(row.shape[1] for row in rows)
    return torch.stack([F.pad(row, (0, 0, 0, longest - row.shape[1])) for row in rows])


def _stack_masks(masks: Sequence[Tensor | None], lengths: Sequence[int], like: Tensor) -> Tensor | None:
    """Stack masks (m_i,) of rows of these lengths to (b, m), or None where all slots are real."""
    if len(set(lengths)) == 1 and all(mask is None for mask in masks):
        return None
    real = [like.new_ones(length, dtype=torch.bool) for length in lengths]
    return pad_sequence(
        [one if mask is None else mask for one, mask in zip(real, masks, strict=True)], batch_first=True
    )


def real_slots_first(mask: Tensor, lengths: tuple[int, ...]) -> bool:
    """Return whether in each row of mask (b, m) all real slots come before the padding."""
    ends = torch.tensor(lengths, device=mask.device)[:, None]
    return bool((mask == (torch.arange(mask.shape[1], device=mask.device) < ends)).all())


def pack(tensor: Tensor, mask: Tensor, lengths: tuple[int, ...], first: bool) -> Tensor:
    """Return the real slots of all rows of a tensor (b, m, …), one after the other (1, n, …)."""
    if first:
        return torch.cat([row[:length] for row, length in zip(tensor.unbind(), lengths, strict=True)])[None]
    return tensor.flatten(0, 1).index_select(0, mask.flatten().nonzero()[:, 0])[None]


def absorbing_pays(queries: int, slots: float, rows: int, half: bool, *, dim: int, heads: tuple[int, int, int]) -> bool:
    """Return whether wider queries, scores and results cost less than keys and values of every slot; heads: h, g, k."""
    if _exporting():
        return False  # the program would hold only for lengths of the same answer
    margin = ABSORB_MARGIN
    if half:
        margin = ABSORB_MARGIN_HALF if rows * slots >= ABSORB_LEAST_HALF else 0
    h, g, k = heads
    absorbed = queries * h * ((dim - k) * slots + k * dim)
    return absorbed < margin * slots * dim * g * k
