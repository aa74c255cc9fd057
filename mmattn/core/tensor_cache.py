"""What is computed from tensors once and read many times; computed again when one of them has changed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class TensorVersion:
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


class TensorCache:
    """What was made of tensors, by key; made again once one of them has changed."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[TensorVersion, Any]] = {}

    def once(self, key: Hashable, sources: Sequence[Tensor], make: Callable[[], Any]) -> Any:
        """What `make` gave for these sources under this key; made without gradients."""
        found = self._made.get(key)
        if found is None or not found[0].holds(sources):
            # What is kept must serve calls outside inference mode, too.
            with torch.inference_mode(False), torch.no_grad():
                found = self._made[key] = (TensorVersion(sources), make())
        return found[1]

    def nbytes(self) -> int:
        """Bytes of what tells its own size: keys and values."""
        return sum(value.nbytes() for _, value in self._made.values() if callable(getattr(value, "nbytes", None)))


def autocast_dtype(device: torch.device | str) -> torch.dtype | None:
    """The dtype of autocast on a device, None where it is off: part of the key of what is computed under it."""
    kind = torch.device(device).type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
