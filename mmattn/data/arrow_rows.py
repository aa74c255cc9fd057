"""Tables on the disk that `DatasetRows` reads as it does a dataset of Hugging Face: tars and Lance datasets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from mmattn.data.rows import KEYS


class RowTable(Sequence[Mapping[str, Any]]):
    """A table, whose rows are read when they are asked for.

    Attributes:
        described: what it is, in a word or two.
        column_names: of its columns.
        fingerprint: what tells it from another table.
    """

    described: str
    column_names: Sequence[str]
    fingerprint: str
    features = None

    def default_columns(self, host: str) -> dict[str, str]:
        """From keys of a row to columns: those of the same names."""
        return {key: key for key in KEYS[host] if key in self.column_names}

    def select(self, numbers: Sequence[int]) -> RowTable:
        """The rows of these numbers, in their order."""
        return _Selected(self, numbers)

    def select_columns(self, names: Sequence[str]) -> RowTable:
        """The same rows, of which only these columns are asked for."""
        return self


class _Selected(RowTable):
    def __init__(self, table: RowTable, numbers: Sequence[int]) -> None:
        self.table, self.numbers = table, numbers
        self.described, self.column_names = table.described, table.column_names

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return hashlib.sha256(f"{self.table.fingerprint} {list(self.numbers)}".encode()).hexdigest()

    def select_columns(self, names: Sequence[str]) -> RowTable:
        return _Selected(self.table.select_columns(names), self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: Any) -> Any:
        return self.table[self.numbers[number]]
