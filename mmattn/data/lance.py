"""A Lance dataset as a table of rows."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmattn.data.arrow_rows import RowTable
from mmattn.errors import ConfigError, import_extra


class LanceTable(RowTable):
    """The rows of a Lance dataset, on this machine or at an address.

    Args:
        path: of the dataset, or an address that Lance reads.
        columns: that are read; None for all.

    Raises:
        ConfigError: there is no such dataset.
        MissingExtraError: lance is not installed.
    """

    described = "a Lance dataset"

    def __init__(self, path: str, columns: Sequence[str] | None = None) -> None:
        lance = import_extra("lance", "lance")
        try:
            self.dataset = lance.dataset(path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path!r} cannot be read as a Lance dataset: {' '.join(str(error).split())[:300]}"
            ) from error
        self.path, self.columns = path, columns
        self.column_names = list(self.dataset.schema.names)

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        """What tells this version of the dataset from another."""
        return hashlib.sha256(f"lance {self.path} {self.dataset.version} {len(self)}".encode()).hexdigest()

    def select_columns(self, names: Sequence[str]) -> LanceTable:
        """The same rows, of which only these columns are read."""
        return LanceTable(self.path, names)

    def __len__(self) -> int:
        return int(self.dataset.count_rows())

    def __getitem__(self, number: Any) -> Any:
        (row,) = self.dataset.take([range(len(self))[number]], columns=self.columns).to_pylist()
        return row


def is_lance(path: str) -> bool:
    """Whether a path names a Lance dataset: a folder with its versions, or an address that ends in .lance."""
    return os.path.isdir(Path(path) / "_versions") or path.rstrip("/").endswith(".lance")
