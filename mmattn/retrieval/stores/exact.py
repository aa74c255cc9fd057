"""Stores in the memory of this process: versions of the entries, each with the search structures over its vectors.

A structure is built over vectors and never changed. What happens to the entries afterwards stands beside it: for each
of its vectors the row it now is, or -1 where that entry was deleted or got another vector. Entries it does not know are
searched by a second, exact one, built anew at every change; when they, or the gaps, become many, the structure is built
again over all. So none of them needs to support deletion, and a search never meets one that is being written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from mmattn.retrieval.entries import Entries, Filter, Id
from mmattn.retrieval.stores.base import Candidates
from mmattn.retrieval.stores.bounded_scan import BoundedScan
from mmattn.retrieval.stores.entry_files import read_copy, write_entries
from mmattn.retrieval.stores.registry import register_store

_FEW = 1024


class Structure(Protocol):
    """A search structure over vectors (n, e)."""

    exact: bool

    def __len__(self) -> int: ...

    def candidates(self, queries: Tensor, count: int, allowed: Tensor | None = None) -> Tensor:
        """Rows (b, c) of the vectors it was built over; -1 is none."""


Build = Callable[[Tensor], Structure]


@dataclass(frozen=True, eq=False)
class Part:
    """A structure and the row (c,) each of its vectors is now, -1 for none."""

    structure: Structure
    rows: Tensor

    @cached_property
    def alive(self) -> Tensor | None:
        """Which vectors (c,) still are an entry's; None means all."""
        alive = self.rows >= 0
        return None if bool(alive.all()) else alive

    def candidates(self, queries: Tensor, count: int, allowed: Tensor | None) -> Tensor:
        """Rows (b, c) of the entries, of those allowed (n,); -1 is none."""
        alive = self.alive
        if allowed is not None:
            alive = (self.rows >= 0) & allowed[self.rows.clamp(min=0)]
        found = self.structure.candidates(queries, count, alive)
        return torch.where(found < 0, -1, self.rows[found.clamp(min=0)])


@dataclass(frozen=True, eq=False)
class Version:
    """Entries, and the parts that search them; each entry is in one part. Immutable."""

    entries: Entries
    metric: str
    parts: tuple[Part, ...]

    @classmethod
    def over(cls, entries: Entries, metric: str, build: Build) -> Version:
        """With one structure over all entries."""
        if not len(entries):
            return cls(entries, metric, ())
        return cls(entries, metric, (Part(build(entries.vectors), _counted(entries)),))

    @classmethod
    def around(cls, entries: Entries, metric: str, part: Part, build: Build) -> Version:
        """With a structure that may know some of the entries only; built again where that is too few."""
        known = torch.zeros(len(entries), dtype=torch.bool, device=part.rows.device)
        known[part.rows[part.rows >= 0]] = True
        fresh = (~known).nonzero()[:, 0]
        gaps = len(part.rows) - int(known.sum())
        if max(len(fresh), gaps) > max(_FEW, len(part.rows) // 8):
            return cls.over(entries, metric, build)
        more = (Part(BoundedScan(entries.vectors[fresh], metric), fresh),) if len(fresh) else ()
        return cls(entries, metric, (part, *more))

    def followed(self, entries: Entries, moved: Tensor, build: Build) -> Version:
        """The version after a change.

        Args:
            entries: the new ones.
            moved: (n,) the new row of each old one, -1 where it was deleted or got another vector.
            build: what builds a structure.
        """
        if not self.parts or not len(entries):
            return Version.over(entries, self.metric, build)
        first = self.parts[0]
        rows = torch.where(first.rows < 0, -1, moved[first.rows.clamp(min=0)])
        return Version.around(entries, self.metric, Part(first.structure, rows), build)

    def candidates(self, queries: Tensor, count: int, allowed: Tensor | None) -> Tensor:
        """Rows (b, c) of entries that may be among the `count` best of those allowed (n,); -1 is none."""
        left = len(self.entries) if allowed is None else int(allowed.sum())
        if not left:
            return torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
        parts = self.parts
        if not all(part.structure.exact for part in parts) and left <= max(_FEW, 4 * count):
            # So few that an approximate structure would miss some, or visit most: compare them all.
            rows = _counted(self.entries) if allowed is None else allowed.nonzero()[:, 0]
            parts, allowed = (Part(BoundedScan(self.entries.vectors[rows], self.metric), rows),), None
        return torch.cat([part.candidates(queries, count, allowed) for part in parts], 1)


@register_store("exact")
class InMemoryStore:
    """Compares every entry and misses none: a scan in few bits proposes, within a bound on its error.

    Each change copies the columns it changes, so many entries at a time are quicker than one by one. Its tensors may be
    on any device.
    """

    kind: ClassVar[str]
    recall: ClassVar[float] = 1.0
    holds_tokens: ClassVar[bool] = True

    def __init__(self, dim: int, metric: str) -> None:
        self.dim = dim
        self.metric = metric
        self.about: dict[str, Any] = {}
        self.version = Version(Entries((), (), (), torch.empty(0, dim)), metric, ())

    @property
    def settings(self) -> dict[str, Any]:
        """None here."""
        return {}

    @property
    def ids(self) -> tuple[Id, ...]:
        """All ids, in the order in which the entries were added."""
        return self.version.entries.ids

    @property
    def device(self) -> torch.device:
        """Where the vectors are."""
        return self.version.entries.vectors.device

    def __len__(self) -> int:
        return len(self.version.entries)

    def build(self, vectors: Tensor) -> Structure:
        """The search structure over vectors (n, e)."""
        return BoundedScan(vectors, self.metric)

    def get(self, ids: Sequence[Id]) -> Entries:
        """The entries of those of these ids that are here."""
        entries = self.version.entries
        return entries.select(sorted(entries.rows[name] for name in set(ids) if name in entries.rows))

    def add(self, entries: Entries) -> None:
        """Add entries after those that are here."""
        old = self.version.entries
        self._follow(old.joined(entries.to(self.device)), torch.arange(len(old), device=self.device))

    def update(self, entries: Entries) -> None:
        """Replace entries."""
        old, new = self.version.entries, entries.to(self.device)
        rows = torch.tensor([old.rows[name] for name in new.ids], device=self.device)
        columns: dict[str, Any] = {"texts": new.texts, "metadata": new.metadata, "tokens": new.tokens}
        changed = (old.vectors[rows] != new.vectors).any(1)
        moved = torch.arange(len(old), device=self.device)
        if changed.any():
            columns["vectors"] = new.vectors
            moved[rows[changed]] = -1
        self._follow(old.replaced(rows.tolist(), **columns), moved)

    def delete(self, ids: Sequence[Id]) -> None:
        """Delete entries."""
        old = self.version.entries
        gone = {old.rows[name] for name in ids}
        rows = [row for row in range(len(old)) if row not in gone]
        moved = torch.full((len(old),), -1, device=self.device)
        moved[rows] = torch.arange(len(rows), device=self.device)
        self._follow(old.select(rows), moved)

    def search(self, queries: Tensor, top_k: int, filter: Filter | None) -> Candidates:
        """Entries among which the best are, of one version from the beginning of the search to its end."""
        version = self.version
        return Candidates(version.entries, version.candidates(queries, top_k, version.entries.allowed(filter)))

    def save(self, folder: str) -> None:
        """Write the entries."""
        write_entries(folder, self.version.entries)

    @classmethod
    def open(cls, folder: str, dim: int, metric: str, *, mapped: bool = False, **settings: Any) -> InMemoryStore:
        """The store with what `save` wrote."""
        store = cls(dim, metric, **settings)
        entries = read_copy(folder, dim, metric, mapped)
        store.version = Version.over(entries, metric, store.build)
        return store

    def to(self, device: torch.device) -> None:
        """Move the vectors to a device, where searches then happen."""
        self.version = Version.over(self.version.entries.to(device), self.metric, self.build)

    def close(self) -> None:
        """Nothing to give back."""

    def _follow(self, entries: Entries, moved: Tensor) -> None:
        self.version = self.version.followed(entries, moved, self.build)


def _counted(entries: Entries) -> Tensor:
    return torch.arange(len(entries), device=entries.vectors.device)
