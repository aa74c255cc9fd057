"""Values computed from tensors once and used many times; computed again when one of the tensors has changed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter, is_
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

T = TypeVar("T")
#: Computed values by key, each of the type that its key has.
Values = dict[Hashable, Any]


#: Number of steps of optimizers so far.
_steps = 0


@torch._disable_dynamo  # torch.compiler.disable would import the compiler
def _count_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Count a step as an edit of the parameters: kernels of fused optimizers write to them without counting."""
    global _steps
    _steps += 1
    increment_version(
        [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
    )


register_optimizer_step_post_hook(_count_step)


def is_distributed() -> bool:
    """Return whether this process belongs to a group, in which FSDP2 may gather weights into the same tensor again.

    It does so without counting an edit.
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class TensorVersion:
    """The state of tensors: tells later whether a tensor was edited in place or given other storage.

    Storage is held, so that its address cannot come back with other contents. Steps of optimizers are edits. An edit
    through `tensor.data`, such as `tensor.data.copy_`, goes unnoticed: torch does not count it.

    Args:
        tensors: the tensors.

    >>> weight = torch.zeros(3)
    >>> version = TensorVersion([weight])
    >>> version.holds([weight]), version.holds([weight.add_(1)])
    (True, False)
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        self._storage = list(map(_data, tensors))
        self._state = _state(tensors)

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether these are the same tensors with the same contents."""
        return _state(list(tensors)) == self._state


_version, _dtype, _data = attrgetter("_version"), attrgetter("dtype"), attrgetter("data")


def _state(tensors: list[Tensor]) -> list[object]:
    # Mapped by functions written in C: this runs in every forward.
    return [
        *map(_version, tensors),
        *map(Tensor.data_ptr, tensors),
        *map(Tensor.size, tensors),
        *map(Tensor.stride, tensors),
        *map(_dtype, tensors),
    ]


class ModuleVersion:
    """The sub-modules, parameters and buffers of modules: tells later whether a part was taken out or replaced.

    Args:
        modules: each for itself; its sub-modules have to be among them.

    >>> layer = nn.Linear(2, 3)
    >>> version = ModuleVersion([layer])
    >>> version.holds()
    True
    >>> layer.bias = None
    >>> version.holds()
    False
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._contents = [
            (owner, tuple(owner.values()))
            for module in modules
            for owner in (module._modules, module._parameters, module._buffers)
            if owner
        ]

    def holds(self) -> bool:
        """Return whether they are all as they were."""
        for owner, contents in self._contents:
            if len(owner) != len(contents) or not all(map(is_, owner.values(), contents)):
                return False
        return True


class KeyValueCache:
    """Results computed from one memory, by adapter; dropped when the memory or a weight of the adapter changes.

    One check per adapter and forward covers all weights of the adapter and all tensors of the memory.

    Args:
        tensors: returns the tensors of the memory as they are now, None for those that are not there.

    >>> tokens, adapter = torch.ones(3), nn.Linear(3, 1)
    >>> cache = KeyValueCache(lambda: [tokens])
    >>> cache.values(adapter)["keys"] = tokens * 2
    >>> list(cache.values(adapter))
    ['keys']
    >>> _ = tokens.zero_()
    >>> list(cache.values(adapter))
    []
    """

    def __init__(self, tensors: Callable[[], Sequence[Tensor | None]]) -> None:
        self._tensors = tensors
        self._entries: WeakKeyDictionary[nn.Module, _Entry] = WeakKeyDictionary()

    def values(self, adapter: nn.Module) -> Values:
        """Return the values computed for an adapter under this autocast; none if anything has changed since."""
        entry, tensors = self._entries.get(adapter), self._tensors()
        if entry is None or not entry.holds(tensors):
            entry = self._entries[adapter] = _Entry(adapter, tensors)
        dtype = torch.get_autocast_dtype(entry.device) if torch.is_autocast_enabled(entry.device) else None
        values = entry.values.get(dtype)
        if values is None:
            values = entry.values[dtype] = {}
        return values

    def get(self, adapter: nn.Module, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the value of a key for an adapter, cached or computed now without gradients."""
        return cached(self.values(adapter), key, compute)

    def nbytes(self) -> int:
        """Return the bytes of cached keys and values."""
        by_dtype = [values for entry in self._entries.values() for values in entry.values.values()]
        sizes = [getattr(value, "nbytes", None) for values in by_dtype for value in values.values()]
        return sum(int(size()) for size in sizes if callable(size))


def cached(values: Values, key: Hashable, compute: Callable[[], T]) -> T:
    """Return the value of a key, cached or computed now without gradients."""
    if key not in values:
        # A cached value must serve calls outside inference mode, too.
        with torch.inference_mode(False), torch.no_grad():
            values[key] = compute()
    return values[key]


class _Entry:
    """The values computed for one adapter, and the state of everything they depend on."""

    def __init__(self, adapter: nn.Module, tensors: Sequence[Tensor | None]) -> None:
        parameters = list(adapter.parameters())
        # torch up to 2.11 cannot compile what follows a generator that is held.
        self._modules = ModuleVersion(list(adapter.modules()))
        self._memory = tensors
        self._tensors = [*parameters, *[tensor for tensor in tensors if tensor is not None]]
        self._version = TensorVersion(self._tensors)
        self._steps = _steps
        self.device = parameters[0].device.type if parameters else "cpu"
        self.values: dict[torch.dtype | None, Values] = {}

    def holds(self, tensors: Sequence[Tensor | None]) -> bool:
        if self._steps != _steps and is_distributed():
            return False
        return all(map(is_, tensors, self._memory)) and self._modules.holds() and self._version.holds(self._tensors)


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
        self._entries: dict[Hashable, tuple[TensorVersion, Values]] = {}

    def get(self, key: Hashable, sources: Sequence[Tensor], compute: Callable[[], T]) -> T:
        """Return the value of a key for these sources, cached or computed now without gradients."""
        entry = self._entries.get(key)
        if entry is None or not entry[0].holds(sources):
            entry = self._entries[key] = (TensorVersion(sources), {})
        return cached(entry[1], key, compute)


def autocast_dtype(device: torch.device | str) -> torch.dtype | None:
    """Return the dtype of autocast on a device, None where it is off."""
    kind = (device if isinstance(device, torch.device) else torch.device(device)).type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
