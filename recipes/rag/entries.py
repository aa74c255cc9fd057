"""Facts as entries of an index: one slot each, of the vectors of the fact's title and of its value."""

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
from mmattn.encoders import NameEncoder

from .territories import Fact

BLOCK = 1 << 14  # texts


def embed(encoder: NameEncoder, texts: Sequence[str], cache: Path, progress: bool = False) -> Tensor:
    """Return the vectors (n, e) of texts; each block of them is kept in a file named after encoder and texts."""
    blocks = []
    for start in range(0, len(texts), BLOCK):
        block = list(texts[start : start + BLOCK])
        name = hashlib.sha256("\n".join([encoder.fingerprint, *block]).encode()).hexdigest()[:24]
        file = cache / f"texts-{name}.safetensors"
        if not file.is_file():
            cache.mkdir(parents=True, exist_ok=True)
            vectors = encoder.encode(block, batch_size=128, progress=progress).tokens[:, 0]
            save_file({"vectors": vectors.contiguous()}, file)
        blocks.append(load_file(file)["vectors"])
    return torch.cat(blocks)


@dataclass
class Entries:
    """Facts, vectors of their titles (n, e), distinct values and first q questions (q, e), and the encoder."""

    facts: list[Fact]
    titles: Tensor
    values: Tensor
    questions: Tensor
    encoder: NameEncoder | None = None

    def __post_init__(self) -> None:
        self.by_key: dict[str, list[int]] = {}  # the rows of each key
        for row, fact in enumerate(self.facts):
            self.by_key.setdefault(fact.key, []).append(row)
        place = {value: row for row, value in enumerate(distinct_values(self.facts))}
        self.value_rows = torch.tensor([place[fact.value] for fact in self.facts])

    @classmethod
    def of(
        cls, facts: list[Fact], questions: int, encoder: NameEncoder, cache: Path, progress: bool = False
    ) -> Entries:
        """Embed each text once; the first `questions` facts have questions."""
        return cls(
            facts,
            embed(encoder, [fact.title for fact in facts], cache, progress),
            embed(encoder, distinct_values(facts), cache),
            embed(encoder, [fact.question for fact in facts[:questions]], cache, progress),
            encoder,
        )

    def slots(self, rows: Sequence[int] | Tensor) -> Tensor:
        """Return the slots (…, 2e) of some facts: the title's vector and the value's."""
        return torch.cat([self.titles[rows], self.values[self.value_rows[rows]]], -1)

    def queries(self, rows: Sequence[int]) -> Tensor:
        """Return queries (n, 2e) that compare questions with the titles of slots, and with nothing of their values."""
        return torch.nn.functional.pad(self.questions[rows], (0, self.values.shape[1]))

    def index(self, rows: Sequence[int]) -> mmattn.Index:
        """Return an index of some facts, searched by their titles; its ids are the rows."""
        rows = list(rows)
        texts, tokens = [self.facts[row].sentence for row in rows], mmattn.Memory(self.slots(rows)[:, None])
        return mmattn.Index.build(self.titles[rows], encoder=self.encoder, ids=rows, texts=texts, tokens=tokens)

    def index_of_slots(self, rows: Sequence[int], store: str = "exact", **settings: Any) -> mmattn.Index:
        """Return an index of slots, for `as_memory`; its ids are the rows."""
        rows = list(rows)
        return mmattn.Index.build(self.slots(rows), metric="ip", ids=rows, store=store, **settings)

    def nearest(self, rows: Sequence[int], questions: Sequence[int], count: int) -> mmattn.Memory:
        """Return a memory of the `count` facts among some whose titles are most like each question."""
        choice = torch.tensor(rows)
        best = [(self.titles @ self.questions[one])[choice].topk(min(count, len(rows))) for one in questions]
        places = torch.stack([choice[one.indices] for one in best])
        sources = [[{"id": row} for row in line] for line in places.tolist()]
        return mmattn.Memory(self.slots(places), scores=torch.stack([one.values for one in best]), sources=sources)


def distinct_values(facts: Sequence[Fact]) -> list[str]:
    """Return the values of facts, each once."""
    return sorted({fact.value for fact in facts})


@dataclass
class EntrySet:
    """Rows of facts in one index, and of facts to ask for, half of which are not in it."""

    rows: list[int]
    questions: list[int]
    present: list[bool]


def entry_sets(entries: Entries, held_out: int, size: int, ask: int, seed: int) -> list[EntrySet]:
    """Return sets of `size` facts with `ask` questions in all.

    The first `held_out` facts of `entries` are asked for, and fill the sets before the others do. Of a key that is
    asked for, the set has the other facts, too, so that the right key alone is not enough.
    """
    random, sets = Random(seed * 1009 + size), list[EntrySet]()
    while ask > 0:
        questions = random.sample(range(held_out), min(ask, max(2, size // 5)))
        present = [number % 2 == 0 for number in range(len(questions))]
        rows = choose_rows(entries, held_out, size, questions, present, random)
        sets.append(EntrySet(rows, questions, present))
        ask -= len(questions)
    return sets


def choose_rows(
    entries: Entries, held_out: int, size: int, questions: list[int], present: list[bool], random: Random
) -> list[int]:
    """Return the rows of a set: the present answers, other facts of the same keys, then held-out facts and others."""
    rows = [row for row, here in zip(questions, present, strict=True) if here]
    absent = set(questions) - set(rows)
    same_key = dict.fromkeys(row for one in questions for row in entries.by_key[entries.facts[one].key])
    others = [row for row in same_key if row not in absent and row not in rows]
    rows += others[: max(0, size // 2 - len(rows))]
    used = {*rows, *absent}
    others = [row for row in range(len(entries.facts)) if row not in used]
    first = [row for row in others if row < held_out]
    fill = size - len(rows)
    rows += random.sample(first, min(fill, len(first)))
    return rows + random.sample([row for row in others if row >= held_out], max(0, fill - len(first)))
