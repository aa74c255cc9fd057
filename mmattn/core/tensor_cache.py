"""What is computed from tensors once and used many times; computed again when one of them has changed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn


class TensorVersion:
    """The state of some tensors, to tell later whether one was edited in place or given other storage.

    The storage is held, so that its address cannot come back with other contents. An edit through `tensor.data` goes
    unseen: torch does not count it.

    Args:
        tensors: whose state it is.

    >>> weight = torch.zeros(3)
    >>> version = TensorVersion([weight])
    >>> version.holds([weight]), version.holds([weight.add_(1)])
    (True, False)
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


class ModuleVersion:
    """What parts and parameters some modules have, to tell later whether one was taken out or replaced.

    Args:
        modules: each for itself; what is in it has to be named as well.

    >>> from torch import nn
    >>> layer = nn.Linear(2, 3)
    >>> version = ModuleVersion([layer])
    >>> version.holds()
    True
    >>> layer.bias = None
    >>> version.holds()
    False
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        owners: list[dict[str, Any]] = [owner for one in modules for owner in (one._modules, one._parameters) if owner]
        self._seen = [(owner, tuple(owner.values())) for owner in owners]

    def holds(self) -> bool:
        """Whether they are all as they were."""
        return all(len(owner) == len(seen) and all(map(is_, owner.values(), seen)) for owner, seen in self._seen)


class TensorCache:
    """Values computed from tensors, by key; computed again once one of the tensors has changed.

    >>> cache, weight = TensorCache(), torch.ones(3)
    >>> cache.get("sum", [weight], lambda: int(weight.sum())), cache.get("sum", [weight], lambda: "not computed again")
    (3, 3)
    >>> _ = weight.add_(1)
    >>> cache.get("sum", [weight], lambda: int(weight.sum()))
    6
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[TensorVersion, Any]] = {}

    def get(self, key: Hashable, sources: Sequence[Tensor], compute: Callable[[], Any]) -> Any:
        """The value of a key for these sources, cached or computed now, without gradients.

        Args:
            key: of the value.
            sources: all tensors that the value depends on.
            compute: gives the value.
        """
        entry = self._entries.get(key)
        if entry is None or not entry[0].holds(sources):
            # A cached value must serve calls outside inference mode, too.
            with torch.inference_mode(False), torch.no_grad():
                entry = self._entries[key] = (TensorVersion(sources), compute())
        return entry[1]

    def nbytes(self) -> int:
        """Bytes of the values that tell their own size: keys and values."""
        return sum(value.nbytes() for _, value in self._entries.values() if callable(getattr(value, "nbytes", None)))


def autocast_dtype(device: torch.device | str) -> torch.dtype | None:
    """The dtype of autocast on a device, None where it is off: part of the key of what is computed under it."""
    kind = (device if isinstance(device, torch.device) else torch.device(device)).type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
