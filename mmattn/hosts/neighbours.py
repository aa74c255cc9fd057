"""The neighbours of the chunks of a text: which there are, which must be found, and which tokens read them.

Every chunk's keys and values are made once, in the batch that its neighbours came in; a forward gathers those it needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mmattn.adapters.chunked import ChunkedLayers, chunk_slots, grouped
from mmattn.core.attention import visible_rows
from mmattn.core.kv import KeyValue
from mmattn.core.tensor_cache import TensorCache
from mmattn.errors import ConditionError, ShapeError
from mmattn.hosts.calls import Prepared
from mmattn.hosts.causal_lm.text_state import Text
from mmattn.memory import Memory

Retrieve = Callable[[Tensor], "Memory | Tensor"]
# A batch of neighbours, and which row of it, as the adapter reads it, a chunk has.
Place = tuple[Prepared, int]


@dataclass(frozen=True)
class Blocks:
    """Tokens (k, q) that read the same neighbours, as places among all (b·l) of a piece; -1 where there are fewer.

    Args:
        places: where the neighbours of each of the k blocks are.
    """

    tokens: Tensor
    places: list[Place]


class Neighbours(ABC):
    """What the chunks of a text read, in one call or in many."""

    def __init__(self) -> None:
        self._gathered: dict[tuple[str, int], tuple[list[tuple[KeyValue, int]], KeyValue]] = {}

    @property
    @abstractmethod
    def batch(self) -> int | None:
        """Number of text rows b, or None for any."""

    @abstractmethod
    def places(
        self, chunks: list[tuple[int, int]], text: Text, name: str, adapter: ChunkedLayers
    ) -> list[Place | None]:
        """Where the neighbours of each (row of the text, chunk) are, None where it has none."""

    def blocks(self, text: Text, length: int, name: str, adapter: ChunkedLayers) -> Blocks:
        """Which of the last `length` tokens of a text read which neighbours: those of the last chunk that has ended."""
        real = text.real.cpu()
        latest = (real.cumsum(1) // adapter.config.chunk_size - 1).masked_fill(~real, -1)[:, -length:]
        count = int(latest.max()) + 1 if latest.numel() else 0
        rows = torch.arange(len(latest))[:, None]
        labels, tokens = grouped(torch.where(latest < 0, -1, latest + rows * count).flatten())
        places = self.places([divmod(label, count) for label in labels], text, name, adapter)
        known = [number for number, place in enumerate(places) if place is not None]
        return Blocks(tokens[known], [place for place in places if place is not None])

    def adapt(
        self, x: Tensor, name: str, adapter: ChunkedLayers, layer: int, blocks: Blocks, strength: float
    ) -> Tensor:
        """What the hidden states x (b, l, d) behind a host layer become; tokens in no block stay bit for bit."""
        if not blocks.places:
            return x
        memory, mask, scores = self._look(name, adapter, layer, blocks)
        tokens = blocks.tokens.to(x.device)
        there = tokens >= 0
        flat = x.flatten(0, 1)
        # What fills up a shorter block is dropped again; a token of its own row is as finite as the row.
        mine = flat[torch.where(there, tokens, tokens[:, :1])]
        slots = memory.slots if isinstance(memory, KeyValue) else memory.shape[1]
        allowed = None if mask is None else mask[:, None, None]
        out = adapter.block(layer)(
            mine,
            memory,
            mask=None if isinstance(memory, KeyValue) else mask,
            scores=scores,
            seen=visible_rows(allowed, len(mine), slots, device=x.device),
            strength=strength,
        )
        return flat.index_copy(0, tokens[there], out[there]).view_as(x)

    def _look(
        self, name: str, adapter: ChunkedLayers, layer: int, blocks: Blocks
    ) -> tuple[Tensor | KeyValue, Tensor | None, Tensor | None]:
        """What the blocks read at a host layer, a row for each: the memory or its keys and values, mask and scores."""
        batches = list({id(batch): batch for batch, _ in blocks.places}.values())
        looks = [batch.look(name, adapter, layer, blocks.tokens.shape[1]) for batch in batches]
        kept = {id(batch): made for batch, (_, made) in zip(batches, looks, strict=True) if made is not None}
        if len(kept) == len(batches) and len({made.absorbed for made in kept.values()}) == 1:
            made = self._gather((name, layer), [(kept[id(batch)], row) for batch, row in blocks.places])
            return made, made.mask, None
        begins = accumulate((memory.batch for memory, _ in looks), initial=0)
        begin = {id(batch): start for batch, start in zip(batches, begins, strict=False)}
        rows = [begin[id(batch)] + row for batch, row in blocks.places]
        memory = Memory.stack([memory for memory, _ in looks])[rows]
        return memory.tokens, memory.mask, memory.scores if adapter.score_bias else None

    def _gather(self, key: tuple[str, int], rows: list[tuple[KeyValue, int]]) -> KeyValue:
        """The rows as one, gathered anew only when they are others than the last time."""
        before, made = self._gathered.get(key, ([], None))
        if made is None or [(id(one), row) for one, row in before] != [(id(one), row) for one, row in rows]:
            # What is kept must serve calls outside inference mode, too.
            with torch.inference_mode(False), torch.no_grad():
                made = KeyValue.gather(rows)
            self._gathered[key] = (rows, made)
        return made


class Given(Neighbours):
    """A memory whose segments name the chunk of each slot, for the adapter attached as `name`.

    Raises:
        ShapeError: it has no segments.
    """

    def __init__(self, prepared: Prepared, name: str) -> None:
        super().__init__()
        if prepared.memory.segments is None:
            raise ShapeError(
                f"adapter {name!r} reads neighbours of chunks and the memory has no segments: give segments (b, m), "
                "the chunk of the text that each slot belongs to, from 0"
            )
        self.prepared = prepared
        self._rows = TensorCache()

    @property
    def batch(self) -> int:
        """Number of text rows b."""
        return self.prepared.batch

    def places(
        self, chunks: list[tuple[int, int]], text: Text, name: str, adapter: ChunkedLayers
    ) -> list[Place | None]:
        """Where the neighbours of each (row of the text, chunk) are, None where the memory has none."""
        memory = self.prepared.memory
        rows: dict[tuple[int, int], int] = self._rows.get(
            None, memory.tensors()[1:], lambda: {chunk: row for row, chunk in enumerate(chunk_slots(memory)[0])}
        )
        beams = len(text.real) // max(memory.batch, 1)
        found = [rows.get((row // beams, chunk)) for row, chunk in chunks]
        return [None if row is None else (self.prepared, row) for row in found]


class Found(Neighbours):
    """Neighbours that a function finds for ids (k, s) of complete chunks, asked once for each chunk."""

    batch = None

    def __init__(self, retrieve: Retrieve) -> None:
        super().__init__()
        self.retrieve = retrieve
        self._known: dict[tuple[int, ...], Place] = {}

    def places(
        self, chunks: list[tuple[int, int]], text: Text, name: str, adapter: ChunkedLayers
    ) -> list[Place | None]:
        """Where the neighbours of each (row of the text, chunk) are, found now unless they are known by their ids.

        Raises:
            ConditionError: the ids are not known. ShapeError: the function gave something that does not fit.
        """
        if not chunks:
            return []
        if text.ids is None:
            raise ConditionError(
                f"adapter {name!r} was given a function that finds neighbours for the ids of chunks, and this call "
                "does not tell the ids of the whole text: give input_ids from the first token on, use generate, or a "
                "Memory with segments"
            )
        size = adapter.config.chunk_size
        ids = {row: text.ids[row][text.real[row].to(text.ids.device)].tolist() for row, _ in chunks}
        keys = [tuple(ids[row][chunk * size : (chunk + 1) * size]) for row, chunk in chunks]
        new = list(dict.fromkeys(key for key in keys if key not in self._known))
        if new:
            batch = Prepared(self._find(torch.tensor(new, device=text.ids.device), name))
            self._known.update((key, (batch, row)) for row, key in enumerate(new))
        places = [self._known[key] for key in keys]
        for batch in {id(batch): batch for batch, _ in places}.values():
            adapter.check_memory(name, batch.memory)
        return list(places)

    def _find(self, ids: Tensor, name: str) -> Memory:
        found = self.retrieve(ids)
        memory = Memory(found) if isinstance(found, Tensor) else found
        if not isinstance(memory, Memory):
            raise ShapeError(f"neighbours for adapter {name!r} must come as a Memory, got {type(found).__name__}")
        if memory.batch != len(ids):
            raise ShapeError(
                f"neighbours of {len(ids)} chunks were asked for adapter {name!r} and a memory of {memory.batch} rows "
                "came: give one row for each chunk"
            )
        # Segments may tell neighbours apart here; to the adapter they would name chunks.
        return Memory(memory.tokens, memory.mask, scores=memory.scores, check_finite=memory.finite_checked)
