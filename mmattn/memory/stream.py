"""`MemoryStream`: a memory that grows while it is attended to, and forgets what is older than its window."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmattn.errors import ConditionError, ShapeError, check_int
from mmattn.memory.memory import Memory


class MemoryStream:
    """A memory whose slots arrive over time: frames, samples of a sensor, new passages.

    Pass it as `memory=`. Each forward of the host sees the latest `window` slots that have arrived at its start, so in
    `generate` each token sees the slots of its time. Call `append` at any time, from any thread. Keys and values of a
    slot are projected once. For a known text, `model(ids, memory=whole, arrived=counts, window=window)` computes the
    same in one forward, with gradients.

    Args:
        dim: e, width of each slot.
        window: number of latest slots that are visible; None for all.
        rows: b of the text; slots arrive in all rows at once.

    >>> stream = MemoryStream(dim=24, window=5)
    >>> for frame in torch.randn(7, 1, 1, 24):
    ...     stream.append(frame)
    >>> stream.arrived, stream.memory()
    (7, Memory(b=1, m=5, e=24, float32))
    """

    def __init__(self, dim: int, *, window: int | None = None, rows: int = 1) -> None:
        self.dim, self.rows = check_int("dim", dim), check_int("rows", rows)
        self.window = None if window is None else check_int("window", window)
        #: Held while slots are added or looked up.
        self.lock = threading.RLock()
        #: The cache of keys and values that adapters compute of the slots.
        self.computed: object = None
        #: By forward of a host, the slots that it sees, which are the same for all adapters.
        self.ranges: WeakKeyDictionary[object, tuple[int, int]] = WeakKeyDictionary()
        self._slots = SlidingBuffer(1, self.window)

    @property
    def arrived(self) -> int:
        """Number of slots that have arrived, including forgotten slots."""
        return self._slots.stop

    def append(self, slots: Memory | Tensor) -> None:
        """Append slots.

        Args:
            slots: (b, n, e), a tensor or a `Memory` without padding. The first call sets device and dtype.

        Raises:
            ShapeError: other rows or another width.
            NonFiniteError: NaN or infinity.
            ConditionError: slots that need gradients, which a stream does not keep.
        """
        memory = slots if isinstance(slots, Memory) else Memory(slots)
        if (memory.batch, memory.dim) != (self.rows, self.dim):
            raise ShapeError(
                f"slots of this stream are (b, n, e) with b = {self.rows} and e = {self.dim}, got "
                f"{tuple(memory.tokens.shape)}"
            )
        if memory.mask is not None and not bool(memory.mask.all()):
            raise ShapeError("slots of a stream arrive in all rows at once: append them without padding")
        if memory.tokens.requires_grad and torch.is_grad_enabled():
            raise ConditionError(
                "a stream keeps no gradients: detach() the slots, or train on the whole text with "
                "model(ids, memory=slots, arrived=counts)"
            )
        with self.lock:
            self._slots.append(memory.tokens.detach())

    def visible_range(self) -> tuple[int, int]:
        """Return the range of visible slots, counted from 0: the first visible slot, and the next to arrive."""
        stop = self.arrived
        return (0 if self.window is None else max(0, stop - self.window)), stop

    def tokens(self, start: int, stop: int) -> Tensor:
        """Return slots by their numbers, (b, stop - start, e); raise `ConditionError` for forgotten slots."""
        if self._slots.data is None:
            return torch.zeros(self.rows, 0, self.dim)
        return self._slots.get(start, stop)

    def memory(self) -> Memory:
        """Return the visible slots."""
        with self.lock:
            return Memory(self.tokens(*self.visible_range()), check_finite=False)

    def __repr__(self) -> str:
        return f"MemoryStream(dim={self.dim}, window={self.window}, rows={self.rows}, arrived={self.arrived})"


class SlidingBuffer:
    """The latest `window` places of tensors that arrive one after the other along a dimension, numbered from `start`.

    Views stay as they are while more is added: room that has been written is never written again.
    """

    def __init__(self, dim: int, window: int | None, start: int = 0) -> None:
        self.dim, self.window = dim, window
        self.data: Tensor | None = None
        self.first = self.stop = start

    def append(self, more: Tensor) -> None:
        """Add places, alike in all other dimensions."""
        count = more.shape[self.dim]
        if self.data is None or self.stop - self.first + count > self.data.shape[self.dim]:
            remaining = self.stop - self.first if self.window is None else min(self.stop - self.first, self.window)
            shape = list(more.shape)
            shape[self.dim] = 2 * (remaining + max(count, 8))
            like = more if self.data is None else self.data
            data = torch.empty(shape, dtype=like.dtype, device=like.device)
            if self.data is not None:
                data.narrow(self.dim, 0, remaining).copy_(self.get(self.stop - remaining, self.stop))
            self.data, self.first = data, self.stop - remaining
        self.data.narrow(self.dim, self.stop - self.first, count).copy_(more)
        self.stop += count

    def get(self, start: int, stop: int) -> Tensor:
        """Return places by their numbers, a view, or raise `ConditionError` where they are forgotten."""
        if self.data is None or start < self.first:
            raise ConditionError(
                f"slots {start} to {stop} were asked for, and those before {self.first} are forgotten: many slots "
                "arrived within one forward; make the window wider"
            )
        return self.data.narrow(self.dim, start - self.first, stop - start)
