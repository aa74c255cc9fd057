"""The memory of each document of a task: from a field of it or by a function, its own or that of another document."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from mmattn.data.memory_collator import row_memory
from mmattn.errors import ConfigError, ShapeError, check_choice
from mmattn.memory import Memory

CONTROLS = ("own", "shuffled", "none")


class DocumentMemories:
    """Memories of documents, read when they are asked for.

    Args:
        source: the field of a document that its memory is read from, or a function from a document to that.
        read: makes a memory of one row of what the source gives, None being no memory; None for `row_memory`: a
            `Memory` of one row, the path of a saved one, vectors (m, e).
        dim: width e of the memory.
        control: "own" memories, "shuffled" ones (of the next document that has one), or "none".

    Raises:
        ConfigError: another control; later, a document without the field, or shuffled memories of a single document.
    """

    def __init__(
        self,
        source: str | Callable[[Mapping[str, Any]], Any],
        read: Callable[[Any], Any] | None,
        dim: int,
        control: str = "own",
    ) -> None:
        self.source, self.read, self.dim = source, read, dim
        self.control = check_choice("control", control, CONTROLS)

    def readers(self, documents: Sequence[tuple[Hashable, Mapping[str, Any]]]) -> list[Callable[[], Memory | None]]:
        """What reads the memory of each document; equal ones where documents are the same.

        Args:
            documents: of a task, each with what it is known by.
        """
        known = dict(documents)
        keys = list(known)

        def reader(place: int) -> Callable[[], Memory | None]:
            if self.control == "shuffled":
                return lambda: self._next([known[key] for key in (*keys[place:], *keys[:place])])
            return lambda: None if self.control == "none" else self._memory(self._value(known[keys[place]]))

        readers = {key: reader(place) for place, key in enumerate(keys)}
        return [readers[key] for key, _ in documents]

    def stacked(self, memories: Sequence[Memory | None]) -> Memory | None:
        """One memory of as many rows, empty where there is none; None where no row has one.

        Args:
            memories: each of one row.
        """
        if all(memory is None for memory in memories):
            return None
        blank = Memory(torch.zeros(1, 0, self.dim))
        return Memory.stack([blank if memory is None else memory.to("cpu") for memory in memories])

    def _next(self, documents: Sequence[Mapping[str, Any]]) -> Memory | None:
        """The memory of the first of the other documents that has one, where the first of all has one."""
        if self._value(documents[0]) is None:
            return None
        for document in documents[1:]:
            if (value := self._value(document)) is not None:
                return self._memory(value)
        raise ConfigError("a single document has a memory, and shuffled ones need two at least")

    def _value(self, document: Mapping[str, Any]) -> Any:
        if callable(self.source):
            return self.source(document)
        if self.source not in document:
            raise ConfigError(
                f"a document has no field {self.source!r} that its memory could be read from, only "
                f"{', '.join(map(str, document))}: name it with memory=, or give control=none to measure without"
            )
        return document[self.source]

    def _memory(self, value: Any) -> Memory | None:
        if value is None:
            return None
        given = isinstance(value, Memory) or self.read is None
        memory: Any = row_memory(value) if given or self.read is None else self.read(value)
        if memory is not None and not isinstance(memory, Memory):
            raise ConfigError(
                f"the memory of a document must be vectors, and this adapter reads {type(memory).__name__}, which rows "
                "of a batch cannot share"
            )
        if memory is not None and memory.dim != self.dim:
            raise ShapeError(f"the memory of a document is {memory.dim} wide, and the adapter reads {self.dim}")
        return memory
