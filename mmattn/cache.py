"""What is computed once and read many times, owned by whoever holds the object.

Keys and values of a memory, made once (`KeyValue`), and of a text that grows (`GrowingCache`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mmattn.errors import ShapeError


@dataclass(frozen=True, slots=True)
class KeyValue:
    """Keys and values of a memory for one layer, made by `CrossAttention.project`.

    Three layouts, told apart by `lengths` and `absorbed`:

    * padded: keys (b, g, m, k), values (b, g, m, k), with `mask` (b, m) or None;
    * packed (`lengths` given): keys (1, g, n, k) hold the real slots of all rows one behind the other, n in all;
      padding is neither projected nor attended to; `mask` still tells which of the m slots they were;
    * absorbed: keys and values are the memory itself, (b, 1, m, e) or packed (1, 1, n, e), shared by every layer; the
      projections are applied to the query and to the result instead. With `lengths` and b rows, only the first slots
      of each row are read.

    Args:
        bias: (b, m) or packed (1, n) float, added to the scores of each slot.
        null: a learned first slot has been put in front of every row.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None
    lengths: tuple[int, ...] | None = None
    absorbed: bool = False
    null: bool = False

    @property
    def batch(self) -> int:
        """Number of rows b."""
        return self.keys.shape[0] if self.lengths is None else len(self.lengths)

    @property
    def slots(self) -> int:
        """Number of slots m of the memory, padding included and a null slot not."""
        if self.lengths is not None:
            assert self.mask is not None
            return self.mask.shape[1]
        return self.keys.shape[2] - self.null

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
        """Rows of one or several, alike in `absorbed` and `null`, under each other; padded to the longest."""
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
        made = stack(keys)
        return KeyValue(
            made, made if first.absorbed else stack(values), mask, bias, absorbed=first.absorbed, null=first.null
        )

    def pick(self, rows: Tensor, slots: int) -> KeyValue:
        """The first `slots` slots of some rows, in the padded layout without a mask."""
        assert not self.absorbed and self.mask is None and self.bias is None
        keys, values = (made[rows, :, : self.null + slots] for made in (self.keys, self.values))
        return KeyValue(keys, values, null=self.null)

    def append(self, more: KeyValue) -> KeyValue:
        """These slots and others of the same rows behind them, in the padded layout without a mask."""
        assert not (self.absorbed or more.absorbed) and self.mask is None and more.mask is None
        keys = torch.cat([self.keys, more.keys[:, :, more.null :]], 2)
        values = torch.cat([self.values, more.values[:, :, more.null :]], 2)
        return KeyValue(keys, values, null=self.null)

    def nbytes(self) -> int:
        """Bytes held, counting storage shared by keys and values once."""
        size = self.keys.nbytes
        return size if self.values is self.keys else size + self.values.nbytes


class Cache(Protocol):
    """What attention and generation ask of the keys and values of a text that grows."""

    @property
    def length(self) -> int:
        """Tokens held, between two calls of a model."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take the new tokens (b, g, l, k) of a layer, and give those of all tokens so far (b, g, m, k)."""

    def reorder(self, rows: Sequence[int]) -> None:
        """Go on with these rows, some of them several times (beams), some not at all."""


class GrowingCache:
    """Keys and values of a text that grows, layer by layer, each row in one piece.

    >>> cache = GrowingCache()
    >>> keys, values = cache.append(0, torch.ones(2, 3, 5, 7), torch.ones(2, 3, 5, 7))
    >>> cache.append(0, keys[:, :, :1], values[:, :, :1])[0].shape, cache.length
    (torch.Size([2, 3, 6, 7]), 6)
    """

    def __init__(self) -> None:
        self._layers: list[tuple[Tensor, Tensor]] = []

    @property
    def length(self) -> int:
        """Tokens held, between two calls of a model."""
        return self._layers[0][0].shape[2] if self._layers else 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take the new tokens (b, g, l, k) of a layer, and give those of all tokens so far (b, g, m, k).

        Raises:
            ShapeError: other rows or heads than those held.
        """
        if layer == len(self._layers):
            self._layers.append((keys, values))
            return keys, values
        held = self._layers[layer]
        if [*held[0].shape[:2], held[0].shape[3]] != [*keys.shape[:2], keys.shape[3]]:
            raise ShapeError(
                f"the cache holds keys {tuple(held[0].shape)} (b, g, m, k) and got {tuple(keys.shape)} to put behind "
                "them: reorder it to the rows of the text, or begin a new one"
            )
        self._layers[layer] = torch.cat([held[0], keys], 2), torch.cat([held[1], values], 2)
        return self._layers[layer]

    def reorder(self, rows: Sequence[int]) -> None:
        """Go on with these rows, some of them several times (beams), some not at all; each is a copy."""
        if self._layers:
            picked = torch.tensor(list(rows), dtype=torch.long, device=self._layers[0][0].device)
            self._layers = [
                (keys.index_select(0, picked), values.index_select(0, picked)) for keys, values in self._layers
            ]

    def fork(self, length: int | None = None) -> GrowingCache:
        """Another cache that begins with the first `length` tokens of this one, all by default."""
        other = GrowingCache()
        other._layers = [(keys[:, :, :length], values[:, :, :length]) for keys, values in self._layers]
        return other

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._layers)


class Snapshot:
    """Remembers tensors as they are, to tell later whether one was edited in place or given other storage.

    The storage is held, so that its address cannot come back with other contents. An edit through `tensor.data` goes
    unseen: torch does not count it.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._seen = [(tensor.data, tensor._version) for tensor in tensors]

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Whether these are the same tensors with the same contents."""
        now = list(tensors)
        return len(now) == len(self._seen) and all(
            tensor._version == version
            and tensor.data_ptr() == data.data_ptr()
            and tensor.dtype is data.dtype
            and tensor.shape == data.shape
            and tensor.stride() == data.stride()
            for tensor, (data, version) in zip(now, self._seen, strict=True)
        )


class Made:
    """What was made of tensors, by key; made again once one of them has changed."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Snapshot, Any]] = {}

    def once(self, key: Hashable, sources: Sequence[Tensor], make: Callable[[], Any]) -> Any:
        """What `make` gave for these sources under this key; made without gradients."""
        found = self._made.get(key)
        if found is None or not found[0].holds(sources):
            # What is kept must serve calls outside inference mode, too.
            with torch.inference_mode(False), torch.no_grad():
                found = self._made[key] = (Snapshot(sources), make())
        return found[1]

    def nbytes(self) -> int:
        """Bytes of keys and values held."""
        return sum(made.nbytes() for _, made in self._made.values() if isinstance(made, KeyValue))


def real_slots_first(mask: Tensor, lengths: tuple[int, ...]) -> bool:
    """Whether in each row of mask (b, m) all real slots come before the padding."""
    ends = torch.tensor(lengths, device=mask.device)[:, None]
    return bool((mask == (torch.arange(mask.shape[1], device=mask.device) < ends)).all())


def pack(tensor: Tensor, mask: Tensor, lengths: tuple[int, ...], first: bool) -> Tensor:
    """The real slots of all rows of a tensor (b, m, …), one behind the other (1, n, …); `first` as told above."""
    if first:
        return torch.cat([row[:length] for row, length in zip(tensor.unbind(), lengths, strict=True)])[None]
    return tensor.flatten(0, 1).index_select(0, mask.flatten().nonzero()[:, 0])[None]
