"""Rows of a dataset of Hugging Face, of tars or of Lance: on the disk, or as a stream."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmattn.data.arrow_rows import RowTable
from mmattn.data.rows import Row, make_row, text_of_label
from mmattn.errors import ConfigError


class DatasetRows(Sequence[Row]):
    """The rows of a dataset that lies on the disk, each built when it is asked for.

    Args:
        dataset: a `datasets.Dataset`, or a table of tars or of Lance.
        columns: from keys of a row to columns of the dataset, or from "label" to the column of classes that the texts
            are made of; other columns are not read.
        host: "language" or "unet".
        template: the text of a row with a label, see `read_folder`.
    """

    left_out: Sequence[str] = ()

    def __init__(
        self, dataset: Any, columns: Mapping[str, str], host: str = "language", template: str | None = None
    ) -> None:
        self.dataset, self.columns, self.host, self.template = dataset, dict(columns), host, template
        self._reader = _Reader(dataset, self.columns, host, template)

    @property
    def memory_kinds(self) -> set[str]:
        """What the memories of the rows are made of, as the columns say."""
        return _memory_kinds(self.columns)

    @property
    def fingerprint(self) -> str:
        """What tells these rows from those of another dataset, or of other columns."""
        own = self.dataset.fingerprint if isinstance(self.dataset, RowTable) else self.dataset._fingerprint
        about = (own, sorted(self.columns.items()), self.template)
        return hashlib.sha256(repr(about).encode()).hexdigest()

    @property
    def found(self) -> str:
        """What was found, in one line."""
        columns = ", ".join(f"{key}={name}" for key, name in self.columns.items())
        kind = self.dataset.described if isinstance(self.dataset, RowTable) else "a dataset of Hugging Face"
        return f"{len(self)} rows of {kind} ({columns})"

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return self.select(range(len(self))[number])
        return self._reader.row(self.dataset[number], number)

    def select(self, numbers: Sequence[int]) -> DatasetRows:
        """The rows of these numbers."""
        return DatasetRows(self.dataset.select(numbers), self.columns, self.host, self.template)

    def text_lengths(self) -> list[int]:
        """`Row.text_length` of every row, for which no picture is opened."""
        texts = {key: name for key, name in self.columns.items() if key in ("text", "label", "prompt")}
        if not texts:
            return [0] * len(self)
        shown = self.dataset.select_columns(list(texts.values()))
        return [sum(len(self._reader.value(key, one[name]) or "") for key, name in texts.items()) for one in shown]


class StreamRows:
    """The rows of a streamed dataset: it has no length, and is read once an epoch from its beginning.

    Args:
        dataset: a `datasets.IterableDataset`.
        columns: as in `DatasetRows`.
        host: "language" or "unet".
        skip: rows to leave out at the beginning.
        take: rows to read at most; None for all.
        template: the text of a row with a label, see `read_folder`.
        skip_broken: leave out rows that cannot be used, and name them in `left_out`.

    Attributes:
        left_out: rows that the last iteration left out, and why.
    """

    def __init__(
        self,
        dataset: Any,
        columns: Mapping[str, str],
        host: str = "language",
        skip: int = 0,
        take: int | None = None,
        template: str | None = None,
        skip_broken: bool = False,
    ) -> None:
        self.dataset, self.columns, self.host, self.skip, self.take = dataset, dict(columns), host, skip, take
        self.template, self.skip_broken = template, skip_broken
        self.left_out: list[str] = []
        self._reader = _Reader(dataset, self.columns, host, template)

    @property
    def memory_kinds(self) -> set[str]:
        """What the memories of the rows are made of, as the columns say."""
        return _memory_kinds(self.columns)

    @property
    def found(self) -> str:
        """What was found, in one line."""
        columns = ", ".join(f"{key}={name}" for key, name in self.columns.items())
        return f"a stream of rows of a dataset of Hugging Face ({columns})"

    def __iter__(self) -> Iterator[Row]:
        end = None if self.take is None else self.skip + self.take
        self.left_out = []
        for number, given in enumerate(itertools.islice(self.dataset, self.skip, end), start=self.skip):
            try:
                row = self._reader.row(given, number)
            except ConfigError as error:
                if not self.skip_broken:
                    raise
                self.left_out.append(str(error))
                continue
            yield row


def _memory_kinds(columns: Mapping[str, str]) -> set[str]:
    keys = {"pictures": {"image", "images", "example"}, "passages": {"passage", "passages"}, "memories": {"memory"}}
    return {kind for kind, named in keys.items() if named & set(columns)}


class _Reader:
    """From the columns of a dataset to rows."""

    def __init__(self, dataset: Any, columns: Mapping[str, str], host: str, template: str | None) -> None:
        self.columns, self.host, self.template = columns, host, template
        feature = (getattr(dataset, "features", None) or {}).get(columns.get("label", ""))
        self.classes: Sequence[str] | None = getattr(feature, "names", None)

    def row(self, given: Mapping[str, Any], number: int) -> Row:
        try:
            values = {ROW_KEY.get(key, key): self.value(key, given[name]) for key, name in self.columns.items()}
            return make_row(values, self.host)
        except ConfigError as error:
            raise ConfigError(f"row {number} of the dataset: {error}") from error

    def value(self, key: str, value: Any) -> Any:
        if key == "label":
            name = self.classes[value] if self.classes is not None and isinstance(value, int) else value
            return text_of_label(str(name).replace("_", " ").replace("-", " "), self.template)
        if isinstance(value, Mapping) and {"bytes", "path"} <= set(value):
            return value["path"] if value["bytes"] is None else value["bytes"]
        return value


ROW_KEY = {"label": "text"}
"""Keys of a row that other names of columns stand for."""
Rows = Sequence[Row] | StreamRows
