"""The memory of each row beside what another collator makes of the rest: datasets with a column of memories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch

from mmattn.errors import ConfigError, ShapeError, check_int
from mmattn.memory import Memory


class MemoryCollator:
    """A `data_collator` for rows of a `datasets.Dataset` with a column of memories, of any lengths.

    Another collator, of transformers or TRL, makes the batch of the other columns; the memories are padded to one
    `Memory` beside it. A value of the column is a memory (m, e) as nested lists, array or tensor, a `Memory` of one
    row, the path of a saved one, or None.

    Args:
        collator: of the other columns, `transformers.DataCollatorForSeq2Seq(tokenizer)` for instance.
        column: that holds the memories.
        memory_dim: width e; only needed where all rows of a batch may be without a memory.

    >>> from transformers import default_data_collator
    >>> rows = [{"input_ids": [5, 6], "memory": [[0.5, 1.0]]}, {"input_ids": [7, 8], "memory": None}]
    >>> MemoryCollator(default_data_collator)(rows)["memory"]
    Memory(b=2, m=1, e=2, float32, lengths=[1, 0])
    """

    def __init__(
        self,
        collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]],
        column: str = "memory",
        memory_dim: int | None = None,
    ) -> None:
        self.collator, self.column = collator, column
        self.memory_dim = None if memory_dim is None else check_int("memory_dim", memory_dim)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Keyword arguments of the adapted model; without `memory` where no row has any and the width is not known.

        Args:
            rows: of the dataset.

        Raises:
            ConfigError: a row without the column.
            ShapeError: a memory that is none, or memories of several widths.
        """
        for row in rows:
            if self.column not in row:
                raise ConfigError(
                    f"the rows have no column {self.column!r} of memories, only {', '.join(row)}: name it with "
                    "column=, and where a Trainer drops columns that it does not know, give it "
                    "remove_unused_columns=False"
                )
        batch = dict(self.collator([{key: row[key] for key in row if key != self.column} for row in rows]))
        memories = [row_memory(row[self.column]) for row in rows]
        width = next((memory.dim for memory in memories if memory is not None), self.memory_dim)
        if width is not None:
            blank = Memory(torch.zeros(1, 0, width))
            batch["memory"] = Memory.stack([blank if memory is None else memory for memory in memories])
        return batch


def row_memory(value: Any) -> Memory | None:
    """The memory of one row from a value of a dataset; None where there is none."""
    if value is None or isinstance(value, Memory):
        memory = value
    elif isinstance(value, (str, PathLike)):
        memory = Memory.load(value)
    else:
        memory = _from_numbers(value)
    if memory is not None and memory.batch != 1:
        raise ShapeError(
            f"the memory of a row must have one row, and this one has {memory.batch}: select one, memory[i]"
        )
    return memory


def _from_numbers(value: Any) -> Memory | None:
    try:
        tokens = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"the memory of a row must be vectors (m, e), and this is no such table: {error}") from error
    if not tokens.numel():
        return None
    if tokens.dim() != 2:
        raise ShapeError(f"the memory of a row must be vectors (m, e), got {tuple(tokens.shape)}")
    return Memory(tokens[None].float() if tokens.dtype == torch.float64 else tokens[None])
