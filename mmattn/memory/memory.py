"""`Memory`: the vectors that an adapter attends to, with a padding mask, segments, scores and sources."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError, MaskError, NonFiniteError, ShapeError, check_bool_mask, check_float, check_int
from mmattn.storage.json_files import dump_json, making_sense, validated
from mmattn.storage.safetensors import read_tensors, write_tensors

FORMAT = "mmattn-memory"
MAX_SOURCES = 1 << 30
"""Bytes of the sources in a file, at most."""


class Memory:
    """A batch of vectors (b, m, e) to attend to, with a padding mask and, where known, the source of each vector.

    A memory does not change shape or content: every method returns a new one, which shares storage where it can.

    Args:
        tokens: (b, m, e) floating point vectors. m may be 0.
        mask: (b, m) bool, True = may be attended to; None: every slot is real.
        segments: (b, m) int, the segment (image, passage) of each slot, counted from 0 in each row; negative for none.
        scores: (b, m) float, relevance of each slot (a retriever's score).
        sources: for each row one entry per slot: any JSON value that names where the slot came from.
        check_finite: refuse NaN and infinity in slots that may be attended to.

    Raises:
        ShapeError: tensors or sources whose sizes do not fit, or tokens or scores that are not floating point.
        MaskError: a mask that is not bool, or segments that are not integers.
        NonFiniteError: NaN or infinity in a slot that may be attended to.

    >>> memory = Memory(torch.randn(2, 5, 7), mask=torch.tensor([[True] * 5, [True] * 3 + [False] * 2]))
    >>> memory.batch, memory.length, memory.dim, memory.lengths
    (2, 5, 7, [5, 3])
    """

    __slots__ = ("finite_checked", "mask", "scores", "segments", "sources", "tokens")

    def __init__(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        scores: Tensor | None = None,
        sources: Sequence[Sequence[Any]] | None = None,
        check_finite: bool = True,
    ) -> None:
        if not isinstance(tokens, Tensor):
            raise ShapeError(f"tokens must be a tensor (b, m, e), got {type(tokens).__name__}")
        if tokens.dim() != 3:
            hints = {
                1: ": one number for each row is tokens[:, None, None]",
                2: ": one vector for each row is tokens[:, None], the vectors of a single row are tokens[None]",
            }
            raise ShapeError(f"tokens must be (b, m, e), got {tuple(tokens.shape)}{hints.get(tokens.dim(), '')}")
        if not tokens.is_floating_point():
            raise ShapeError(f"tokens must be floating point, got {tokens.dtype}: embed them first")
        rows = tuple(tokens.shape[:2])
        if mask is not None:
            check_bool_mask("mask", mask)
        for name, value in (("mask", mask), ("segments", segments), ("scores", scores)):
            if value is not None and tuple(value.shape) != rows:
                raise ShapeError(f"{name} must be (b, m) = {rows} as the tokens are, got {tuple(value.shape)}")
        if segments is not None and (segments.is_floating_point() or segments.dtype == torch.bool):
            raise MaskError(f"segments must be integers, got {segments.dtype}")
        if scores is not None and not scores.is_floating_point():
            raise ShapeError(f"scores must be floating point, got {scores.dtype}")
        if sources is not None:
            given = [len(row) for row in sources]
            if given != [rows[1]] * rows[0]:
                raise ShapeError(f"sources need one entry per slot, {rows[0]} rows of {rows[1]}; got rows of {given}")
        # A tensor made in inference mode has no version by which an edit in place could be noticed.
        self.tokens = _countable(tokens)
        self.mask, self.segments, self.scores = (
            None if value is None else _countable(value) for value in (mask, segments, scores)
        )
        self.sources = None if sources is None else [list(row) for row in sources]
        self.finite_checked = check_finite
        if check_finite:
            self.check_finite()

    @property
    def batch(self) -> int:
        """Number of rows b."""
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        """Number of slots m, padding included."""
        return self.tokens.shape[1]

    @property
    def dim(self) -> int:
        """Width e of each vector."""
        return self.tokens.shape[2]

    @property
    def lengths(self) -> list[int]:
        """Number of real slots of each row."""
        return [self.length] * self.batch if self.mask is None else self.mask.sum(1).tolist()

    @property
    def device(self) -> torch.device:
        """Device of the tokens."""
        return self.tokens.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tokens."""
        return self.tokens.dtype

    def check_finite(self) -> None:
        """Refuse NaN and infinity in slots that may be attended to, and in their scores.

        Raises:
            NonFiniteError: there is one; the message names the first such row and slot.
        """
        for name, value in (("values", self.tokens.detach()), ("scores", self.scores)):
            if value is None or not value.numel():
                continue
            # A sum is finite only if every term is, and reads the memory once without a (b, m, e) intermediate.
            if torch.isfinite(value.sum(dtype=torch.float64 if value.dtype == torch.float64 else torch.float32)):
                continue
            bad = ~torch.isfinite(value).flatten(2).all(-1) if value.dim() == 3 else ~torch.isfinite(value)
            if self.mask is not None:
                bad = bad & self.mask
            if bad.any():
                row = int(bad.any(1).nonzero()[0])
                raise NonFiniteError(
                    f"memory has non-finite {name} at row {row} (slot {int(bad[row].nonzero()[0])}); mask such slots "
                    "out, repair them, or pass check_finite=False"
                )

    @classmethod
    def pad(cls, rows: Sequence[Tensor], check_finite: bool = True) -> Memory:
        """A memory of rows of different lengths, padded with zeros to the longest.

        Args:
            rows: tensors (m_i, e).
            check_finite: as in `Memory`.

        Raises:
            ShapeError: no rows, or rows that are not (m_i, e) of one width e.
            NonFiniteError: NaN or infinity.

        >>> Memory.pad([torch.ones(3, 2), torch.ones(1, 2)]).lengths
        [3, 1]
        """
        rows = list(rows)
        if not rows:
            raise ShapeError("Memory.pad needs at least one row, got an empty list")
        shapes = [tuple(row.shape) for row in rows]
        if any(len(shape) != 2 for shape in shapes) or len({shape[1] for shape in shapes}) != 1:
            raise ShapeError(f"Memory.pad needs rows (m, e) of one width e, got {shapes}")
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([shape[0] for shape in shapes], device=tokens.device)
        mask = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        return cls(tokens, None if bool(mask.all()) else mask, check_finite=check_finite)

    @classmethod
    def cat(cls, memories: Sequence[Memory]) -> Memory:
        """Concatenate the slots of memories of the same rows, (b, m1 + m2, e).

        Segments of later memories are numbered after those of earlier ones; a memory without segments counts as one
        segment, and a slot of no segment (a negative one) stays so.

        Args:
            memories: of one width e and as many rows b.

        Raises:
            ShapeError: no memories, or rows or widths that differ.
        """
        first = _same(memories, "cat")
        if len({memory.batch for memory in memories}) != 1:
            raise ShapeError(f"Memory.cat needs as many rows in each, got {[memory.batch for memory in memories]}")
        segments: list[Tensor] = []
        begin = torch.zeros(first.batch, 1, dtype=torch.long, device=first.device)
        if any(memory.segments is not None for memory in memories):
            for memory in memories:
                own = memory._filled("segments")
                own = torch.where(own < 0, own, own + begin)
                segments.append(own)
                begin = torch.maximum(begin, own.amax(1, keepdim=True) + 1) if memory.length else begin
        return cls(
            torch.cat([memory.tokens for memory in memories], 1),
            _joined(memories, "mask", 1),
            torch.cat(segments, 1) if segments else None,
            _joined(memories, "scores", 1),
            _sources([memory._source_rows() for memory in memories], memories, rowwise=False),
            check_finite=False,
        )._checked_as(*memories)

    @classmethod
    def stack(cls, memories: Sequence[Memory]) -> Memory:
        """Concatenate the rows of memories, (b1 + b2, m, e), the shorter ones padded.

        Args:
            memories: of one width e.

        Raises:
            ShapeError: no memories, or widths that differ.

        >>> Memory.stack([Memory(torch.ones(1, 3, 2)), Memory(torch.ones(2, 5, 2))]).lengths
        [3, 5, 5]
        """
        _same(memories, "stack")
        length = max(memory.length for memory in memories)
        memories = [memory._widened(length) for memory in memories]
        return cls(
            torch.cat([memory.tokens for memory in memories]),
            _joined(memories, "mask", 0),
            _joined(memories, "segments", 0),
            _joined(memories, "scores", 0),
            _sources([memory._source_rows() for memory in memories], memories, rowwise=True),
            check_finite=False,
        )._checked_as(*memories)

    def expand(self, rows: int) -> Memory:
        """This one row shared by `rows` rows of text, without a copy.

        Args:
            rows: b of the memory that is returned.

        Raises:
            ShapeError: the memory has more than one row.
            ConfigError: `rows` is no number of rows.
        """
        check_int("rows", rows, at_least=0)
        if self.batch != 1:
            raise ShapeError(f"expand shares a memory of one row, got {self.batch} rows; select one with memory[i]")
        return self._map(lambda tensor: tensor.expand(rows, *tensor.shape[1:]), sources=(self._source_rows() * rows))

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> Memory:
        """Rows of this memory; an int keeps the row dimension."""
        if isinstance(rows, int):
            if not -self.batch <= rows < self.batch:
                raise IndexError(f"row {rows} of a memory with {self.batch} rows")
            rows = slice(rows, rows + 1 or None)
        if isinstance(rows, slice):
            selected = list(range(self.batch))[rows]
            return self._map(lambda tensor: tensor[rows], [self._source_rows()[i] for i in selected])
        index = torch.as_tensor(rows, device=self.device).reshape(-1)
        if index.dtype == torch.bool:
            if len(index) != self.batch:
                raise IndexError(f"a choice of rows must have one bool per row, got {len(index)} for {self.batch} rows")
            index = index.nonzero()[:, 0]
        elif not len(index):
            index = index.long()
        return self._map(lambda tensor: tensor[index], [self._source_rows()[i] for i in index.tolist()])

    def to(self, *args: Any, **kwargs: Any) -> Memory:
        """The memory on another device or in another dtype, with the arguments of `Tensor.to`.

        A dtype applies to tokens and scores only.
        """
        tokens = self.tokens.to(*args, **kwargs)
        if tokens is self.tokens:
            return self

        beside = {"non_blocking": kwargs["non_blocking"]} if "non_blocking" in kwargs else {}

        def move(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return tensor.to(tokens.device, tokens.dtype if tensor.is_floating_point() else tensor.dtype, **beside)

        moved = Memory(
            tokens, move(self.mask), move(self.segments), move(self.scores), self.sources, check_finite=False
        )
        return moved._checked_as(self)

    def pin_memory(self) -> Memory:
        """The memory in page-locked memory, from which a device reads it while it computes."""
        return self._map(lambda tensor: tensor.pin_memory(), self._source_rows())

    def replace(self, tokens: Tensor) -> Memory:
        """The same slots with other vectors.

        Args:
            tokens: (b, m, any width).

        Raises:
            ShapeError: another number of rows or slots.
        """
        if tokens.shape[:2] != self.tokens.shape[:2]:
            raise ShapeError(f"tokens must be (b, m, e) with (b, m) = {(self.batch, self.length)}, got {tokens.shape}")

        def move(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.to(tokens.device)

        moved = Memory(
            tokens, move(self.mask), move(self.segments), move(self.scores), self.sources, check_finite=False
        )
        return moved._checked_as(self)

    def real_slots(self) -> Tensor:
        """Which slots may be attended to, (b, m) bool: the mask, or all True where there is none."""
        if self.mask is None:
            return self.tokens.new_ones(self.tokens.shape[:2], dtype=torch.bool)
        return self.mask.to(self.device)

    def tensors(self) -> list[Tensor]:
        """The tokens, and the mask, segments and scores that are there."""
        return [value for value in (self.tokens, self.mask, self.segments, self.scores) if value is not None]

    def drop_rows(self, p: float, generator: torch.Generator | None = None) -> Memory:
        """Mask every slot of each row with probability `p`: conditioning dropout for guidance (arXiv 2207.12598).

        Args:
            p: probability of each row, from 0 to 1.
            generator: for the random numbers, on the CPU.

        Raises:
            ConfigError: p is no probability.
        """
        if check_float("p", p, at_least=0) > 1:
            raise ConfigError(f"p is a probability from 0 to 1, got {p}")
        remaining = torch.rand(self.batch, 1, generator=generator).to(self.device) >= p
        return Memory(
            self.tokens, self.real_slots() & remaining, self.segments, self.scores, self.sources, check_finite=False
        )._checked_as(self)

    def detach(self) -> Memory:
        """The memory without its autograd graph."""
        return self._map(lambda tensor: tensor.detach(), self._source_rows())

    def save(self, path: str | PathLike[str]) -> None:
        """Write tokens, mask, segments, scores and sources to one safetensors file, atomically.

        Args:
            path: the file.

        Raises:
            ConfigError: sources that are not plain JSON.
            OSError: the folder is missing or not writable; a file that was there is unchanged.
        """
        tensors = {"tokens": self.tokens.detach()}
        for name in ("mask", "segments", "scores"):
            value = getattr(self, name)
            if value is not None:
                tensors[name] = value.detach()
        sources = dump_json("sources", self.sources, MAX_SOURCES).decode()
        if json.loads(sources) != self.sources:
            raise ConfigError("sources must be plain JSON: lists instead of tuples, text as keys of dicts")
        write_tensors(path, tensors, {"format": FORMAT, "sources": sources})

    @classmethod
    def load(cls, path: str | PathLike[str], check_finite: bool = True) -> Memory:
        """The memory that `save` wrote.

        Args:
            path: the file.
            check_finite: as in `Memory`.

        Raises:
            AdapterFileError: the file is torn, changed or something else.
            NonFiniteError: NaN or infinity.
        """
        with making_sense(path, "memory"):
            tensors, metadata = read_tensors(path, FORMAT, check_finite=False)
            sources = validated("sources", list[list[Any]] | None, json.loads(metadata["sources"]))
            memory = cls(**tensors, sources=sources, check_finite=False)
        if check_finite:
            memory.check_finite()  # masked slots may hold NaN
        memory.finite_checked = check_finite
        return memory

    def __len__(self) -> int:
        return self.batch

    def __repr__(self) -> str:
        extras = [name for name in ("segments", "scores", "sources") if getattr(self, name) is not None]
        filled = f", lengths={self.lengths}" if self.mask is not None and self.batch <= 8 else ""
        return (
            f"Memory(b={self.batch}, m={self.length}, e={self.dim}, {str(self.dtype).removeprefix('torch.')}"
            f"{filled}{''.join(', ' + name for name in extras)})"
        )

    def _map(self, change: Any, sources: list[Any]) -> Memory:
        mask, segments, scores = (None if x is None else change(x) for x in (self.mask, self.segments, self.scores))
        named = None if self.sources is None else sources
        return Memory(change(self.tokens), mask, segments, scores, named, check_finite=False)._checked_as(self)

    def _checked_as(self, *others: Memory) -> Memory:
        """This memory, made of others whose values were checked, or need not be."""
        self.finite_checked = all(other.finite_checked for other in others)
        return self

    def _filled(self, name: str) -> Tensor:
        value: Tensor | None = getattr(self, name)
        if value is not None:
            return value
        shape = self.tokens.shape[:2]
        if name == "mask":
            return self.real_slots()
        return self.tokens.new_zeros(shape, dtype=torch.long if name == "segments" else self.dtype)

    def _source_rows(self) -> list[list[Any]]:
        return self.sources if self.sources is not None else [[None] * self.length for _ in range(self.batch)]

    def _widened(self, length: int) -> Memory:
        extra = length - self.length
        if not extra:
            return self
        values = {name: getattr(self, name) for name in ("segments", "scores")}
        padded = {
            name: None if value is None else torch.nn.functional.pad(value, (0, extra))
            for name, value in values.items()
        }
        return Memory(
            torch.nn.functional.pad(self.tokens, (0, 0, 0, extra)),
            torch.nn.functional.pad(self.real_slots(), (0, extra)),
            sources=None if self.sources is None else [row + [None] * extra for row in self.sources],
            check_finite=False,
            **padded,
        )._checked_as(self)


def _countable(tensor: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def _same(memories: Sequence[Memory], verb: str) -> Memory:
    if not memories:
        raise ShapeError(f"Memory.{verb} needs at least one memory, got none")
    for memory in memories:
        if not isinstance(memory, Memory):
            raise ShapeError(f"Memory.{verb} joins Memory objects, got {type(memory).__name__}")
    widths = [memory.dim for memory in memories]
    if len(set(widths)) != 1:
        raise ShapeError(f"Memory.{verb} needs one width e, got {widths}; project them to one width first")
    return memories[0]


def _joined(memories: Sequence[Memory], name: str, axis: int) -> Tensor | None:
    if all(getattr(memory, name) is None for memory in memories):
        return None
    return torch.cat([memory._filled(name) for memory in memories], axis)


def _sources(rows: list[list[list[Any]]], memories: Sequence[Memory], rowwise: bool) -> list[list[Any]] | None:
    if all(memory.sources is None for memory in memories):
        return None
    if rowwise:
        return [row for part in rows for row in part]
    return [[entry for part in line for entry in part] for line in zip(*rows, strict=True)]
