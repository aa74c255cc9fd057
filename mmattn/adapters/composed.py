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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmattn.adapters.gated import BlockLayers, BlockSettings
from mmattn.core.layers import CrossAttention
from mmattn.core.positions import Rotary
from mmattn.errors import AttachError, ConfigError, check_int


@dataclass(frozen=True)
class ComposedAdapter(BlockSettings):
    """Settings of the composition of a language model with an augmenting one, which reads the same text.

    The memory of a call is `mmattn.AugmentingModel(lm)`. For several augmenting models attach an adapter for each.

    Args:
        memory_dim: e, width of the augmenting model.
        augmenting_layers: for each of the host's layers, in the order given, the layer of the augmenting model whose
            states it reads, counted from 0; those of the same numbers by default. The states of its last layer are
            taken behind its final norm.
        rotary: rotary positions (arXiv 2104.09864) for queries and keys.
        own_place: queries and keys have learned biases that begin so that a token looks at the state of its own place
            (with head_dim 16 or more); needs rotary.
        feed_forward: as in `GatedAdapter`; none by default, as in the paper.

    The others are those of `GatedAdapter`, without look, media_token, score_bias and resampler.

    >>> ComposedAdapter(memory_dim=24, layers=[3, 1], augmenting_layers=[5, 2]).augmenting_layers
    (2, 5)
    """

    feed_forward: float = 0.0
    augmenting_layers: tuple[int, ...] | None = None
    rotary: bool = True
    own_place: bool = False

    kind = "composed"

    def __post_init__(self) -> None:
        given, others = self.layers, self.augmenting_layers
        super().__post_init__()
        if self.resampler is not None:
            raise ConfigError("a resampler would mix the states of tokens with those of later ones: leave it out")
        if self.score_bias:
            raise ConfigError("score_bias needs scores, and the states of a language model have none: leave it out")
        for name in ("rotary", "own_place"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.own_place and not self.rotary:
            raise ConfigError("own_place needs rotary, by which a token tells its own place: leave rotary=False out")
        if self.rotary and self.head_dim % 2:
            raise ConfigError(f"rotary turns pairs of channels: head_dim must be even, got {self.head_dim}")
        if others is None:
            return
        if not isinstance(others, Sequence) or isinstance(others, str) or not others:
            raise ConfigError(f"augmenting_layers must be a list of layers counted from 0, got {others!r}")
        picked = tuple(check_int("augmenting_layers", layer, at_least=0, at_most=4095) for layer in others)
        if given is not None:
            if len(given) != len(picked):
                raise ConfigError(
                    f"augmenting_layers must name one layer for each of layers, got {list(picked)} for {list(given)}"
                )
            picked = tuple(other for _, other in sorted(zip(given, picked, strict=True)))
        object.__setattr__(self, "augmenting_layers", picked)

    def more_of_attention(self) -> dict[str, Any]:
        """Rotary positions, and biases on queries, keys and values."""
        rotary = Rotary(self.head_dim) if self.rotary else None
        return {"rotary": rotary, "bias": self.own_place, "out_bias": False}

    def build(self, host_dim: int, layers: Sequence[int]) -> ComposedLayers:
        """Make the trainable part for a host of width `host_dim` at `layers`.

        Raises:
            AttachError: another number of augmenting layers than of layers.
        """
        return ComposedLayers(self, host_dim, layers)


class ComposedLayers(BlockLayers):
    """The trainable part of one composed adapter on one host."""

    def __init__(self, config: ComposedAdapter, host_dim: int, layers: Sequence[int]) -> None:
        others = tuple(layers) if config.augmenting_layers is None else config.augmenting_layers
        if len(others) != len(layers):
            raise AttachError(
                f"the adapter is put at layers {list(layers)} of the host and augmenting_layers names {list(others)}: "
                "name one for each"
            )
        super().__init__(config, host_dim, layers)
        self.augmenting_layers = dict(zip(self.layers, others, strict=True))
        if config.own_place:
            for layer in self.layers:
                _begin_at_own_place(self.attention(layer))


def _begin_at_own_place(attention: CrossAttention) -> None:
    """Let every head begin by looking at the state of the token's own place, e³ times as much as at the one before it.

    A bias that queries and keys share is turned with them: their product is highest where both stand at one place. Only
    the fastest quarter of the pairs has it, the others hardly tell neighbours apart.
    """
    rotary, k = attention.rotary, attention.head_dim
    assert rotary is not None
    bias = torch.zeros(k)
    bias[: max(1, k // 8)] = 1
    here, there = rotary(bias.expand(1, 1, 2, k), torch.arange(2))[0, 0]
    bias *= (3 / (attention.scale * (here @ here - here @ there))).sqrt()
    with torch.no_grad():
        attention.kv_proj.v_proj.bias.zero_()
        for projection in (attention.q_proj, attention.kv_proj.k_proj):
            projection.bias.copy_(bias.repeat(projection.out_features // k))
