"""One committed version of an index: its entries, and the engines that search them. Immutable.

An engine is made over vectors and never changed. What happens to the entries afterwards stands beside it: for each of
its vectors the row it now is, or -1 where that entry was removed or got another vector. Entries the engine does not
know are searched by a second, exact engine, made anew at every change; when they, or the gaps, become many, the engine
is made again over all. So no engine needs to support removal, and a search never meets one that is being written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from mmattn.retrieval.entries import Entries
from mmattn.retrieval.exact import Exact
from mmattn.retrieval.vectors import best

_FEW = 1024


class Engine(Protocol):
    """What proposes entries; their true scores are compared by `State.search`."""

    exact: bool

    def __len__(self) -> int: ...

    def candidates(self, queries: Tensor, count: int, allowed: Tensor | None = None) -> Tensor:
        """Rows (b, c) of the vectors it was made of; -1 is none."""


class EngineMaker(Protocol):
    """What makes an engine over vectors (n, e) for a metric."""

    def __call__(self, vectors: Tensor, metric: str) -> Engine: ...


@dataclass(frozen=True, eq=False)
class Part:
    """An engine and the row (c,) each of its vectors is now, -1 for none."""

    engine: Engine
    rows: Tensor

    @cached_property
    def alive(self) -> Tensor | None:
        """Which vectors (c,) still are an entry's; None means all."""
        alive = self.rows >= 0
        return None if bool(alive.all()) else alive

    def candidates(self, queries: Tensor, count: int, allowed: Tensor | None) -> Tensor:
        alive = self.alive
        if allowed is not None:
            alive = (self.rows >= 0) & allowed[self.rows.clamp(min=0)]
        found = self.engine.candidates(queries, count, alive)
        return torch.where(found < 0, -1, self.rows[found.clamp(min=0)])


@dataclass(frozen=True, eq=False)
class State:
    """Entries and the parts that search them; each entry is in one part."""

    entries: Entries
    metric: str
    parts: tuple[Part, ...]

    @classmethod
    def made(cls, entries: Entries, metric: str, make: EngineMaker) -> State:
        """With one engine over all entries."""
        if not len(entries):
            return cls(entries, metric, ())
        return cls(entries, metric, (Part(make(entries.vectors, metric), _counted(entries)),))

    @classmethod
    def around(cls, entries: Entries, metric: str, part: Part, make: EngineMaker) -> State:
        """With an engine that may know some of the entries only; made again where that is too few."""
        known = torch.zeros(len(entries), dtype=torch.bool, device=part.rows.device)
        known[part.rows[part.rows >= 0]] = True
        fresh = (~known).nonzero()[:, 0]
        gaps = len(part.rows) - int(known.sum())
        if max(len(fresh), gaps) > max(_FEW, len(part.rows) // 8):
            return cls.made(entries, metric, make)
        more = (Part(Exact(entries.vectors[fresh], metric), fresh),) if len(fresh) else ()
        return cls(entries, metric, (part, *more))

    def follow(self, entries: Entries, moved: Tensor, make: EngineMaker) -> State:
        """The state after a change: `moved` (n,) is the new row of each old one, -1 if removed or of another vector."""
        if not self.parts or not len(entries):
            return State.made(entries, self.metric, make)
        first = self.parts[0]
        rows = torch.where(first.rows < 0, -1, moved[first.rows.clamp(min=0)])
        return State.around(entries, self.metric, Part(first.engine, rows), make)

    @torch.no_grad()
    def search(self, queries: Tensor, count: int, allowed: Tensor | None) -> Tensor:
        """The rows (b, count) of the best entries, best first; -1 where there are no more."""
        left = len(self.entries) if allowed is None else int(allowed.sum())
        if not left:
            return torch.full((len(queries), count), -1, device=queries.device)
        parts = self.parts
        if not all(part.engine.exact for part in parts) and left <= max(_FEW, 4 * count):
            # So few that an approximate engine would miss some, or visit most: compare them all.
            rows = _counted(self.entries) if allowed is None else allowed.nonzero()[:, 0]
            parts, allowed = (Part(Exact(self.entries.vectors[rows], self.metric), rows),), None
        found = torch.cat([part.candidates(queries, count, allowed) for part in parts], 1)
        return best(queries, self.entries.vectors, found, self.metric, count)


def _counted(entries: Entries) -> Tensor:
    return torch.arange(len(entries), device=entries.vectors.device)
