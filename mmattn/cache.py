"""What is computed once and read many times: the keys and values of a memory, owned by whoever holds the object."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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

    def nbytes(self) -> int:
        """Bytes held, counting storage shared by keys and values once."""
        size = self.keys.nbytes
        return size if self.values is self.keys else size + self.values.nbytes


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
