"""RETRO's chunked cross-attention (arXiv 2112.04426, section 2.4 and figure 2).

The text is cut into chunks of s tokens. E_u (n·r, e) are the n neighbours of chunk u, r slots each. With x the output
of a host layer, tokens u·s + s - 1 … u·s + 2s - 2 (the last of chunk u, and the next chunk but for its last) become

    y = x + tanh(α) · attend(norm(x), E_u)
    z = y + tanh(β) · feed_forward(norm(y))

so no token sees what was retrieved with its own future, and the first s - 1 tokens, which see nothing, pass through bit
for bit. Only a token's own neighbours are ever scored: rows of the attention are chunks, not texts.

Departures from the paper: gated blocks after a host layer (they start as nothing on a frozen host) in place of layers
between self-attention and feed-forward; no relative positions, neighbours come as the encoder made them; the encoder
does not attend to the chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor, nn

from mmattn.adapters.gated.block import BlockLayers, first_reaching
from mmattn.adapters.gated.config import POSITIONS, GatedLayout, settle_block, settle_scores
from mmattn.adapters.projection import PreparedMemory, ProjectedView, check_projected, project_layers
from mmattn.adapters.protocols import BoundMemory, PackedView, Traits
from mmattn.adapters.resampler import Resampler
from mmattn.adapters.settings import AdapterConfig, random_memory
from mmattn.adapters.text_state import Keywords, PackedText, TextState
from mmattn.core.attention_inputs import visible_rows
from mmattn.core.key_values import KeyValue
from mmattn.errors import ConditionError, ConfigError, ShapeError, check_int
from mmattn.memory import Memory
from mmattn.storage.tensor_cache import TensorCache


@dataclass(frozen=True)
class ChunkedAdapter(AdapterConfig):
    """Settings of chunked cross-attention for a language model: each chunk of the text attends to its own neighbours.

    The memory of a call is a `Memory` (b, c·n·r, e) whose `segments` name the chunk that each slot was retrieved for,
    counted from 0 over the real tokens of the row; or a function from the ids (c, s) of complete chunks to a `Memory`
    (c, n·r, e) of their neighbours. The function is called once for each new chunk, also during generation.

    Args:
        memory_dim: e, width of the memory.
        every: add a block at every n-th host layer (layers n-1, 2n-1, …). Without `layers` it defaults to 4, or to the
            depth of a smaller host.
        layers: the host layers with a block, counted from 0, instead of `every`.
        num_heads: h of the cross-attention; 8 by default, fewer for a narrow host, see `default_heads`.
        head_dim: k of the cross-attention; 64 by default, less for a narrow host.
        num_kv_heads: g of the cross-attention, h by default.
        feed_forward: hidden width of the gated feed-forward as a multiple of d (4 in the paper; 1 decodes faster); 0
            for none.
        gate: "scalar", "head" or "channel": one gate value for the block, each head or each channel.
        qk_norm: normalise queries and keys, as in `CrossAttention`.
        null_slot: add a learned slot to the memory, as in `CrossAttention`.
        length_norm: C of arXiv 2410.10450, as in `CrossAttention`.
        dropout: probability of dropping an attention weight, in training.
        position: run the block "after" its host layer, or "before" it.
        layout: norms, activation and feed-forward as in published models.
        score_bias: add the memory's `scores`, which are then required, to the attention scores.
        score_mean: with `score_bias`, the score that adds nothing.
        score_std: with `score_bias`, the distance from `score_mean` at which a score adds one learned temperature.
        resampler: first reduce the memory to a few latents.
        chunk_size: s, tokens per chunk.

    >>> ChunkedAdapter(memory_dim=24, layers=[1, 3], chunk_size=16).chunk_size
    16
    """

    memory_dim: int
    every: int | None = None
    layers: tuple[int, ...] | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    num_kv_heads: int | None = None
    feed_forward: float = 1.0
    gate: str = "scalar"
    qk_norm: bool = False
    null_slot: bool = False
    length_norm: float | None = None
    dropout: float = 0.0
    position: str = "after"
    layout: GatedLayout = field(default_factory=GatedLayout)
    score_bias: bool = False
    score_mean: float = 0.0
    score_std: float = 1.0
    resampler: Resampler | None = None
    chunk_size: int = 64

    kind: ClassVar[str] = "chunked"
    positions: ClassVar[tuple[str, ...]] = POSITIONS
    example_call: ClassVar[str] = "model.generate(input_ids, memory=retrieve)"

    def __post_init__(self) -> None:
        settle_block(self)
        settle_scores(self)
        check_int("chunk_size", self.chunk_size, at_most=65536)

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> Memory:
        """Return a random memory of the neighbours of two chunks."""
        return random_memory(generator, rows, self.memory_dim, segments=2, scores=self.score_bias)


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
    def places(self, chunks: list[Chunk], text: TextState, adapter: ChunkedLayers) -> list[Place | None]:
        """Return where the neighbours of each chunk are, None for a chunk without any."""

    @abstractmethod
    def as_memory(self, text: TextState, adapter: ChunkedLayers) -> Memory:
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

    def places(self, chunks: list[Chunk], text: TextState, adapter: ChunkedLayers) -> list[Place | None]:
        assert self.prepared is not None
        memory = self.prepared.memory
        numbers: dict[Chunk, int] = self._numbers.get(
            None, memory.tensors()[1:], lambda: {chunk: row for row, chunk in enumerate(_chunk_slots(memory)[0])}
        )
        beams = text.rows // max(memory.batch, 1)
        rows = [numbers.get((row // beams, chunk)) for row, chunk in chunks]
        return [None if row is None else (self.prepared, row) for row in rows]

    def as_memory(self, text: TextState, adapter: ChunkedLayers) -> Memory:
        assert self.prepared is not None
        return self.prepared.memory.detach()


class RetrievedNeighbours(Neighbours):
    """Neighbours that a function retrieves for complete chunks, called once for each chunk."""

    def __init__(self, retrieve: Callable[[Tensor], Memory | Tensor]) -> None:
        super().__init__()
        self.retrieve = retrieve
        self._known: dict[tuple[int, ...], Place] = {}

    def places(self, chunks: list[Chunk], text: TextState, adapter: ChunkedLayers) -> list[Place | None]:
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

    def as_memory(self, text: TextState, adapter: ChunkedLayers) -> Memory:
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

    def __init__(self, neighbours: Neighbours, adapter: ChunkedLayers) -> None:
        self.neighbours, self.adapter = neighbours, adapter
        self.name, self.rows, self.shared = adapter.name, neighbours.rows, neighbours
        if neighbours.prepared is not None:
            self.shared, memory = neighbours.prepared, neighbours.prepared.memory
            self.unchecked = None if memory.finite_checked else memory

    @torch.compiler.disable  # which chunks have ended depends on values
    def step(self, text: TextState) -> PackedView:
        """Return what this forward attends to: each token the neighbours of the last chunk that has ended."""
        self.check_rows(text)
        real = text.whole[0].cpu()
        latest = (real.cumsum(1) // self.adapter.config.chunk_size - 1).masked_fill(~real, -1)[:, -text.length :]
        count = int(latest.max()) + 1 if latest.numel() else 0
        rows = torch.arange(len(latest), device=latest.device)[:, None]
        labels, tokens = grouped(torch.where(latest < 0, -1, latest + rows * count).flatten())
        places = self.neighbours.places([divmod(label, count) for label in labels], text, self.adapter)
        numbers = [number for number, place in enumerate(places) if place is not None]
        tokens, real = tokens[numbers], tokens[numbers] >= 0
        # Shorter rows are filled with a token of their own, which is as finite as the row, and dropped again.
        chunks = PackedText(latest, tokens[real], torch.where(real, tokens, tokens[:, :1]), real)
        return PackedView(self._see([place for place in places if place is not None]), chunks)

    def _see(self, places: list[Place]) -> ProjectedView:
        """Return keys and values with a row for each chunk."""
        adapter, projected, may_cache = self.adapter, {}, True
        for batch in {id(batch): batch for batch, _ in places}.values():
            values = batch.values(adapter)
            read, may_cache = batch.read(adapter, values), may_cache and values is not None
            # Rows are gathered one by one, which layouts for few queries do not allow.
            projected[id(batch)] = (
                check_projected(adapter, batch.memory, project_layers(adapter, adapter.layers, read))
                if values is None
                else batch.project(adapter, adapter.layers, read, 1, values)
            )
        gathered = {}
        for layer in adapter.layers if places else ():
            rows = [(projected[id(batch)][layer], row) for batch, row in places]
            name = adapter.name, layer
            gathered[layer] = self.neighbours.gather(name, rows) if may_cache else KeyValue.gather(rows)
        if not gathered:
            return ProjectedView({})
        first = gathered[adapter.layers[0]]
        allowed = None if first.mask is None else first.mask[:, None, None]
        return ProjectedView(
            gathered, has_memory=visible_rows(allowed, first.batch, first.slots, device=first.keys.device)
        )

    def shareable(self) -> object:
        """Return the memory, or the neighbours that were retrieved: they may serve many calls, too."""
        return self.shared

    def as_memory(self, text: TextState) -> Memory:
        return self.neighbours.as_memory(text, self.adapter)


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


class ChunkedLayers(BlockLayers):
    """The trainable part of one chunked adapter on one host."""

    config: ChunkedAdapter
    traits = Traits(reads_whole_text=True)
    separable = False

    def read(self, memory: Memory) -> Memory:
        return super().read(memory if memory.segments is None else by_chunk(memory))

    def bind_memory(self, memory: object, host: nn.Module) -> ChunkMemory:
        if isinstance(memory, Neighbours):
            return ChunkMemory(memory, self)
        if callable(memory) and not isinstance(memory, (Memory, PreparedMemory, Tensor)):
            return ChunkMemory(RetrievedNeighbours(memory), self)
        return ChunkMemory(MemoryNeighbours(self.prepare(memory), self.name), self)

    def first_tokens(self, memory: Memory, batch: Keywords) -> Tensor | None:
        """Return the first token that may attend to each slot (b, m): the last one of the slot's chunk."""
        ids, padding = batch.get("input_ids"), batch.get("attention_mask")
        shape = (batch["inputs_embeds"] if ids is None else ids).shape[:2]
        real = torch.ones(shape, dtype=torch.bool) if padding is None else padding.cpu().bool()
        return first_reaching(real.cumsum(1) // self.config.chunk_size, memory)
