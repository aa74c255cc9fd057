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

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from mmattn.adapters.gated.config import POSITIONS, GatedLayout, decoder_sites, settle_block, settle_scores
from mmattn.adapters.protocols import Host, Site
from mmattn.adapters.resampler import Resampler
from mmattn.adapters.settings import chosen_sites, random_memory
from mmattn.errors import check_int
from mmattn.memory import Memory


@dataclass(frozen=True)
class ChunkedAdapter:
    """Settings of chunked cross-attention for a language model: each chunk of the text attends to its own neighbours.

    The memory of a call is a `Memory` (b, c·n·r, e) whose `segments` name the chunk that each slot was retrieved for,
    counted from 0 over the real tokens of the row; or a function from the ids (c, s) of complete chunks to a `Memory`
    (c, n·r, e) of their neighbours, asked once for each chunk that is new, also while text is generated.

    Args:
        memory_dim: e, width of the memory.
        every: a block at every n-th host layer (layers n-1, 2n-1, …); 4 where `layers` is not given either, or the
            depth of a host with fewer.
        layers: or the explicit list of host layers, counted from 0.
        num_heads: h of the cross-attention; None is 8, and fewer beside a narrow host, see `default_heads`.
        head_dim: k of the cross-attention; None is 64, and less beside a narrow host.
        num_kv_heads: g of the cross-attention, h by default.
        feed_forward: hidden width of the gated feed-forward as a multiple of d (4 in the paper; 1 keeps decoding fast);
            0 leaves it out.
        gate: "scalar", "head" or "channel": how many numbers the attention gate has.
        qk_norm: normalise queries and keys, as in `CrossAttention`.
        null_slot: a learned slot beside those of the memory, as in `CrossAttention`.
        length_norm: C of arXiv 2410.10450, as in `CrossAttention`.
        dropout: of attention weights in training.
        position: the block acts "after" its host layer, or "before" it.
        layout: norms, activation and feed-forward as in published models.
        score_bias: add the scores of slots to the attention scores; the memory must have them.
        score_mean: the score that adds nothing.
        score_std: how far from `score_mean` a score adds the learned temperature.
        resampler: turn the memory into few latents first.
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

    def sites(self, host: Host) -> list[Site]:
        """Return the chosen sites; of a host with an encoder and a decoder those of the decoder."""
        return chosen_sites(self, decoder_sites(host.sites(self.position)))

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> Memory:
        """Return a random memory of the neighbours of two chunks."""
        return random_memory(generator, rows, self.memory_dim, segments=2, scores=self.score_bias)
