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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmattn.adapters.block_adapter import BlockLayers, SlotAdapter
from mmattn.adapters.chunked.neighbours import (
    ChunkMemory,
    MemoryNeighbours,
    Neighbours,
    RetrievedNeighbours,
    by_chunk,
)
from mmattn.adapters.gated.adapter import first_reaching
from mmattn.adapters.prepared_memory import PreparedMemory
from mmattn.adapters.protocols import Site
from mmattn.adapters.registry import register_adapter
from mmattn.adapters.settings import random_memory
from mmattn.errors import check_int
from mmattn.memory import Memory


@register_adapter
@dataclass(frozen=True)
class ChunkedAdapter(SlotAdapter):
    """Settings of chunked cross-attention for a language model: each chunk of the text attends to its own neighbours.

    The memory of a call is a `Memory` (b, c·n·r, e) whose `segments` name the chunk that each slot was retrieved for,
    counted from 0 over the real tokens of the row; or a function from the ids (c, s) of complete chunks to a `Memory`
    (c, n·r, e) of their neighbours, asked once for each chunk that is new, also while text is generated.

    Args:
        chunk_size: s, tokens per chunk.

    The others are those of `SlotAdapter`.

    >>> ChunkedAdapter(memory_dim=24, layers=[1, 3], chunk_size=16).chunk_size
    16
    """

    chunk_size: int = 64

    kind: ClassVar[str] = "chunked"
    example_call: ClassVar[str] = "model.generate(input_ids, memory=retrieve)"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("chunk_size", self.chunk_size, at_most=65536)

    def build(self, sites: Sequence[Site]) -> ChunkedLayers:
        """Return the trainable part for these sites."""
        return ChunkedLayers(self, sites)

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> Memory:
        """Return a random memory of the neighbours of two chunks."""
        return random_memory(generator, rows, self.memory_dim, segments=2, scores=self.score_bias)


class ChunkedLayers(BlockLayers):
    """The trainable part of one chunked adapter on one host."""

    reads_whole_text = True
    separable = False

    def read(self, memory: Memory) -> Memory:
        """Return the memory as every block attends to it, a row for each chunk, normalised and resampled."""
        return super().read(memory if memory.segments is None else by_chunk(memory))

    def bind_memory(self, memory: object, host: nn.Module) -> ChunkMemory:
        if isinstance(memory, Neighbours):
            return ChunkMemory(memory, self)
        if callable(memory) and not isinstance(memory, (Memory, PreparedMemory, Tensor)):
            return ChunkMemory(RetrievedNeighbours(memory), self)
        return ChunkMemory(MemoryNeighbours(self.prepare(memory), self.name), self)

    def first_tokens(self, memory: Memory, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the first token that may attend to each slot (b, m): the last one of the slot's chunk."""
        ids, padding = batch.get("input_ids"), batch.get("attention_mask")
        shape = (batch["inputs_embeds"] if ids is None else ids).shape[:2]
        real = torch.ones(shape, dtype=torch.bool) if padding is None else padding.cpu().bool()
        return first_reaching(real.cumsum(1) // self.config.chunk_size, memory)
