"""`Memory`: the vectors that an adapter attends to, with a padding mask, segments, scores and sources."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from mmattn.core.tracing import Checks, all_finite, collect_checks, refuse_unless_finite, watch_checks
from mmattn.errors import ConfigError, MaskError, NonFiniteError, ShapeError, check_bool_mask, check_int
from mmattn.storage.json_files import dump_json, parse_errors, validated
from mmattn.storage.safetensors import read_tensors, write_tensors
from mmattn.storage.tensor_cache import TensorVersion

FORMAT = "mmattn-memory"
MAX_SOURCES = 1 << 30
"""Bytes of the sources in a file, at most."""

#: Any JSON value that names where a slot came from.
Source = Any


class Memory:
    """A batch of vectors (b, m, e) to attend to, with a padding mask and optionally the source of each vector.

    A memory is immutable: every method returns a new one, which shares storage if possible.

    Args:
        tokens: (b, m, e) floating point vectors. m may be 0.
        mask: (b, m) bool, True = may be attended to; None: every slot is real.
        segments: (b, m) int, the segment (image, passage) of each slot, counted from 0 in each row; negative without
            one.
        scores: (b, m) float, relevance of each slot (a retriever's score).
        sources: for each row one entry per slot: any JSON value that names where the slot came from.
        check_finite: reject NaN and infinity in slots that may be attended to. On a GPU, the call with the memory, the
            next call or the end of `generate` raises.

    Raises:
        ShapeError: tensors or sources whose sizes do not fit, or tokens or scores that are not floating point.
        MaskError: a mask that is not bool, or segments that are not integers.
        NonFiniteError: NaN or infinity in a slot that may be attended to.

    >>> memory = Memory(torch.randn(2, 5, 7), mask=torch.tensor([[True] * 5, [True] * 3 + [False] * 2]))
    >>> memory.batch, memory.length, memory.dim, memory.lengths
    (2, 5, 7, [5, 3])
    """

    __slots__ = ("_checked", "_checks", "finite_checked", "mask", "scores", "segments", "sources", "tokens")

    def __init__(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        scores: Tensor | None = None,
        sources: Sequence[Sequence[Source]] | None = None,
        check_finite: bool = True,
    ) -> None:
        _check_tokens(tokens)
        _check_slots(tokens.shape[:2], mask, segments, scores, sources)
        # A tensor made in inference mode has no version by which an edit in place could be noticed.
        self.tokens = _countable(tokens)
        self.mask, self.segments, self.scores = (
            None if value is None else _countable(value) for value in (mask, segments, scores)
        )
        self.sources = None if sources is None else [list(row) for row in sources]
        self.finite_checked = check_finite
        self._checked: TensorVersion | None = None
        self._checks: Checks = ()
        if check_finite:
            self._begin_check()

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
        """Raise `NonFiniteError` for NaN or infinity in slots that may be attended to, or in their scores.

        A traced graph cannot read values, so nothing is checked there.
        """
        if torch.compiler.is_compiling():
            return
        for name, value in (("values", self.tokens.detach()), ("scores", self.scores)):
            if value is None or not value.numel() or all_finite(value):
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

    def check_in_call(self) -> None:
        """Check like `check_finite`, once for these values, without waiting for a GPU.

        On a GPU, the next call or the end of `generate` may raise.

        Raises:
            NonFiniteError: NaN or infinity in a slot that may be attended to.
        """
        if self.finite_checked and not torch.compiler.is_compiling():
            self._begin_check()
            if self._checks:
                watch_checks(self._checks)
            self._checks = ()  # they hold this memory, which would not be freed with its last use

    def _begin_check(self) -> None:
        """Check values on the CPU, and begin to check those on a device, unless that was done for these values."""
        values = [self.tokens] if self.scores is None else [self.tokens, self.scores]
        if torch.compiler.is_compiling() or (self._checked is not None and self._checked.holds(values)):
            return
        _, self._checks = collect_checks(partial(refuse_unless_finite, values, self.check_finite))
        self._checked = TensorVersion(values)

    @classmethod
    def pad(cls, rows: Sequence[Tensor], check_finite: bool = True) -> Memory:
        """Return a memory of rows of different lengths, padded with zeros to the longest.

        Args:
            rows: tensors (m_i, e).
            check_finite: as in `Memory`.

        Raises:
            ShapeError: no rows, or rows that are not (m_i, e) with the same e.
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
        lengths, mask = [shape[0] for shape in shapes], None
        if min(lengths) < max(lengths):
            ends = torch.tensor(lengths, device=tokens.device)[:, None]
            mask = torch.arange(tokens.shape[1], device=tokens.device) < ends
        return cls(tokens, mask, check_finite=check_finite)

    @classmethod
    def cat(cls, memories: Sequence[Memory]) -> Memory:
        """Concatenate the slots of memories with the same rows and width, (b, m1 + m2, e).

        Segments of later memories are numbered after those of earlier memories. A memory without segments counts as one
        segment. Negative segments stay negative.

        Raises:
            ShapeError: no memories, or rows or widths that differ.
        """
        _check_widths(memories, "cat")
        if len({memory.batch for memory in memories}) != 1:
            raise ShapeError(f"Memory.cat needs as many rows in each, got {[memory.batch for memory in memories]}")
        return _joined(memories, 1, _numbered_segments(memories))

    @classmethod
    def stack(cls, memories: Sequence[Memory]) -> Memory:
        """Concatenate the rows of memories of the same width, (b1 + b2, m, e); shorter memories are padded.

        Raises:
            ShapeError: no memories, or widths that differ.

        >>> Memory.stack([Memory(torch.ones(1, 3, 2)), Memory(torch.ones(2, 5, 2))]).lengths
        [3, 5, 5]
        """
        _check_widths(memories, "stack")
        longest = max(memory.length for memory in memories)
        memories = [memory._widened(longest) for memory in memories]
        return _joined(memories, 0, _concatenated(memories, "segments", 0))

    def expand(self, rows: int) -> Memory:
        """Return this single row, shared by `rows` rows of text without a copy.

        Raises:
            ShapeError: the memory has more than one row.
            ConfigError: `rows` is not a positive int.
        """
        check_int("rows", rows, at_least=0)
        if self.batch != 1:
            raise ShapeError(f"expand shares a memory of one row, got {self.batch} rows; select one with memory[i]")
        return self._map(lambda tensor: tensor.expand(rows, *tensor.shape[1:]), sources=self._source_rows() * rows)

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> Memory:
        """Return rows of this memory; an int keeps the row dimension."""
        if isinstance(rows, Tensor):
            rows = rows.cpu()
        numbers = torch.arange(self.batch)[rows].reshape(-1).tolist()
        if isinstance(rows, int):
            rows = slice(numbers[0], numbers[0] + 1)
        index = rows if isinstance(rows, slice) else torch.tensor(numbers, dtype=torch.long, device=self.device)
        every = self._source_rows()
        return self._map(lambda tensor: tensor[index], sources=[every[number] for number in numbers])

    def to(self, *args: Any, **kwargs: Any) -> Memory:
        """Return the memory on another device, or with tokens and scores in another dtype, like `Tensor.to`."""
        tokens = self.tokens.to(*args, **kwargs)
        if tokens is self.tokens:
            return self
        beside = {"non_blocking": kwargs["non_blocking"]} if "non_blocking" in kwargs else {}

        def follow(value: Tensor) -> Tensor:
            return value.to(tokens.device, tokens.dtype if value.is_floating_point() else value.dtype, **beside)

        return self._map(follow, tokens)

    def pin_memory(self) -> Memory:
        """Return the memory in page-locked memory, from which a GPU copies asynchronously."""
        return self._map(Tensor.pin_memory)

    def replace(self, tokens: Tensor) -> Memory:
        """Return the same slots with other vectors (b, m, any width).

        Raises:
            ShapeError: another number of rows or slots.
        """
        _check_tokens(tokens)
        if tokens.shape[:2] != self.tokens.shape[:2]:
            raise ShapeError(f"tokens must be (b, m, e) with (b, m) = {(self.batch, self.length)}, got {tokens.shape}")
        memory = Memory.__new__(Memory)  # of slots that were checked
        memory.tokens, memory._checked, memory._checks = _countable(tokens), None, ()
        slots = (self.mask, self.segments, self.scores)
        memory.mask, memory.segments, memory.scores = [None if x is None else x.to(tokens.device) for x in slots]
        memory.sources, memory.finite_checked = self.sources, self.finite_checked
        return memory

    def real_slots(self) -> Tensor:
        """Return the slots that may be attended to, (b, m) bool: the mask, or all True without one."""
        if self.mask is None:
            return self.tokens.new_ones(self.tokens.shape[:2], dtype=torch.bool)
        return self.mask.to(self.device)

    def tensors(self) -> list[Tensor]:
        """Return the tokens, and the mask, segments and scores if set."""
        return [value for value in (self.tokens, self.mask, self.segments, self.scores) if value is not None]

    def detach(self) -> Memory:
        """Return the memory without its autograd graph."""
        return self._map(Tensor.detach)

    def save(self, path: str | PathLike[str]) -> None:
        """Write tokens, mask, segments, scores and sources to one safetensors file, atomically.

        Args:
            path: the file.

        Raises:
            ConfigError: sources that are not plain JSON.
            OSError: the folder is missing or not writable; an existing file is unchanged.
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
        """Load the memory that `save` wrote.

        Args:
            path: the file.
            check_finite: as in `Memory`.

        Raises:
            AdapterFileError: the file is truncated, modified or not a memory.
            NonFiniteError: NaN or infinity.
        """
        with parse_errors(path, "memory"):
            tensors, metadata = read_tensors(path, FORMAT, check_finite=False)
            sources = validated("sources", list[list[Source]] | None, json.loads(metadata["sources"]))
            memory = cls(**tensors, sources=sources, check_finite=False)
        if check_finite:
            memory.check_finite()  # masked slots may hold NaN
        memory.finite_checked = check_finite
        return memory

    def __len__(self) -> int:
        return self.batch

    def __getstate__(self) -> dict[str, object]:
        # Checks that are under way belong to this process, and to these tokens.
        return {name: getattr(self, name) for name in self.__slots__ if not name.startswith("_")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self._checked, self._checks = None, ()
        for name, value in state.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        parts = [f"b={self.batch}, m={self.length}, e={self.dim}, {str(self.dtype).removeprefix('torch.')}"]
        parts += [f"lengths={self.lengths}"] * (self.mask is not None and self.batch <= 8)
        parts += [name for name in ("segments", "scores", "sources") if getattr(self, name) is not None]
        return f"Memory({', '.join(parts)})"

    def _map(
        self,
        change: Callable[[Tensor], Tensor],
        tokens: Tensor | None = None,
        sources: list[list[Source]] | None = None,
    ) -> Memory:
        """Return the memory with every tensor changed, or other tokens, and with other sources where it has some."""
        mask, segments, scores = (None if x is None else change(x) for x in (self.mask, self.segments, self.scores))
        named = self.sources if sources is None or self.sources is None else sources
        tokens = change(self.tokens) if tokens is None else tokens
        return Memory(tokens, mask, segments, scores, named, check_finite=False)._checked_as(self)

    def _checked_as(self, *others: Memory) -> Memory:
        """Return this memory, checked if the memories it was made of were."""
        self.finite_checked = all(other.finite_checked for other in others)
        return self

    def _filled(self, name: str) -> Tensor:
        value: Tensor | None = self.real_slots() if name == "mask" else getattr(self, name)
        if value is not None:
            return value
        return self.tokens.new_zeros(self.tokens.shape[:2], dtype=torch.long if name == "segments" else self.dtype)

    def _source_rows(self) -> list[list[Source]]:
        return self.sources if self.sources is not None else [[None] * self.length for _ in range(self.batch)]

    def _widened(self, length: int) -> Memory:
        """Return the memory padded to a length."""
        extra = length - self.length
        if not extra:
            return self
        pad = torch.nn.functional.pad
        segments, scores = (None if x is None else pad(x, (0, extra)) for x in (self.segments, self.scores))
        sources = None if self.sources is None else [row + [None] * extra for row in self.sources]
        tokens, mask = pad(self.tokens, (0, 0, 0, extra)), pad(self.real_slots(), (0, extra))
        return Memory(tokens, mask, segments, scores, sources, check_finite=False)._checked_as(self)


def _countable(tensor: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def _check_widths(memories: Sequence[Memory], verb: str) -> None:
    if not memories:
        raise ShapeError(f"Memory.{verb} needs at least one memory, got none")
    for memory in memories:
        if not isinstance(memory, Memory):
            raise ShapeError(f"Memory.{verb} joins Memory objects, got {type(memory).__name__}")
    widths = [memory.dim for memory in memories]
    if len(set(widths)) != 1:
        raise ShapeError(f"Memory.{verb} needs one width e, got {widths}; project them to one width first")


def _joined(memories: Sequence[Memory], axis: int, segments: Tensor | None) -> Memory:
    """Concatenate rows (axis 0) or slots (axis 1)."""
    sources = None
    if any(memory.sources is not None for memory in memories):
        parts = [memory._source_rows() for memory in memories]
        sources = sum(parts, []) if axis == 0 else [sum(line, []) for line in zip(*parts, strict=True)]
    return Memory(
        torch.cat([memory.tokens for memory in memories], axis),
        _concatenated(memories, "mask", axis),
        segments,
        _concatenated(memories, "scores", axis),
        sources,
        check_finite=False,
    )._checked_as(*memories)


def _numbered_segments(memories: Sequence[Memory]) -> Tensor | None:
    """Concatenate segments, those of later memories numbered after those of earlier ones."""
    if all(memory.segments is None for memory in memories):
        return None
    segments, begin = [], torch.zeros(memories[0].batch, 1, dtype=torch.long, device=memories[0].device)
    for memory in memories:
        numbers = memory._filled("segments")
        segments.append(torch.where(numbers < 0, numbers, numbers + begin))
        if memory.length:
            begin = torch.maximum(begin, segments[-1].amax(1, keepdim=True) + 1)
    return torch.cat(segments, 1)


def _concatenated(memories: Sequence[Memory], name: str, axis: int) -> Tensor | None:
    if all(getattr(memory, name) is None for memory in memories):
        return None
    return torch.cat([memory._filled(name) for memory in memories], axis)


def _check_tokens(tokens: Tensor) -> None:
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


def _check_slots(
    sizes: torch.Size,
    mask: Tensor | None,
    segments: Tensor | None,
    scores: Tensor | None,
    sources: Sequence[Sequence[Source]] | None,
) -> None:
    if mask is not None:
        check_bool_mask("mask", mask)
    for name, value in (("mask", mask), ("segments", segments), ("scores", scores)):
        if value is not None and value.shape != sizes:
            raise ShapeError(f"{name} must be (b, m) = {tuple(sizes)} as the tokens are, got {tuple(value.shape)}")
    if segments is not None and (segments.is_floating_point() or segments.dtype == torch.bool):
        raise MaskError(f"segments must be integers, got {segments.dtype}")
    if scores is not None and not scores.is_floating_point():
        raise ShapeError(f"scores must be floating point, got {scores.dtype}")
    lengths = None if sources is None else [len(row) for row in sources]
    if lengths is not None and lengths != [sizes[1]] * sizes[0]:
        raise ShapeError(f"sources need one entry per slot, {sizes[0]} rows of {sizes[1]}; got rows of {lengths}")
