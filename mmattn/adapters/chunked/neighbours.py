"""The neighbours of the chunks of a text: from a memory or retrieved, and the tokens that attend to them.

Keys and values of every chunk are projected once, in the batch that its neighbours came in; a forward gathers those of
its chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor, nn

from mmattn.adapters.block_adapter import BlockLayers
from mmattn.adapters.prepared_memory import PreparedMemory, check_projected, project_layer
from mmattn.adapters.protocols import BoundMemory, Scale, View
from mmattn.adapters.text_state import TextState
from mmattn.core.attention_inputs import visible_rows
from mmattn.core.kv_cache import KeyValue
from mmattn.core.tensor_cache import TensorCache
from mmattn.errors import ConditionError, ConfigError, ShapeError
from mmattn.memory import Memory

Retrieve = Callable[[Tensor], "Memory | Tensor"]
#: A row of the text and a chunk of it, counted from 0.
Chunk = tuple[int, int]
#: A batch of neighbours, and the row of a chunk in it, as the adapter reads it.
Place = tuple[PreparedMemory, int]


class Neighbours(ABC):
    """The neighbours of the chunks of texts, for one call or many."""

    rows: int | None = None
    prepared: PreparedMemory | None = None

    def __init__(self) -> None:
        self._gathered: dict[tuple[str, int], tuple[list[tuple[KeyValue, int]], KeyValue]] = {}

    @abstractmethod
    def places(self, chunks: list[Chunk], text: TextState, adapter: BlockLayers) -> list[Place | None]:
        """Return where the neighbours of each chunk are, None for a chunk without any."""

    @abstractmethod
    def as_memory(self, text: TextState, adapter: BlockLayers) -> Memory:
        """Return the neighbours of all complete chunks of a text as one memory with segments."""

    def gather(self, key: tuple[str, int], rows: list[tuple[KeyValue, int]]) -> KeyValue:
        """Return rows of keys and values as one, gathered again if they are not those of the last forward."""
        before, gathered = self._gathered.get(key, ([], None))
        if gathered is None or [(id(one), row) for one, row in before] != [(id(one), row) for one, row in rows]:
            # A cached value must serve calls outside inference mode, too.
            with torch.inference_mode(False), torch.no_grad():
                gathered = KeyValue.gather(rows)
            self._gathered[key] = (rows, gathered)
        return gathered


class MemoryNeighbours(Neighbours):
    """A memory whose segments name the chunk of each slot.

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
        self.prepared, self.rows = prepared, prepared.batch
        self._numbers = TensorCache()

    def places(self, chunks: list[Chunk], text: TextState, adapter: BlockLayers) -> list[Place | None]:
        assert self.prepared is not None
        memory = self.prepared.memory
        numbers: dict[Chunk, int] = self._numbers.get(
            None, memory.tensors()[1:], lambda: {chunk: row for row, chunk in enumerate(_chunk_slots(memory)[0])}
        )
        beams = text.rows // max(memory.batch, 1)
        rows = [numbers.get((row // beams, chunk)) for row, chunk in chunks]
        return [None if row is None else (self.prepared, row) for row in rows]

    def as_memory(self, text: TextState, adapter: BlockLayers) -> Memory:
        assert self.prepared is not None
        return self.prepared.memory.detach()


class RetrievedNeighbours(Neighbours):
    """Neighbours that a function retrieves for complete chunks, called once for each chunk."""

    def __init__(self, retrieve: Retrieve) -> None:
        super().__init__()
        self.retrieve = retrieve
        self._known: dict[tuple[int, ...], Place] = {}

    def places(self, chunks: list[Chunk], text: TextState, adapter: BlockLayers) -> list[Place | None]:
        """Return where the neighbours of each chunk are; those of new ids are retrieved."""
        if not chunks:
            return []
        real, text_ids = text.whole
        if text_ids is None:
            raise ConditionError(
                f"the function of adapter {adapter.name!r} needs the ids of the whole text: give input_ids from the "
                "first token on, use generate, or give a Memory with segments"
            )
        size = adapter.config.chunk_size
        ids = {row: text_ids[row][real[row].to(text_ids.device)].tolist() for row, _ in chunks}
        keys = [tuple(ids[row][chunk * size : (chunk + 1) * size]) for row, chunk in chunks]
        new = list(dict.fromkeys(key for key in keys if key not in self._known))
        if new:
            batch = PreparedMemory(self._retrieve(torch.tensor(new, device=text_ids.device), adapter.name))
            self._known.update((key, (batch, row)) for row, key in enumerate(new))
        places = [self._known[key] for key in keys]
        for batch in {id(batch): batch for batch, _ in places}.values():
            adapter.check_memory(batch.memory)
        return list(places)

    def _retrieve(self, ids: Tensor, name: str) -> Memory:
        neighbours = self.retrieve(ids)
        memory = Memory(neighbours) if isinstance(neighbours, Tensor) else neighbours
        if not isinstance(memory, Memory):
            raise ShapeError(f"neighbours for adapter {name!r} must come as a Memory, got {type(memory).__name__}")
        if memory.batch != len(ids):
            raise ShapeError(
                f"neighbours of {len(ids)} chunks were asked for adapter {name!r} and a memory of {memory.batch} rows "
                "came: give one row for each chunk"
            )
        # Segments may tell neighbours apart here; to the adapter they would name chunks.
        return Memory(memory.tokens, memory.mask, scores=memory.scores, check_finite=memory.finite_checked)

    def as_memory(self, text: TextState, adapter: BlockLayers) -> Memory:
        """Return the neighbours of all complete chunks; ConfigError if there is none."""
        size = adapter.config.chunk_size
        real, ids = text.whole
        assert ids is not None
        texts = [
            row[keep].unfold(0, size, size) if keep.sum() >= size else row.new_empty(0, size)
            for row, keep in zip(ids, real, strict=True)
        ]
        if not any(map(len, texts)):
            raise ConfigError(f"no row has a chunk of {size} tokens to find neighbours for: give a longer text")
        memory = self._retrieve(torch.cat(texts), adapter.name)
        begins = [0, *accumulate(map(len, texts))]
        rows = (memory[begin : begin + len(one)] for begin, one in zip(begins, texts, strict=False))
        return Memory.stack([_as_row(row) for row in rows])


class ChunkMemory(BoundMemory):
    """The neighbours of a text's chunks, bound to the adapter that reads them."""

    follows_text = True

    def __init__(self, neighbours: Neighbours, adapter: BlockLayers) -> None:
        self.neighbours, self.adapter = neighbours, adapter
        self.name, self.rows, self.shared = adapter.name, neighbours.rows, neighbours
        if neighbours.prepared is not None:
            self.shared, memory = neighbours.prepared, neighbours.prepared.memory
            self.unchecked = None if memory.finite_checked else memory

    def step(self, text: TextState) -> ChunkView:
        """Return what this forward attends to: each token the neighbours of the last chunk that has ended."""
        self.check_rows(text)
        real = text.whole[0].cpu()
        latest = (real.cumsum(1) // self.adapter.config.chunk_size - 1).masked_fill(~real, -1)[:, -text.length :]
        count = int(latest.max()) + 1 if latest.numel() else 0
        rows = torch.arange(len(latest))[:, None]
        labels, tokens = grouped(torch.where(latest < 0, -1, latest + rows * count).flatten())
        places = self.neighbours.places([divmod(label, count) for label in labels], text, self.adapter)
        numbers = [number for number, place in enumerate(places) if place is not None]
        return ChunkView(self, tokens[numbers], [place for place in places if place is not None])

    def shareable(self) -> object:
        """Return the memory, or the neighbours that were retrieved: they may serve many calls, too."""
        return self.shared

    def as_memory(self, text: TextState) -> Memory:
        return self.neighbours.as_memory(text, self.adapter)


class ChunkView(View):
    """The neighbours of chunks as the tokens of one forward attend to them."""

    def __init__(self, memory: ChunkMemory, tokens: Tensor, places: list[Place]) -> None:
        self.memory, self.tokens, self.places = memory, tokens, places

    def apply(self, x: Tensor, block: nn.Module, layer: int, adapter_scale: Scale) -> Tensor:
        """Return the output of a block for x (b, l, d); tokens without neighbours stay as they are, bit for bit."""
        if not self.places:
            return x
        memory = self._project(layer)
        tokens = self.tokens.to(x.device)
        real = tokens >= 0
        flat = x.flatten(0, 1)
        # Shorter rows are filled with a token of their own, which is as finite as the row, and dropped again.
        queries = flat[torch.where(real, tokens, tokens[:, :1])]
        allowed = None if memory.mask is None else memory.mask[:, None, None]
        seen = visible_rows(allowed, len(queries), memory.slots, device=x.device)
        out = block(queries, memory, seen=seen, adapter_scale=adapter_scale)
        return flat.index_copy(0, tokens[real], out[real]).view_as(x)

    def _project(self, layer: int) -> KeyValue:
        """Return keys and values at a host layer, a row for each chunk."""
        adapter, neighbours = self.memory.adapter, self.memory.neighbours
        batches = {id(batch): batch for batch, _ in self.places}

        def rows(projected: dict[int, KeyValue]) -> list[tuple[KeyValue, int]]:
            return [(projected[id(batch)], row) for batch, row in self.places]

        if any(batch.is_uncached(adapter) for batch in batches.values()):
            projected = {key: project_layer(adapter, layer, batch.read(adapter)) for key, batch in batches.items()}
            for key, batch in batches.items():
                check_projected(adapter, layer, batch.memory, projected[key])
            return KeyValue.gather(rows(projected))
        queries = self.tokens.shape[1]
        cached = {key: batch.project(adapter, layer, batch.read(adapter), queries) for key, batch in batches.items()}
        return neighbours.gather((adapter.name, layer), rows(cached))


def grouped(labels: Tensor) -> tuple[list[int], Tensor]:
    """Group equal labels (n,): k labels in rising order, and their places (k, most), -1 after those of a rarer one.

    Negative labels belong to no group.

    >>> grouped(torch.tensor([7, -1, 2, 7, 7]))
    ([2, 7], tensor([[ 2, -1, -1],
            [ 0,  3,  4]]))
    """
    places = (labels >= 0).nonzero()[:, 0]
    if not len(places):
        return [], places.new_empty(0, 0)
    places = places[labels[places].argsort(stable=True)]
    names, counts = labels[places].unique_consecutive(return_counts=True)
    rows = places.split(counts.tolist())
    return names.tolist(), torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def _chunk_slots(memory: Memory) -> tuple[list[Chunk], Tensor]:
    """Return the chunks that a memory with segments has neighbours for, and their slots among all b·m, as `grouped`."""
    assert memory.segments is not None
    segments = memory.segments if memory.mask is None else memory.segments.masked_fill(~memory.mask, -1)
    count = int(segments.max()) + 1 if segments.numel() else 0
    rows = torch.arange(memory.batch, device=segments.device)[:, None]
    labels, slots = grouped(torch.where(segments < 0, -1, segments + rows * count).flatten())
    return [divmod(label, count) for label in labels], slots


def by_chunk(memory: Memory) -> Memory:
    """Return the neighbours of each chunk as a row: (b, m, e) with segments to (k, longest, e).

    >>> memory = Memory(torch.arange(6.0).view(2, 3, 1), segments=torch.tensor([[0, 2, 2], [-1, 0, -1]]))
    >>> by_chunk(memory).tokens[..., 0], by_chunk(memory).lengths
    (tensor([[0., 0.],
            [1., 2.],
            [4., 0.]]), [1, 2, 1])
    """
    _, slots = _chunk_slots(memory)
    mask = slots >= 0
    index = slots.clamp(min=0)
    tokens = memory.tokens.flatten(0, 1)[index].masked_fill(~mask[..., None], 0)
    scores = None if memory.scores is None else memory.scores.flatten()[index]
    return Memory(tokens, None if bool(mask.all()) else mask, scores=scores, check_finite=False)


def _as_row(memory: Memory) -> Memory:
    """Return the rows of a memory, one for each chunk, as one row with segments."""
    mask, scores = (None if one is None else one.flatten()[None] for one in (memory.mask, memory.scores))
    segments = torch.arange(memory.batch, device=memory.device).repeat_interleave(memory.length)[None]
    return Memory(memory.tokens.flatten(0, 1)[None], mask, segments, scores)
