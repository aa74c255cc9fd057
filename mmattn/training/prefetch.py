"""Items made in a thread beside their use: what takes a step its rows, and makes a batch of them, is not waited for."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class Prefetched(Generic[T]):
    """An iterator whose items a thread takes from another one, some of them ahead.

    What the other one raises is raised where its item would have come. Closing it ends the thread, and closes the other
    one where that can be closed.

    Args:
        items: the other one; it is advanced in the thread alone.
        ahead: how many items may wait to be used; with 0 there is no thread, and each is taken when it is asked for.

    Attributes:
        waited: seconds that its user has waited for items.

    >>> with contextlib.closing(Prefetched(range(3), ahead=2)) as items:
    ...     list(items)
    [0, 1, 2]
    """

    def __init__(self, items: Iterable[T], ahead: int) -> None:
        self.waited = 0.0
        self._items, self._ended = iter(items), threading.Event()
        self._queue: queue.Queue[tuple[Callable[[Any], T], Any]] = queue.Queue(maxsize=max(1, ahead))
        self._thread: threading.Thread | None = None
        if ahead:
            self._thread = threading.Thread(target=self._fetch, name="mmattn-prefetch", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        begin = time.perf_counter()
        try:
            if self._thread is None:
                return next(self._items)
            if self._ended.is_set():
                raise StopIteration
            give, item = self._queue.get()
            return give(item)
        finally:
            self.waited += time.perf_counter() - begin

    def close(self) -> None:
        """End the thread; there are no more items."""
        self._ended.set()
        if self._thread is not None:
            while self._thread.is_alive():
                with contextlib.suppress(queue.Empty):
                    self._queue.get_nowait()
                self._thread.join(timeout=0.01)
        close = getattr(self._items, "close", None)
        if close is not None:
            close()

    def _fetch(self) -> None:
        try:
            for item in self._items:
                if not self._put(_given, item):
                    return
            self._put(self._raised, StopIteration())
        except BaseException as error:
            self._put(self._raised, error)

    def _put(self, give: Callable[[Any], T], item: Any) -> bool:
        """Return True if the queue took the item, False if its reader has ended."""
        while not self._ended.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put((give, item), timeout=0.1)
                return True
        return False

    def _raised(self, error: BaseException) -> T:
        self._ended.set()
        raise error


def _given(item: T) -> T:
    return item


def pinned(batch: Any) -> Any:
    """Return a batch in page-locked memory, which a device reads while it computes."""
    if hasattr(batch, "pin_memory"):
        return batch.pin_memory()
    if isinstance(batch, dict):
        return {name: pinned(value) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return type(batch)(pinned(value) for value in batch)
    return batch


def on_device(batch: Any, device: torch.device | str) -> Any:
    """A batch on a device; what is pinned is copied while the device computes."""
    from accelerate.utils import send_to_device

    return send_to_device(batch, device, non_blocking=True)
