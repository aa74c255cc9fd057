"""A block of a shard: some rows, the entries that they brought with them, and how both lie in the file of the shard.

An entry is the vectors of one content: a picture, a passage, or a saved memory. A row refers to the entries that make
its memory, by shard and number in the shard; most are in its own block, and one whose content came before is where it
came first. The tensors of block 7:

    0007.tokens    (slots, e)    float16, bfloat16, or int8 with a scale for each slot
    0007.scales    (slots, 1)    bfloat16, of int8 alone
    0007.segments  (slots,)      int32, where an entry has several segments
    0007.scores    (slots,)      float32, where an entry has scores
    0007.rows      (n,)          uint8, JSON: texts, prompts, parts and sources of the rows, slots of the entries
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt
from torch import Tensor

from mmattn.data.rows import Row
from mmattn.errors import AdapterFileError
from mmattn.memory import Memory
from mmattn.storage.json_files import validated

Part = tuple[int, int]
"""Shard and number of an entry."""


@dataclass(frozen=True)
class Entry:
    """The vectors of one content.

    Args:
        tokens: (m, e), as stored.
        scales: (m, 1), of int8.
        segments: (m,) int, where it has several.
        scores: (m,) float, where it has some.
    """

    tokens: Tensor
    scales: Tensor | None = None
    segments: Tensor | None = None
    scores: Tensor | None = None

    def unpacked(self) -> Tensor:
        """The vectors (m, e): of int8 in float32, otherwise as they are stored."""
        return self.tokens if self.scales is None else self.tokens.float() * self.scales

    def memory(self, copy: bool = False) -> Memory:
        """A memory (1, m, e) of this entry alone.

        Args:
            copy: share no vectors with it.
        """
        tokens = self.unpacked()
        tokens = tokens.clone() if copy and self.scales is None else tokens
        segments = torch.zeros(len(tokens), dtype=torch.long) if self.segments is None else self.segments.long()
        scores = None if self.scores is None else self.scores[None]
        return _stored(Memory(tokens[None], None, segments[None], scores, check_finite=False))


@dataclass(frozen=True)
class Columns:
    """What the JSON of a block says of its rows and entries.

    Args:
        texts: of each row.
        prompts: of each row; None where no row has any.
        parts: of each row, the entries of its memory.
        sources: of each row, the files of its pictures as the source named them; None where no row has any.
        first: number of the first entry of the block in its shard.
        lengths: slots of each entry.
        scored: numbers of the entries that have scores; None where none has.
    """

    texts: Sequence[str]
    prompts: Sequence[str] | None
    parts: Sequence[tuple[Part, ...]]
    sources: Sequence[Sequence[str]] | None
    first: int
    lengths: Sequence[int]
    scored: Sequence[int] | None = None

    @property
    def counts(self) -> tuple[int, int, int]:
        """Rows, entries and slots."""
        return len(self.texts), len(self.lengths), self.starts[-1]

    @cached_property
    def text_lengths(self) -> list[int]:
        """`Row.text_length` of each row."""
        lengths = map(len, self.texts)
        return list(lengths if self.prompts is None else map(operator.add, lengths, map(len, self.prompts)))

    @cached_property
    def starts(self) -> list[int]:
        """The first slot of each entry in the block, and at the end the number of slots."""
        return [0, *itertools.accumulate(self.lengths)]

    def span(self, entry: int) -> tuple[int, int]:
        """The first slot of an entry in the block, and the first after it.

        Args:
            entry: its number in the shard.
        """
        place = entry - self.first
        return self.starts[place], self.starts[place + 1]

    def lacks(self, tensor: str, entry: int) -> bool:
        """Whether an entry has nothing in a tensor of the block, whose values others need.

        Args:
            tensor: "scores", or any other.
            entry: its number in the shard.
        """
        return tensor == "scores" and entry not in (self.scored or ())

    def dump(self, shard: int) -> bytes:
        """As JSON.

        Args:
            shard: number of the own shard.
        """
        given: dict[str, Any] = {"first": self.first, "lengths": list(self.lengths), "texts": list(self.texts)}
        if list(self.parts) != [((shard, self.first + number),) for number in range(len(self.lengths))]:
            given["parts"] = self.parts
        given |= {name: list(v) for name in ("prompts", "sources", "scored") if (v := getattr(self, name)) is not None}
        # Names of files may hold bytes that are no UTF-8.
        return json.dumps(given, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")

    @classmethod
    def load(cls, raw: bytes, shard: int) -> Columns:
        """What `dump` wrote.

        Args:
            raw: the JSON.
            shard: number of the own shard.

        Raises:
            AdapterFileError: it says something else.
        """
        given = json.loads(raw.decode("utf-8", "surrogatepass"))
        known = validated("the JSON of a block", _Said, given)
        first, lengths, count = known.first, known.lengths, len(known.texts)
        parts = [[(shard, first + number)] for number in range(len(lengths))] if known.parts is None else known.parts
        for name, column in {"parts": parts, "prompts": known.prompts, "sources": known.sources}.items():
            if column is not None and len(column) != count:
                raise AdapterFileError(f"a block has {count} texts and {len(column)} {name}")
        texts = itertools.chain(known.texts, known.prompts or (), *(known.sources or ()))
        if not all(isinstance(text, str) for text in texts) or any(len(part) != 2 for row in parts for part in row):
            raise AdapterFileError("a block has texts that are none, or parts that are no shard and number")
        if not all(first <= number < first + len(lengths) for number in known.scored or ()):
            raise AdapterFileError("a block has scores of entries that are not its own")
        rows = [tuple((part[0], part[1]) for part in row) for row in parts]
        return cls(known.texts, known.prompts, rows, known.sources, first, lengths, known.scored)


class _Said(BaseModel):
    """The JSON of a block. Its texts may have halves of surrogate pairs, which pydantic has no strings for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    first: NonNegativeInt
    lengths: list[NonNegativeInt]
    texts: list[Any]
    parts: list[list[list[int]]] | None = None
    prompts: list[Any] | None = None
    sources: list[list[Any]] | None = None
    scored: list[int] | None = None


@dataclass(frozen=True)
class Block:
    """A block in memory.

    Args:
        shard: number of its shard.
        columns: of its rows.
        tensors: "tokens", and "scales", "segments" and "scores" where it has them.
        elsewhere: entries of other blocks that its rows refer to.
    """

    shard: int
    columns: Columns
    tensors: Mapping[str, Tensor]
    elsewhere: Mapping[Part, Entry]

    def row(self, number: int) -> StoredRow:
        """One of its rows, which keeps the block in memory until its own memory is made.

        Args:
            number: of the row in the block.
        """
        return StoredRow.of(self.columns, number, self._entries, once=True)

    def entry(self, number: int) -> Entry:
        """An entry of this block, which shares its vectors.

        Args:
            number: in the shard.
        """
        columns = self.columns
        start, end = columns.span(number)
        return Entry(**{name: x[start:end] for name, x in self.tensors.items() if not columns.lacks(name, number)})

    def _entries(self, parts: Sequence[Part]) -> list[Entry]:
        return [self.elsewhere.get(part) or self.entry(part[1]) for part in parts]


def joined(entries: Sequence[Entry], copy: bool = False) -> Memory:
    """The memory (1, m, e) of some entries, one segment or more for each.

    Args:
        entries: in order, at least one.
        copy: share no vectors with them.
    """
    if len(entries) == 1:
        return entries[0].memory(copy)
    return Memory.cat([entry.memory() for entry in entries])


def stacked(entries: Sequence[Entry]) -> Memory | None:
    """The memory (b, m, e) of b entries, in float32; None if they differ in length, or have segments or scores.

    Args:
        entries: of one dtype, at least one.
    """
    lengths = {len(entry.tokens) for entry in entries}
    if len(lengths) > 1 or any(entry.segments is not None or entry.scores is not None for entry in entries):
        return None
    tokens = torch.stack([entry.tokens for entry in entries]).float()
    scales = [entry.scales for entry in entries if entry.scales is not None]
    tokens = tokens * torch.stack(scales) if scales else tokens
    return _stored(Memory(tokens, None, torch.zeros(tokens.shape[:2], dtype=torch.long), check_finite=False))


def _stored(memory: Memory) -> Memory:
    """A memory that need not be read through now: its values were checked when they were stored."""
    memory.finite_checked = True
    return memory


class _MadeMemory:
    """The memory of a stored row, made when it is asked for."""

    def __get__(self, row: Any, owner: type) -> Any:
        if row is None:
            return None  # what the field of `Row` has where nothing is given
        values = vars(row)
        if "memory" in values:
            return values["memory"]
        make = values["_make"]
        if make is None:  # another thread was first
            return values["memory"]
        # One row that is kept must not keep a block.
        made = joined(make(row.contents), copy=values["_once"])
        if values["_once"]:
            values["memory"] = made
            values["_make"] = None
        return made


class StoredRow(Row):
    """A row of a store, whose memory is made when it is asked for.

    Attributes:
        sources: the files of its pictures, as the source named them.
        contents: the entries of its memory, equal in rows that are shown the same.
    """

    memory: Any = _MadeMemory()
    sources: tuple[str, ...] = ()
    contents: tuple[Part, ...] = ()

    @classmethod
    def of(
        cls, columns: Columns, number: int, make: Callable[[Sequence[Part]], list[Entry]], once: bool = False
    ) -> StoredRow:
        """A row of a block.

        Args:
            columns: of the block.
            number: of the row in it.
            make: gives the vectors of entries.
            once: keep the memory that was made of them, and let go of what gives them; otherwise it is made each time.
        """
        row = cls.__new__(cls)
        values = vars(row)
        values["text"] = columns.texts[number]
        values["prompt"] = "" if columns.prompts is None else columns.prompts[number]
        if columns.sources is not None:
            values["sources"] = tuple(columns.sources[number])
        values["contents"] = parts = columns.parts[number]
        if parts:
            values["_make"], values["_once"] = make, once
        else:
            values["memory"] = None
        return row

    def entries(self) -> list[Entry] | None:
        """The vectors of its contents; None where it has none, or where its memory was made and is kept."""
        make = vars(self).get("_make")
        return None if make is None else make(self.contents)

    @property
    def has_memory(self) -> bool:
        """Whether the row has a memory."""
        return "_make" in vars(self) or self.memory is not None

    def __reduce__(self) -> Any:
        known = {name: getattr(self, name) for name in ("text", "prompt", "memory", "sources", "contents")}
        return _restored, (known,)


def _restored(values: dict[str, Any]) -> StoredRow:
    row = StoredRow.__new__(StoredRow)
    vars(row).update(values)
    return row
