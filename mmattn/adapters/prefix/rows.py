"""Which of the prefixes of a `PrefixAdapter` stand before the text of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmattn.core.tensor_cache import KeyValueCache
from mmattn.errors import ShapeError


class PrefixRows:
    """The numbers of the prefixes of each row, with the keys and values that adapters put together for them.

    Args:
        numbers: of each row, in the order in which they stand.
    """

    def __init__(self, numbers: Sequence[Sequence[int]]) -> None:
        self.numbers = tuple(tuple(row) for row in numbers)
        self.cache = KeyValueCache(tuple)

    @staticmethod
    def of(given: Any, count: int, name: str) -> PrefixRows:
        """What is given as `memory=`, checked.

        Args:
            given: a tensor (b,) or a list, for each row a number, −1 or None for none, or a list of numbers.
            count: how many prefixes there are.
            name: of the adapter.

        Raises:
            ShapeError: something else, or a prefix that is not there.
        """
        if isinstance(given, PrefixRows):
            rows = given
        else:
            given = given.tolist() if isinstance(given, Tensor) and _are_numbers(given) else given
            listed = [given] if _is_number(given) else given
            if not isinstance(listed, (list, tuple)):
                raise ShapeError(_NO_ROWS.format(name=name, given=type(given).__name__))
            rows = PrefixRows([_row(one, name) for one in listed])
        missing = sorted({number for row in rows.numbers for number in row if not 0 <= number < count})
        if missing:
            raise ShapeError(
                f"adapter {name!r} has prefixes 0 to {count - 1}, and {missing} were asked for; a row without one has "
                "-1 or None"
            )
        return rows

    @property
    def batch(self) -> int:
        """Number of rows b."""
        return len(self.numbers)

    @property
    def longest(self) -> int:
        """Prefixes of the row with the most."""
        return max(map(len, self.numbers), default=0)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows: Any) -> PrefixRows:
        """Some rows, by number, slice or list."""
        chosen = torch.arange(len(self.numbers))[rows].reshape(-1).tolist()
        return PrefixRows([self.numbers[row] for row in chosen])

    def nbytes(self) -> int:
        """Return the bytes of the keys and values that were put together."""
        return self.cache.nbytes()


def _row(given: Any, name: str) -> list[int]:
    if given is None:
        return []
    if isinstance(given, Tensor) and _are_numbers(given):
        given = given.tolist()
    if _is_number(given):
        return [] if given == -1 else [given]
    if not isinstance(given, (list, tuple)) or not all(map(_is_number, given)):
        raise ShapeError(_NO_ROWS.format(name=name, given=f"a row of {given!r}"))
    return list(given)


def _is_number(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _are_numbers(given: Tensor) -> bool:
    return given.dim() <= 1 and not (given.is_floating_point() or given.is_complex() or given.dtype is torch.bool)


_NO_ROWS = (
    "the memory of adapter {name!r} (kind 'prefix') says which prefixes stand before each row: a tensor (b,) of their "
    "numbers, -1 for none, or a list such as [0, None, [2, 1]]; got {given}"
)
