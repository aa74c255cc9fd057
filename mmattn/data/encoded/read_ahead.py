"""Things read in their order, some of them ahead, by threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class ReadAhead(Generic[K, T]):
    """An iterator over what a function reads for each key, in the order of the keys; a context that ends its threads.

    Args:
        read: reads one; it is called in several threads at once.
        keys: of what is read.
        ahead: how many are read, or being read, before they are asked for.
        threads: that read.

    >>> with ReadAhead(str.upper, "abc", ahead=2, threads=2) as letters:
    ...     list(letters)
    ['A', 'B', 'C']
    """

    def __init__(self, read: Callable[[K], T], keys: Iterable[K], ahead: int, threads: int) -> None:
        self._read, self._keys, self._ahead = read, iter(keys), ahead
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="mmattn-read-ahead")
        self._begun: deque[Future[T]] = deque()

    def __enter__(self) -> ReadAhead[K, T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while len(self._begun) <= self._ahead:
            try:
                key = next(self._keys)
            except StopIteration:
                break
            self._begun.append(self._threads.submit(self._read, key))
        if not self._begun:
            raise StopIteration
        return self._begun.popleft().result()
