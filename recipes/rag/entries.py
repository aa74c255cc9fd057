"""Facts as entries of an index: one vector each, made of what the fact is filed under and of its value."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import mmattn

from .facts import Fact

BLOCK = 1 << 14  # texts


def embed(encoder: Any, texts: Sequence[str], cache: Path, progress: bool = False) -> Tensor:
    """Vectors (n, e) of texts, computed once: each block of them is kept in a file named after encoder and texts."""
    parts = []
    for start in range(0, len(texts), BLOCK):
        block = list(texts[start : start + BLOCK])
        name = hashlib.sha256("\n".join([encoder.fingerprint, *block]).encode()).hexdigest()[:24]
        file = cache / f"texts-{name}.safetensors"
        if not file.is_file():
            cache.mkdir(parents=True, exist_ok=True)
            made = encoder.encode(block, batch_size=128, progress=progress).tokens[:, 0]
            save_file({"vectors": made.contiguous()}, file)
        parts.append(load_file(file)["vectors"])
    return torch.cat(parts)


@dataclass
class Entries:
    """Facts, the vectors (n, e) of their titles and values, those (q, e) of the first q questions, and the encoder."""

    facts: list[Fact]
    titles: Tensor
    values: Tensor
    questions: Tensor
    encoder: Any = None

    def __post_init__(self) -> None:
        self.kin: dict[str, list[int]] = {}  # the rows of each key
        for row, fact in enumerate(self.facts):
            self.kin.setdefault(fact.key, []).append(row)

    def __len__(self) -> int:
        return len(self.facts)

    @classmethod
    def of(cls, facts: list[Fact], asked: int, encoder: Any, cache: Path, progress: bool = False) -> Entries:
        """Embed each text once; the first `asked` facts have questions."""
        known = sorted({fact.value for fact in facts})
        place = {value: row for row, value in enumerate(known)}
        return cls(
            facts,
            embed(encoder, [fact.title for fact in facts], cache, progress),
            embed(encoder, known, cache)[[place[fact.value] for fact in facts]],
            embed(encoder, [fact.question for fact in facts[:asked]], cache, progress),
            encoder,
        )

    def slots(self, rows: Sequence[int] | Tensor) -> Tensor:
        """What an adapter attends to: (…, 2e), the title's vector and the value's."""
        return torch.cat([self.titles[rows], self.values[rows]], -1)

    def queries(self, rows: Sequence[int]) -> Tensor:
        """What questions (n, 2e) are compared with slots by: their titles, and nothing of their values."""
        return torch.nn.functional.pad(self.questions[rows], (0, self.values.shape[1]))

    def index(self, rows: Sequence[int]) -> mmattn.Index:
        """An index of some of the facts, found by their titles; its ids are the rows."""
        rows = list(rows)
        return mmattn.Index.build(
            self.titles[rows],
            encoder=self.encoder,
            ids=rows,
            texts=[self.facts[row].sentence for row in rows],
            tokens=mmattn.Memory(self.slots(rows)[:, None]),
        )

    def nearest(self, rows: Sequence[int], asked: Sequence[int], count: int) -> mmattn.Memory:
        """The `count` facts among some whose titles are most like each question, compared with all, as a memory."""
        best, where = torch.empty(len(asked), 0), torch.empty(len(asked), 0, dtype=torch.long)
        for block in torch.tensor(rows).split(BLOCK):
            scores = torch.cat([best, self.questions[asked] @ self.titles[block].T], 1)
            places = torch.cat([where, block.expand(len(asked), -1)], 1)
            best, order = scores.topk(min(count, scores.shape[1]))
            where = places.gather(1, order)
        sources = [[{"id": row} for row in found] for found in where.tolist()]
        return mmattn.Memory(self.slots(where), scores=best, sources=sources)

    def index_of_slots(self, rows: Sequence[int], store: str = "exact", **settings: Any) -> mmattn.Index:
        """An index of what an adapter attends to, for `as_memory`; its ids are the rows."""
        rows = list(rows)
        return mmattn.Index.build(self.slots(rows), metric="ip", ids=rows, store=store, **settings)


@dataclass
class World:
    """An index of some facts, and questions: rows of facts, half of which are not in it."""

    rows: list[int]
    asked: list[int]
    present: list[bool]


def worlds(entries: Entries, held_out: int, size: int, ask: int, seed: int) -> list[World]:
    """Worlds of `size` facts with `ask` questions in all.

    The first `held_out` facts of `entries` are asked for, and fill the worlds before the others do. Of a key that is
    asked for, the world has the other facts, too, so that the right key alone is not enough.
    """
    random, made, left = Random(seed * 1009 + size), [], ask
    while left > 0:
        asked = random.sample(range(held_out), min(left, max(2, size // 5)))
        present = [index % 2 == 0 for index in range(len(asked))]
        away = {row for row, here in zip(asked, present, strict=True) if not here}
        rows = [row for row, here in zip(asked, present, strict=True) if here]
        kin = dict.fromkeys(row for one in asked for row in entries.kin[entries.facts[one].key])
        near = [row for row in kin if row not in away and row not in rows]
        rows += near[: max(0, size // 2 - len(rows))]
        taken = {*rows, *away}
        others = [row for row in range(len(entries)) if row not in taken]
        first = [row for row in others if row < held_out]
        fill = size - len(rows)
        rows += random.sample(first, min(fill, len(first)))
        rows += random.sample([row for row in others if row >= held_out], max(0, fill - len(first)))
        made.append(World(rows, asked, present))
        left -= len(asked)
    return made
