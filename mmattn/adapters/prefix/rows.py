"""The memory of a prefix adapter: which prefixes each row has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmattn.errors import ShapeError
from mmattn.storage.tensor_cache import KeyValueCache


class PrefixRows:
    """The numbers of the prefixes of each row, in their order, with the keys and values computed for them."""

    def __init__(self, numbers: Sequence[Sequence[int]]) -> None:
        self.numbers = tuple(tuple(row) for row in numbers)
        self.cache = KeyValueCache(tuple)

    @staticmethod
    def of(memory: object, count: int, name: str) -> PrefixRows:
        """Check what was given as `memory=` to an adapter with `count` prefixes."""
        if not isinstance(memory, PrefixRows):
            memory = memory.tolist() if isinstance(memory, Tensor) and _are_numbers(memory) else memory
            rows = [memory] if _is_number(memory) else memory
            if not isinstance(rows, (list, tuple)):
                raise ShapeError(_NO_ROWS.format(name=name, value=type(memory).__name__))
            memory = PrefixRows([_row(row, name) for row in rows])
        missing = sorted({number for row in memory.numbers for number in row if not 0 <= number < count})
        if missing:
            raise ShapeError(
                f"adapter {name!r} has prefixes 0 to {count - 1}, and {missing} were asked for; a row without one has "
                "-1 or None"
            )
        return memory

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self.numbers)

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> PrefixRows:
        """Return some rows, by number, slice or list."""
        chosen = torch.arange(len(self.numbers))[rows].reshape(-1).tolist()
        return PrefixRows([self.numbers[row] for row in chosen])

    def nbytes(self) -> int:
        """Return the bytes of the keys and values computed for these rows."""
        return self.cache.nbytes()


def _row(row: object, name: str) -> list[int]:
    """Return the numbers of the prefixes of one row."""
    row = row.tolist() if isinstance(row, Tensor) and _are_numbers(row) else row
    if row is None or (_is_number(row) and row == -1):
        return []
    numbers = [row] if _is_number(row) else row
    if not isinstance(numbers, (list, tuple)) or not all(map(_is_number, numbers)):
        raise ShapeError(_NO_ROWS.format(name=name, value=f"a row of {row!r}"))
    return list(numbers)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_numbers(tensor: Tensor) -> bool:
    return tensor.dim() <= 1 and not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


_NO_ROWS = (
    "the memory of adapter {name!r} (kind 'prefix') says which prefixes stand before each row: a tensor (b,) of their "
    "numbers, -1 for none, or a list such as [0, None, [2, 1]]; got {value}"
)
