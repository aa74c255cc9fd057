"""CALM's composition of two frozen language models (arXiv 2401.02412, section 3.1 and figure 1).

An anchor (the host) and an augmenting model read the same text. For a pair of layers (i, j), with x (b, l, d) the
output of the host's layer i and M (b, m, e) the states that the augmenting model's layer j has of the text so far,

    y = x + tanh(α) · attend(norm(x), norm(M)),     token t sees the states of tokens up to t

Departures from the paper: the projection of M to the width of the host is one with those to keys and values; a gate
that starts at 0 starts it as nothing; queries and keys are rotated by the places of their tokens (`rotary=False` is the
paper's way), so that a token can tell the states of its own place from those of others. With `own_place` it begins by
looking at those: heads that begin anywhere learn to mix in the states of other tokens, by which the texts they were
trained on can be told apart.

The published code has no causal mask: a token in training sees the augmenting model's states of the very tokens that it
must predict, and in generation it does not. Here it never does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NoReturn

import torch

from mmattn.adapters.gated.config import POSITIONS, GatedLayout, decoder_sites, settle_block
from mmattn.adapters.protocols import Host, Site
from mmattn.adapters.settings import chosen_sites, settle_augmenting_layers
from mmattn.errors import ConfigError, check_bool


@dataclass(frozen=True)
class ComposedAdapter:
    """Settings of the composition of a language model with an augmenting one, which reads the same text.

    The memory of a call is `mmattn.AugmentingModel(lm)`. For several augmenting models attach an adapter for each.

    Args:
        memory_dim: e, width of the augmenting model.
        every: a block at every n-th host layer (layers n-1, 2n-1, …); 4 where `layers` is not given either, or the
            depth of a host with fewer.
        layers: or the explicit list of host layers, counted from 0.
        num_heads: h of the cross-attention; None is 8, and fewer beside a narrow host, see `default_heads`.
        head_dim: k of the cross-attention; None is 64, and less beside a narrow host.
        num_kv_heads: g of the cross-attention, h by default.
        feed_forward: hidden width of a gated feed-forward as a multiple of d; none by default, as in the paper.
        gate: "scalar", "head" or "channel": how many numbers the attention gate has.
        qk_norm: normalise queries and keys, as in `CrossAttention`.
        null_slot: a learned slot beside those of the memory, as in `CrossAttention`.
        length_norm: C of arXiv 2410.10450, as in `CrossAttention`.
        dropout: of attention weights in training.
        position: the block acts "after" its host layer, or "before" it.
        layout: norms, activation and feed-forward as in published models.
        augmenting_layers: for each of the host's layers, in the order given, the layer of the augmenting model whose
            states it reads, counted from 0; those of the same numbers by default. The states of its last layer are
            taken after its final norm.
        rotary: rotary positions (arXiv 2104.09864) for queries and keys.
        own_place: queries and keys have learned biases that begin so that a token looks at the state of its own place
            (with head_dim 16 or more); needs rotary.

    >>> ComposedAdapter(memory_dim=24, layers=[3, 1], augmenting_layers=[5, 2]).augmenting_layers
    (2, 5)
    """

    memory_dim: int
    every: int | None = None
    layers: tuple[int, ...] | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    num_kv_heads: int | None = None
    feed_forward: float = 0.0
    gate: str = "scalar"
    qk_norm: bool = False
    null_slot: bool = False
    length_norm: float | None = None
    dropout: float = 0.0
    position: str = "after"
    layout: GatedLayout = field(default_factory=GatedLayout)
    augmenting_layers: tuple[int, ...] | None = None
    rotary: bool = True
    own_place: bool = False

    kind: ClassVar[str] = "composed"
    positions: ClassVar[tuple[str, ...]] = POSITIONS
    example_call: ClassVar[str] = "model.generate(input_ids, memory=mmattn.AugmentingModel(lm))"

    def __post_init__(self) -> None:
        settle_augmenting_layers(self, self.layers, self.augmenting_layers)
        settle_block(self)
        check_bool("rotary", self.rotary)
        check_bool("own_place", self.own_place)
        if self.own_place and not self.rotary:
            raise ConfigError("own_place needs rotary, by which a token tells its own place: leave rotary=False out")
        if self.rotary and self.head_dim is not None and self.head_dim % 2:
            raise ConfigError(f"rotary turns pairs of channels: head_dim must be even, got {self.head_dim}")

    def sites(self, host: Host) -> list[Site]:
        """Return the chosen sites; of a host with an encoder and a decoder those of the decoder."""
        return chosen_sites(self, decoder_sites(host.sites(self.position)))

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> NoReturn:
        """Raise ConfigError: the memory is another model."""
        raise ConfigError(
            "a composed adapter reads another language model, and none can be made up: give mmattn.AugmentingModel(lm)"
        )
