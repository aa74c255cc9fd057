"""Stores in the memory of this process: versions of the entries, each with search structures over its vectors.

A structure never changes. Beside it lies, for each of its vectors, the row of its entry now, or -1 where that entry was
deleted or got another vector. A second, exact structure searches newer entries and is built anew at every change; when
these, or the gaps, become many, the first is built again over all. So no structure needs to support deletion, and a
search never meets one that is being written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmattn.retrieval.entries import Columns, Entries, Filter, Id, read_entries, write_entries
from mmattn.retrieval.scoring import lengths_of, wide
from mmattn.retrieval.stores import About, Candidates, register_store

_FEW = 1024
#: Scores computed at once.
_SCORES = 1 << 25


class Structure(Protocol):
    """A search structure over vectors (n, e)."""

    exact: bool

    def __len__(self) -> int: ...

    def candidates(self, queries: Tensor, count: int, allowed: Tensor | None = None) -> Tensor:
        """Return rows (b, c) of its vectors that may be among the best; -1 is none."""


Build = Callable[[Tensor], Structure]


@dataclass(frozen=True, eq=False)
class Part:
    """A structure, and the row (c,) of the entry of each of its vectors, -1 for none."""

    structure: Structure
    rows: Tensor

    @cached_property
    def alive(self) -> Tensor | None:
        """Mask (c,) of the vectors that still have an entry; None means all."""
        alive = self.rows >= 0
        return None if bool(alive.all()) else alive

    def candidates(self, queries: Tensor, count: int, allowed: Tensor | None) -> Tensor:
        """Return rows (b, c) of the allowed entries (n,); -1 is none."""
        alive = self.alive
        if allowed is not None:
            alive = (self.rows >= 0) & allowed[self.rows.clamp(min=0)]
        near = self.structure.candidates(queries, count, alive)
        return torch.where(near < 0, -1, self.rows[near.clamp(min=0)])


@dataclass(frozen=True, eq=False)
class Version:
    """Entries and the parts that search them; each entry is in one part. Immutable."""

    entries: Entries
    metric: str
    parts: tuple[Part, ...]

    @classmethod
    def over(cls, entries: Entries, metric: str, build: Build) -> Version:
        """Return a version with one structure over all entries."""
        if not len(entries):
            return cls(entries, metric, ())
        return cls(entries, metric, (Part(build(entries.vectors), _counted(entries)),))

    @classmethod
    def around(cls, entries: Entries, metric: str, part: Part, build: Build) -> Version:
        """Return a version around a structure that may lack some entries; build it again where it lacks too many."""
        covered = torch.zeros(len(entries), dtype=torch.bool, device=part.rows.device)
        covered[part.rows[part.rows >= 0]] = True
        fresh = (~covered).nonzero()[:, 0]
        gaps = len(part.rows) - int(covered.sum())
        if max(len(fresh), gaps) > max(_FEW, len(part.rows) // 8):
            return cls.over(entries, metric, build)
        more = (Part(ExactScan(entries.vectors[fresh], metric), fresh),) if len(fresh) else ()
        return cls(entries, metric, (part, *more))

    def followed(self, entries: Entries, moved: Tensor, build: Build) -> Version:
        """Return the version after a change; `moved` (n,) is the new row of each old entry, -1 if its vector is new."""
        if not self.parts or not len(entries):
            return Version.over(entries, self.metric, build)
        first = self.parts[0]
        rows = torch.where(first.rows < 0, -1, moved[first.rows.clamp(min=0)])
        return Version.around(entries, self.metric, Part(first.structure, rows), build)

    def candidates(self, queries: Tensor, count: int, allowed: Tensor | None) -> Tensor:
        """Return rows (b, c) that may be among the `count` best of the allowed entries (n,); -1 is none."""
        remaining = len(self.entries) if allowed is None else int(allowed.sum())
        if not remaining:
            return torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
        parts = self.parts
        if not all(part.structure.exact for part in parts) and remaining <= max(_FEW, 4 * count):
            # An approximate structure would miss some of so few, or visit most: compare them all.
            rows = _counted(self.entries) if allowed is None else allowed.nonzero()[:, 0]
            parts, allowed = (Part(ExactScan(self.entries.vectors[rows], self.metric), rows),), None
        return torch.cat([part.candidates(queries, count, allowed) for part in parts], 1)


class ExactScan:
    """An immutable search structure over vectors (n, e) that misses none of the best.

    A scan in float32 gives an entry the score s' with |s' - s| <= slack. Every entry whose s' is at most two slacks
    below the k-th largest is a candidate, and their scores, rounded from float64, decide. Queries and entries are
    scaled to at most length 1, and distances are compared as qx - |x|²/2.
    """

    exact = True

    def __init__(self, vectors: Tensor, metric: str) -> None:
        norms = lengths_of(vectors)
        self.metric = metric
        self.largest = norms.amax().clamp(min=torch.finfo(torch.float32).tiny)
        divisors = norms if metric == "cosine" else self.largest.expand(len(norms))
        parts = zip(vectors.split(1 << 13), divisors.split(1 << 13), strict=True)
        self.scan = torch.cat([(block.to(norms.dtype) / divisor[:, None]).float() for block, divisor in parts])
        self.squares = (norms / self.largest).square().float()

    def __len__(self) -> int:
        return len(self.scan)

    def candidates(self, queries: Tensor, count: int, allowed: Tensor | None = None) -> Tensor:
        """Return rows (b, c) that contain the `count` best of the allowed rows (n,); -1 fills shorter lines."""
        count = min(count, len(self) if allowed is None else int(allowed.sum()))
        if not count or not len(queries):
            return torch.empty(len(queries), 0, dtype=torch.long, device=self.scan.device)
        lines: list[Tensor] = []
        for block in queries.split(max(1, _SCORES // len(self))):
            values, slack = self._scores(block)
            if allowed is not None:
                values.masked_fill_(~allowed, -torch.inf)
            top = values.topk(min(len(self), 2 * count + 8))
            floor = top.values[:, count - 1] - 2 * slack
            near = (top.values >= floor[:, None]) & (top.values > -torch.inf)
            for line, row in enumerate(top.indices):
                if near[line, -1] and len(row) < len(self):
                    # More are as near as the last one.
                    row = ((values[line] >= floor[line]) & (values[line] > -torch.inf)).nonzero()[:, 0]
                    lines.append(row)
                else:
                    lines.append(row[near[line]])
        return pad_sequence(lines, batch_first=True, padding_value=-1)

    def _scores(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores (b, n) of scaled queries and vectors, and how far from exact they may be (b,)."""
        queries = queries.to(wide(queries.device))
        lengths = lengths_of(queries)
        error = _error_of_product(self.scan.shape[1])
        if self.metric != "l2":
            values = (queries / lengths.masked_fill(lengths == 0, 1)[:, None]).float() @ self.scan.T
            return values, torch.full_like(values[:, 0], error)
        # Queries that are longer than every entry are divided by their own length, and so are the squares.
        stretch = (lengths / self.largest).clamp(min=1)
        values = (queries / (self.largest * stretch)[:, None]).float() @ self.scan.T
        values -= self.squares / (2 * stretch.float()[:, None])
        # Far queries: float32 rounds the distance, and rounded scores may tie.
        return values, error + 2.0**-21 * stretch.float()


def _error_of_product(width: int) -> float:
    """Return how far a float32 product of two vectors of at most length 1 may be from the exact one."""
    rounding = (width + 32) * 2.0**-23 + 1e-30
    try:
        coarse = torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set through torch's newer switches, one per backend
        coarse = True
    return 2.0**-6 + rounding if coarse else rounding


@register_store("exact")
class InMemoryStore:
    """Compare every entry, and miss none.

    Each change copies the columns that it changes, so add many entries at a time. Tensors may be on any device. The
    methods are those of `VectorStore`.
    """

    kind: ClassVar[str]
    recall: ClassVar[float] = 1.0
    holds_tokens: ClassVar[bool] = True

    def __init__(self, dim: int, metric: str) -> None:
        self.dim = dim
        self.metric = metric
        self.about: About = {}
        self.settings: Mapping[str, int | None] = {}
        self.version = Version(Entries((), (), (), torch.empty(0, dim)), metric, ())

    @property
    def ids(self) -> tuple[Id, ...]:
        return self.version.entries.ids

    @property
    def device(self) -> torch.device:
        """The device of the vectors."""
        return self.version.entries.vectors.device

    def __len__(self) -> int:
        return len(self.version.entries)

    def build(self, vectors: Tensor) -> Structure:
        """Return a search structure over vectors (n, e)."""
        return ExactScan(vectors, self.metric)

    def get(self, ids: Sequence[Id]) -> Entries:
        entries = self.version.entries
        return entries.select(sorted(entries.rows[name] for name in set(ids) if name in entries.rows))

    def add(self, entries: Entries) -> None:
        old = self.version.entries
        self._follow(old.concat(entries.to(self.device)), torch.arange(len(old), device=self.device))

    def update(self, entries: Entries) -> None:
        old, new = self.version.entries, entries.to(self.device)
        rows = torch.tensor([old.rows[name] for name in new.ids], device=self.device)
        columns: Columns = {"texts": new.texts, "metadata": new.metadata, "tokens": new.tokens}
        changed = (old.vectors[rows] != new.vectors).any(1)
        moved = torch.arange(len(old), device=self.device)
        if changed.any():
            columns["vectors"] = new.vectors
            moved[rows[changed]] = -1
        self._follow(old.replaced(rows.tolist(), columns), moved)

    def delete(self, ids: Sequence[Id]) -> None:
        old = self.version.entries
        gone = {old.rows[name] for name in ids}
        rows = [row for row in range(len(old)) if row not in gone]
        moved = torch.full((len(old),), -1, device=self.device)
        moved[rows] = torch.arange(len(rows), device=self.device)
        self._follow(old.select(rows), moved)

    def search(self, queries: Tensor, top_k: int, filter: Filter | None) -> Candidates:
        version = self.version
        return Candidates(version.entries, version.candidates(queries, top_k, version.entries.allowed(filter)))

    def save(self, folder: str) -> None:
        write_entries(folder, self.version.entries)

    @classmethod
    def open(cls, folder: str, dim: int, metric: str, *, mapped: bool = False, **settings: int | None) -> InMemoryStore:
        store = cls(dim, metric, **settings)
        entries, _ = read_entries(folder, dim, metric, mapped)
        store.version = Version.over(entries, metric, store.build)
        return store

    def to(self, device: torch.device) -> None:
        """Move the vectors to a device."""
        self.version = Version.over(self.version.entries.to(device), self.metric, self.build)

    def close(self) -> None:
        """Do nothing."""

    def _follow(self, entries: Entries, moved: Tensor) -> None:
        self.version = self.version.followed(entries, moved, self.build)


def _counted(entries: Entries) -> Tensor:
    return torch.arange(len(entries), device=entries.vectors.device)
