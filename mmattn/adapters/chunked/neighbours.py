"""The neighbours of the chunks of a text: which there are, which must be retrieved, and which tokens attend to them.

The keys and values of every chunk are projected once, in the batch that its neighbours came in; a forward gathers those
it needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.chunked.chunks import chunk_slots, grouped
from mmattn.adapters.prepared_memory import PreparedMemory, check_projected
from mmattn.adapters.protocols import BoundMemory, View
from mmattn.adapters.text_state import TextState
from mmattn.core.attention_inputs import visible_rows
from mmattn.core.kv_cache import KeyValue
from mmattn.core.tensor_cache import TensorCache
from mmattn.errors import ConditionError, ConfigError, ShapeError
from mmattn.memory import Memory

Retrieve = Callable[[Tensor], "Memory | Tensor"]
# A batch of neighbours, and which row of it, as the adapter reads it, a chunk has.
Place = tuple[PreparedMemory, int]


@dataclass(frozen=True)
class Blocks:
    """Tokens (k, q) that attend to the same neighbours, as indices into all (b·l) of a forward; -1 where there are
    fewer.

    Args:
        tokens: the indices.
        places: where the neighbours of each of the k blocks are.
    """

    tokens: Tensor
    places: list[Place]


class Neighbours(ABC):
    """What the chunks of a text attend to, in one call or in many."""

    def __init__(self) -> None:
        self._gathered: dict[tuple[str, int], tuple[list[tuple[KeyValue, int]], KeyValue]] = {}

    @property
    @abstractmethod
    def batch(self) -> int | None:
        """Number of text rows b, or None for any."""

    @abstractmethod
    def places(self, chunks: list[tuple[int, int]], text: TextState, adapter: Any) -> list[Place | None]:
        """Where the neighbours of each (row of the text, chunk) are, None where it has none."""

    @abstractmethod
    def as_memory(self, text: TextState, adapter: Any) -> Memory:
        """The neighbours of all complete chunks of a text as one memory with segments.

        Raises:
            ConfigError: the text has no complete chunk.
        """

    def blocks(self, text: TextState, adapter: Any) -> Blocks:
        """Which tokens of a forward attend to which neighbours: those of the last chunk that has ended."""
        real = text.whole[0].cpu()
        latest = (real.cumsum(1) // adapter.config.chunk_size - 1).masked_fill(~real, -1)[:, -text.length :]
        count = int(latest.max()) + 1 if latest.numel() else 0
        rows = torch.arange(len(latest))[:, None]
        labels, tokens = grouped(torch.where(latest < 0, -1, latest + rows * count).flatten())
        places = self.places([divmod(label, count) for label in labels], text, adapter)
        known = [number for number, place in enumerate(places) if place is not None]
        return Blocks(tokens[known], [place for place in places if place is not None])

    def gather(self, key: tuple[str, int], rows: list[tuple[KeyValue, int]]) -> KeyValue:
        """The rows as one, gathered anew only when they are others than the last time."""
        before, gathered = self._gathered.get(key, ([], None))
        if gathered is None or [(id(one), row) for one, row in before] != [(id(one), row) for one, row in rows]:
            # What is cached must serve calls outside inference mode, too.
            with torch.inference_mode(False), torch.no_grad():
                gathered = KeyValue.gather(rows)
            self._gathered[key] = (rows, gathered)
        return gathered


class NeighbourSource(BoundMemory):
    """The neighbours of a text's chunks, bound to the adapter that reads them.

    Args:
        neighbours: given or retrieved.
        adapter: the trainable part of a chunked adapter.
    """

    follows_text = True

    def __init__(self, neighbours: Neighbours, adapter: Any) -> None:
        self.neighbours, self.adapter = neighbours, adapter
        self.name, self.rows = adapter.name, neighbours.batch
        self.shared: object = neighbours
        if isinstance(neighbours, GivenNeighbours):
            self.shared, memory = neighbours.prepared, neighbours.prepared.memory
            self.unchecked = None if memory.finite_checked else memory

    def step(self, text: TextState) -> NeighbourView:
        """What this forward sees; new chunks get their neighbours here.

        Raises:
            ShapeError: the rows do not fit, or something else than neighbours was retrieved.
            ConditionError: the text is not known.
        """
        self.check_rows(text)
        return NeighbourView(self.neighbours, self.adapter, self.neighbours.blocks(text, self.adapter))

    def shareable(self) -> object:
        """Return the neighbours: those that were retrieved may serve many calls, too."""
        return self.shared

    def as_memory(self, text: TextState) -> Memory:
        """The neighbours of a whole text as one memory with segments."""
        return self.neighbours.as_memory(text, self.adapter)


class NeighbourView(View):
    """What the tokens of one forward see of the neighbours of their chunks.

    Args:
        neighbours: given or retrieved.
        adapter: the trainable part of a chunked adapter.
        blocks: which tokens attend to which neighbours.
    """

    def __init__(self, neighbours: Neighbours, adapter: Any, blocks: Blocks) -> None:
        self.neighbours, self.adapter, self.blocks = neighbours, adapter, blocks

    def apply(self, x: Tensor, block: nn.Module, layer: int, adapter_scale: Any) -> Tensor:
        """What a block gives for hidden states x (b, l, d); tokens in no block stay bit for bit."""
        if not self.blocks.places:
            return x
        memory = self._memory(layer)
        tokens = self.blocks.tokens.to(x.device)
        there = tokens >= 0
        flat = x.flatten(0, 1)
        # What fills up a shorter block is dropped again; a token of its own row is as finite as the row.
        own = flat[torch.where(there, tokens, tokens[:, :1])]
        allowed = None if memory.mask is None else memory.mask[:, None, None]
        seen = visible_rows(allowed, len(own), memory.slots, device=x.device)
        out = block(own, memory, seen=seen, adapter_scale=adapter_scale)
        return flat.index_copy(0, tokens[there], out[there]).view_as(x)

    def _memory(self, layer: int) -> KeyValue:
        """Keys and values that the blocks attend to at a host layer, a row for each."""
        adapter, places, queries = self.adapter, self.blocks.places, self.blocks.tokens.shape[1]
        batches = list({id(batch): batch for batch, _ in places}.values())
        read = [batch.read(adapter) for batch in batches]
        if not any(batch.is_uncached(adapter) for batch in batches):
            projected = {
                id(batch): batch.project(adapter, layer, memory, queries)
                for batch, memory in zip(batches, read, strict=True)
            }
            if len({one.absorbed for one in projected.values()}) == 1:
                return self.neighbours.gather(
                    (adapter.name, layer), [(projected[id(batch)], row) for batch, row in places]
                )
        begins = accumulate((memory.batch for memory in read), initial=0)
        begin = {id(batch): start for batch, start in zip(batches, begins, strict=False)}
        memory = Memory.stack(read)[[begin[id(batch)] + row for batch, row in places]]
        scores = memory.scores if adapter.score_bias else None
        found: KeyValue = adapter.attention(layer).project(
            memory.tokens, mask=memory.mask, scores=scores, queries=queries
        )
        for batch in batches:
            check_projected(adapter, layer, batch.memory, found)
        return found


class GivenNeighbours(Neighbours):
    """A memory whose segments name the chunk of each slot.

    Args:
        prepared: the memory.
        name: of the adapter that reads it.

    Raises:
        ShapeError: it has no segments.
    """

    def __init__(self, prepared: PreparedMemory, name: str) -> None:
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

    def places(self, chunks: list[tuple[int, int]], text: TextState, adapter: Any) -> list[Place | None]:
        """Where the neighbours of each (row of the text, chunk) are, None where the memory has none."""
        memory = self.prepared.memory
        rows: dict[tuple[int, int], int] = self._rows.get(
            None, memory.tensors()[1:], lambda: {chunk: row for row, chunk in enumerate(chunk_slots(memory)[0])}
        )
        beams = text.rows // max(memory.batch, 1)
        found = [rows.get((row // beams, chunk)) for row, chunk in chunks]
        return [None if row is None else (self.prepared, row) for row in found]

    def as_memory(self, text: TextState, adapter: Any) -> Memory:
        """The memory itself."""
        return self.prepared.memory.detach()


class RetrievedNeighbours(Neighbours):
    """Neighbours that a function retrieves for ids (k, s) of complete chunks, asked once for each chunk.

    Args:
        retrieve: from ids (k, s) to a `Memory` (k, n·r, e), a row for each chunk.
    """

    batch = None

    def __init__(self, retrieve: Retrieve) -> None:
        super().__init__()
        self.retrieve = retrieve
        self._known: dict[tuple[int, ...], Place] = {}

    def places(self, chunks: list[tuple[int, int]], text: TextState, adapter: Any) -> list[Place | None]:
        """Where the neighbours of each (row of the text, chunk) are, retrieved now unless they are known by their ids.

        Raises:
            ConditionError: the ids are not known.
            ShapeError: the function gave something that does not fit.
        """
        if not chunks:
            return []
        real, known_ids = text.whole
        if known_ids is None:
            raise ConditionError(
                f"adapter {adapter.name!r} was given a function that finds neighbours for the ids of chunks, and this "
                "call does not tell the ids of the whole text: give input_ids from the first token on, use generate, "
                "or a Memory with segments"
            )
        size = adapter.config.chunk_size
        ids = {row: known_ids[row][real[row].to(known_ids.device)].tolist() for row, _ in chunks}
        keys = [tuple(ids[row][chunk * size : (chunk + 1) * size]) for row, chunk in chunks]
        new = list(dict.fromkeys(key for key in keys if key not in self._known))
        if new:
            batch = PreparedMemory(self._retrieve(torch.tensor(new, device=known_ids.device), adapter.name))
            self._known.update((key, (batch, row)) for row, key in enumerate(new))
        places = [self._known[key] for key in keys]
        for batch in {id(batch): batch for batch, _ in places}.values():
            adapter.check_memory(batch.memory)
        return list(places)

    def _retrieve(self, ids: Tensor, name: str) -> Memory:
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

    def as_memory(self, text: TextState, adapter: Any) -> Memory:
        """What the function retrieves for the complete chunks of a text, as one memory with segments.

        Raises:
            ConfigError: there is no complete chunk.
        """
        size = adapter.config.chunk_size
        real, ids = text.whole
        assert ids is not None
        texts = [
            row[keep].unfold(0, size, size) if keep.sum() >= size else row.new_empty(0, size)
            for row, keep in zip(ids, real, strict=True)
        ]
        counts = torch.tensor([len(one) for one in texts])
        if not counts.any():
            raise ConfigError(f"no row has a chunk of {size} tokens to find neighbours for: give a longer text")
        memory = self._retrieve(torch.cat(texts), adapter.name)
        chunk = torch.arange(int(counts.max()))
        there = (chunk < counts[:, None]).to(memory.device)
        index = (counts.cumsum(0) - counts)[:, None] + chunk
        index = index.to(memory.device).where(there, 0)
        slots = torch.ones(memory.tokens.shape[:2], dtype=torch.bool) if memory.mask is None else memory.mask
        mask = (slots.to(memory.device)[index] & there[..., None]).flatten(1)
        segments = chunk.repeat_interleave(memory.length).expand(len(ids), -1).to(memory.device)
        scores = None if memory.scores is None else memory.scores[index].flatten(1)
        return Memory(memory.tokens[index].flatten(1, 2), mask, segments, scores)
