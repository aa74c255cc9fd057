"""The memory of each document of a task: from a field or a function, its own or a shuffled one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from mmattn.data.rows import row_memory
from mmattn.errors import ConfigError, ShapeError, check_choice
from mmattn.memory import Memory

CONTROLS = ("own", "shuffled", "none")


class DocumentMemories:
    """Memories of documents, read on demand.

    `source` is the field of a document with its memory, or a function of the document. `read` makes a memory of one row
    from the value of the source; None is `row_memory` (a `Memory` of one row, the path of a saved one, vectors (m, e)).
    Width is `dim`; `control` is "own", "shuffled" (the memory of the next document that has one) or "none".
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
        """Return a reader of the memory of each (key, document); equal keys have one reader."""
        by_key = dict(documents)
        keys = list(by_key)

        def reader(place: int) -> Callable[[], Memory | None]:
            if self.control == "shuffled":
                return lambda: self._next([by_key[key] for key in (*keys[place:], *keys[:place])])
            return lambda: None if self.control == "none" else self._memory(self._value(by_key[keys[place]]))

        readers = {key: reader(place) for place, key in enumerate(keys)}
        return [readers[key] for key, _ in documents]

    def stacked(self, memories: Sequence[Memory | None]) -> Memory | None:
        """Stack memories of one row, empty where there is none; None if no row has one."""
        if all(memory is None for memory in memories):
            return None
        blank = Memory(torch.zeros(1, 0, self.dim))
        return Memory.stack([blank if memory is None else memory.to("cpu") for memory in memories])

    def _next(self, documents: Sequence[Mapping[str, Any]]) -> Memory | None:
        """Return the memory of the next document that has one, if the first document has one."""
        if self._value(documents[0]) is None:
            return None
        for document in documents[1:]:
            if (value := self._value(document)) is not None:
                return self._memory(value)
        raise ConfigError("only one document has a memory, and shuffled memories need two")

    def _value(self, document: Mapping[str, Any]) -> Any:
        if callable(self.source):
            return self.source(document)
        if self.source not in document:
            raise ConfigError(
                f"a document has no field {self.source!r} for its memory, only {', '.join(map(str, document))}: name "
                "it with memory=, or give control=none"
            )
        return document[self.source]

    def _memory(self, value: Any) -> Memory | None:
        if value is None:
            return None
        plain = isinstance(value, Memory) or self.read is None
        memory = row_memory(value) if plain or self.read is None else self.read(value)
        if memory is not None and not isinstance(memory, Memory):
            raise ConfigError(
                f"the memory of a document must be vectors, and this adapter reads {type(memory).__name__}, which the "
                "rows of a batch cannot share"
            )
        if memory is not None and memory.dim != self.dim:
            raise ShapeError(f"the memory of a document is {memory.dim} wide, and the adapter reads {self.dim}")
        return memory
