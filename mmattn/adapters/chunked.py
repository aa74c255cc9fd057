"""RETRO's chunked cross-attention (arXiv 2112.04426, section 2.4 and figure 2).

The text is cut into chunks of s tokens. E_u (n·r, e) are the n neighbours of chunk u, r slots each. With x the output
of a host layer, tokens u·s + s - 1 … u·s + 2s - 2 (the last of chunk u, and the next chunk but for its last) become

    y = x + tanh(α) · attend(norm(x), E_u)
    z = y + tanh(β) · feed_forward(norm(y))

so no token sees what was found with its own future, and the first s - 1 tokens, which see nothing, pass through bit for
bit. Only a token's own neighbours are ever scored: rows of the attention are chunks, not texts.

Departures from the paper: gated blocks behind a host layer (they start as nothing on a frozen host) in place of layers
between self-attention and feed-forward; no relative positions, neighbours come as the encoder made them; the encoder
does not look at the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmattn.adapters.gated import BlockLayers, BlockSettings
from mmattn.errors import check_int
from mmattn.memory import Memory


@dataclass(frozen=True)
class ChunkedAdapter(BlockSettings):
    """Settings of chunked cross-attention for a language model: each chunk of the text reads neighbours of its own.

    The memory of a call is a `Memory` (b, c·n·r, e) whose `segments` name the chunk that each slot was found with,
    counted from 0 over the real tokens of the row; or a function from the ids (c, s) of complete chunks to a `Memory`
    (c, n·r, e) of their neighbours, asked once for each chunk that is new, also while text is generated.

    Args:
        chunk_size: s, tokens per chunk.

    The others are those of `GatedAdapter`, without look and media_token.

    >>> ChunkedAdapter(memory_dim=24, layers=[1, 3], chunk_size=16).chunk_size
    16
    """

    chunk_size: int = 64

    kind = "chunked"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("chunk_size", self.chunk_size, at_most=65536)

    def build(self, host_dim: int, layers: Sequence[int]) -> ChunkedLayers:
        """Make the trainable part for a host of width `host_dim` at `layers`."""
        return ChunkedLayers(self, host_dim, layers)


class ChunkedLayers(BlockLayers):
    """The trainable part of one chunked adapter on one host."""

    def read(self, memory: Memory) -> Memory:
        """The memory as every block sees it, a row for each chunk (`by_chunk`), normalised and resampled."""
        return super().read(memory if memory.segments is None else by_chunk(memory))


def grouped(labels: Tensor) -> tuple[list[int], Tensor]:
    """Where equal labels (n,) stand; negative ones belong nowhere.

    Returns:
        the k labels there are, rising; their places (k, most) in rising order, -1 behind those of a rarer label.

    >>> grouped(torch.tensor([7, -1, 2, 7, 7]))
    ([2, 7], tensor([[ 2, -1, -1],
            [ 0,  3,  4]]))
    """
    places = (labels >= 0).nonzero()[:, 0]
    if not len(places):
        return [], places.new_empty(0, 0)
    places = places[labels[places].argsort(stable=True)]
    found, counts = labels[places].unique_consecutive(return_counts=True)
    rows = places.split(counts.tolist())
    return found.tolist(), torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def chunk_slots(memory: Memory) -> tuple[list[tuple[int, int]], Tensor]:
    """The (row, chunk) pairs a memory with segments has neighbours for, and their slots among all b·m, as `grouped`."""
    assert memory.segments is not None
    segments = memory.segments if memory.mask is None else memory.segments.masked_fill(~memory.mask, -1)
    count = int(segments.max()) + 1 if segments.numel() else 0
    rows = torch.arange(memory.batch, device=segments.device)[:, None]
    labels, slots = grouped(torch.where(segments < 0, -1, segments + rows * count).flatten())
    return [divmod(label, count) for label in labels], slots


def by_chunk(memory: Memory) -> Memory:
    """The neighbours of each chunk as a row: (b, m, e) with segments to (k, longest, e), in the order of `chunk_slots`.

    >>> memory = Memory(torch.arange(6.0).view(2, 3, 1), segments=torch.tensor([[0, 2, 2], [-1, 0, -1]]))
    >>> by_chunk(memory).tokens[..., 0], by_chunk(memory).lengths
    (tensor([[0., 0.],
            [1., 2.],
            [4., 0.]]), [1, 2, 1])
    """
    _, slots = chunk_slots(memory)
    mask = slots >= 0
    index = slots.clamp(min=0)
    tokens = memory.tokens.flatten(0, 1)[index].masked_fill(~mask[..., None], 0)
    scores = None if memory.scores is None else memory.scores.flatten()[index]
    return Memory(tokens, None if bool(mask.all()) else mask, scores=scores, check_finite=False)
