"""What an index holds, as columns: ids, texts, metadata, vectors. Columns never change; every change makes new ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmattn.errors import ConfigError

Id = str | int
Filter = Mapping[str, Any] | Callable[[Any], bool]


class Entry(NamedTuple):
    """One entry of an index.

    Attributes:
        id: what names it.
        text: its text, where it has one.
        metadata: a JSON value.
        vector: (e,) float32.
        tokens: its encoded tokens (m, e'), where it has them.
    """

    id: Id
    text: str | None
    metadata: Any
    vector: Tensor
    tokens: Tensor | None


@dataclass(frozen=True, eq=False)
class Entries:
    """The columns of n entries, in the order in which they were added.

    Attributes:
        ids: names, no two the same.
        texts: texts, None where an entry has none.
        metadata: a JSON value per entry.
        vectors: (n, e) float32, what is searched.
        tokens: encoded tokens (m, e') of each entry, or None.
    """

    ids: tuple[Id, ...]
    texts: tuple[str | None, ...]
    metadata: tuple[Any, ...]
    vectors: Tensor
    tokens: tuple[Tensor, ...] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def rows(self) -> dict[Id, int]:
        """The row of each id."""
        return {name: row for row, name in enumerate(self.ids)}

    def entry(self, row: int) -> Entry:
        """The entry of a row."""
        tokens = None if self.tokens is None else self.tokens[row]
        return Entry(self.ids[row], self.texts[row], copied(self.metadata[row]), self.vectors[row], tokens)

    def joined(self, other: Entries) -> Entries:
        """These entries and then the others, none of whose ids is here."""
        if not len(self) or not len(other):
            return self if len(self) else other
        return Entries(
            self.ids + other.ids,
            self.texts + other.texts,
            self.metadata + other.metadata,
            torch.cat([self.vectors, other.vectors]),
            None if self.tokens is None or other.tokens is None else self.tokens + other.tokens,
        )

    def select(self, rows: Sequence[int]) -> Entries:
        """The entries of some rows, in their order."""
        rows = list(rows)
        return Entries(
            tuple(self.ids[row] for row in rows),
            tuple(self.texts[row] for row in rows),
            tuple(self.metadata[row] for row in rows),
            self.vectors[rows],
            None if self.tokens is None else tuple(self.tokens[row] for row in rows),
        )

    def replaced(self, rows: Sequence[int], **columns: Any) -> Entries:
        """These entries with other values in some rows of some columns.

        Args:
            rows: which rows.
            **columns: by the name of a column the new values, one for each of the rows.
        """
        new: dict[str, Any] = {name: getattr(self, name) for name in ("texts", "metadata", "vectors", "tokens")}
        for name, values in columns.items():
            if name == "vectors":
                new[name] = self.vectors.clone()
                new[name][list(rows)] = values
            elif values is not None:
                column = list(new[name])
                for row, value in zip(rows, values, strict=True):
                    column[row] = value
                new[name] = tuple(column)
        return Entries(self.ids, **new)

    def to(self, device: torch.device) -> Entries:
        """The same entries with their vectors and tokens on a device."""
        tokens = None if self.tokens is None else tuple(part.to(device) for part in self.tokens)
        return Entries(self.ids, self.texts, self.metadata, self.vectors.to(device), tokens)

    def allowed(self, chosen: Filter | None) -> Tensor | None:
        """Which entries (n,) a filter allows, True = may be found; None means all.

        A dict allows the entries whose metadata is a dict that has all of its keys with values that are equal, as
        Python compares them; {} allows all entries. A function is given the metadata of an entry.

        Args:
            chosen: the filter.

        Raises:
            ConfigError: the filter is neither a dict nor a function.
        """
        if chosen is None:
            return None
        if isinstance(chosen, Mapping):
            found = [_has(metadata, chosen) for metadata in self.metadata]
        elif callable(chosen):
            found = [bool(chosen(copied(metadata))) for metadata in self.metadata]
        else:
            raise ConfigError(
                f"filter must be a dict of metadata that must be equal, or a function of an entry's metadata that says "
                f"True or False; got {type(chosen).__name__}"
            )
        return torch.tensor(found, dtype=torch.bool, device=self.vectors.device)


def copied(value: Any) -> Any:
    """A JSON value that shares nothing with another, to be handed out: whoever edits it edits no index.

    Args:
        value: to be copied.
    """
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    return [copied(one) for one in value] if isinstance(value, list) else value


def _has(metadata: Any, wanted: Mapping[str, Any]) -> bool:
    return (
        not wanted
        or isinstance(metadata, dict)
        and all(key in metadata and metadata[key] == wanted[key] for key in wanted)
    )
