"""`StoreMemories`: the memories that the rows of a store bring, as a collator asks for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmattn.data.encoded.blocks import StoredRow, joined, stacked
from mmattn.data.encoded.store import MemoryStore
from mmattn.data.row_contents import given_memory
from mmattn.data.row_memories import RowMemories
from mmattn.data.rows import Row
from mmattn.memory import Memory


class StoreMemories(RowMemories):
    """Memories of the rows of a store: nothing is encoded any more.

    Args:
        store: of the rows.

    >>> import tempfile
    >>> from mmattn.training import encode_rows
    >>> given = [Memory(torch.ones(1, 3, 2)), None, Memory(torch.ones(1, 1, 2))]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = encode_rows([Row("a text", memory=memory) for memory in given], folder)
    ...     StoreMemories(store).of(store[:])
    Memory(b=3, m=3, e=2, float32, lengths=[3, 0, 1], segments)
    """

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store.address, dim=store.dim)
        self.store = store

    @property
    def fingerprint(self) -> str | None:
        """What identifies the encoders that made the store; None where rows brought their memories."""
        return self.store.fingerprint

    def of(self, rows: Sequence[Row]) -> Memory | None:
        """The memory (b, m, e) of b rows in float32, empty in a row without one; None if no row has any."""
        if any(row.images or row.passages for row in rows):
            return super().of(rows)  # which says that there is no encoder for them
        entries = [row.entries() if isinstance(row, StoredRow) else None for row in rows]
        single = [one[0] for one in entries if one is not None and len(one) == 1]
        alike = stacked(single) if 0 < len(single) == len(rows) else None
        if alike is not None:
            return alike
        memories = [row.memory if one is None else joined(one) for row, one in zip(rows, entries, strict=True)]
        if all(memory is None for memory in memories):
            return None
        blank = Memory(torch.zeros(1, 0, self.dim), segments=torch.zeros(1, 0, dtype=torch.long))
        given = [blank if one is None else one if isinstance(one, Memory) else given_memory(one) for one in memories]
        return Memory.stack(given).to(torch.float32)
