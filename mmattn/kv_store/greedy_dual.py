"""A byte budget that keeps the items that save most per byte."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
#: Uses are halved after so many for each item that is kept (TinyLFU proposes 8 to 16), and not before LEAST_USES.
USES_PER_ITEM, LEAST_USES = 10, 1000


class GreedyDual(Generic[Key]):
    """A byte budget. The value of an item is uses × cost / bytes; the items of least value go first.

    This is GreedyDual-Size-Frequency (L. Cherkasova, HPL-98-69R1, 1998, equation 1), with the ageing of TinyLFU (arXiv
    1512.00727, section 3.3) in the place of its clock: uses are counted of items that are not kept, too, and halved
    from time to time. So an item that is used once displaces none that is used often.

    Args:
        max_bytes: the budget; None for no limit.

    >>> budget = GreedyDual(100)
    >>> budget.add("often", 60, cost=60), budget.add("dear", 40, cost=400)
    ([], [])
    >>> budget.use("often"), budget.use("dear"), budget.use("once"), budget.use("often")
    (None, None, None, None)
    >>> budget.add("once", 60, cost=60), budget.add("dearer", 60, cost=60)
    (None, None)
    >>> budget.use("once"), budget.use("once")
    (None, None)
    >>> budget.add("once", 60, cost=60), budget.nbytes
    (['often'], 100)
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = math.inf if max_bytes is None else max_bytes
        self.nbytes = 0
        self._items: dict[Key, tuple[int, float]] = {}  # bytes, cost of a byte
        self._uses: Counter[Key] = Counter()
        self._counted = 0
        self._lock = threading.Lock()

    def use(self, key: Key) -> None:
        """Count a use of an item, kept or not."""
        with self._lock:
            self._uses[key] += 1
            self._counted += 1
            if self._counted > max(USES_PER_ITEM * len(self._items), LEAST_USES):
                self._uses = Counter({key: uses // 2 for key, uses in self._uses.items() if uses > 1})
                self._counted = self._uses.total()

    def add(self, key: Key, nbytes: int, cost: float) -> list[Key] | None:
        """Keep an item, and return those that go for it; None if it is worth less than they are.

        Args:
            key: the item.
            nbytes: its size.
            cost: of computing it, in any unit.
        """
        with self._lock:
            self._drop(key)
            value, victims = self._uses[key] * cost / nbytes, []
            excess = self.nbytes + nbytes - self.max_bytes
            for other in sorted(self._items, key=self._value) if excess > 0 else ():
                if excess <= 0 or self._value(other) > value:
                    break
                victims.append(other)
                excess -= self._items[other][0]
            if excess > 0:
                return None
            for other in victims:
                self._drop(other)
            self._items[key] = nbytes, cost / nbytes
            self.nbytes += nbytes
            return victims

    def set_items(self, items: Mapping[Key, tuple[int, float]]) -> None:
        """Keep these items with their bytes and costs, and no others, whatever the budget."""
        with self._lock:
            self._items = {key: (nbytes, cost / nbytes) for key, (nbytes, cost) in items.items()}
            self.nbytes = sum(nbytes for nbytes, _ in items.values())

    def _drop(self, key: Key) -> None:
        self.nbytes -= self._items.pop(key, (0, 0.0))[0]

    def _value(self, key: Key) -> float:
        return self._uses[key] * self._items[key][1]
