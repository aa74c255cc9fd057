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
from typing import Any, ClassVar

import torch
from torch import nn

from mmattn.adapters.block_adapter import BlockAdapter, BlockLayers
from mmattn.adapters.composed.augmenting_model import AugmentingModel
from mmattn.adapters.composed.source import AugmentedSource
from mmattn.adapters.gated.block import check_bool
from mmattn.adapters.layer_choice import check_other_layers
from mmattn.adapters.protocols import Site
from mmattn.adapters.registry import register_adapter
from mmattn.core.cross_attention import CrossAttention
from mmattn.core.positions import Rotary
from mmattn.errors import AttachError, ConfigError, ShapeError


@register_adapter
@dataclass(frozen=True)
class ComposedAdapter(BlockAdapter):
    """Settings of the composition of a language model with an augmenting one, which reads the same text.

    The memory of a call is `mmattn.AugmentingModel(lm)`. For several augmenting models attach an adapter for each.

    Args:
        memory_dim: e, width of the augmenting model.
        augmenting_layers: for each of the host's layers, in the order given, the layer of the augmenting model whose
            states it reads, counted from 0; those of the same numbers by default. The states of its last layer are
            taken after its final norm.
        rotary: rotary positions (arXiv 2104.09864) for queries and keys.
        own_place: queries and keys have learned biases that begin so that a token looks at the state of its own place
            (with head_dim 16 or more); needs rotary.
        feed_forward: as in `GatedAdapter`; none by default, as in the paper.

    The others are those of `BlockAdapter`.

    >>> ComposedAdapter(memory_dim=24, layers=[3, 1], augmenting_layers=[5, 2]).augmenting_layers
    (2, 5)
    """

    feed_forward: float = 0.0
    augmenting_layers: tuple[int, ...] | None = None
    rotary: bool = True
    own_place: bool = False

    kind: ClassVar[str] = "composed"
    example_call: ClassVar[str] = "model.generate(input_ids, memory=mmattn.AugmentingModel(lm))"

    def __post_init__(self) -> None:
        given = self.layers
        super().__post_init__()
        object.__setattr__(self, "augmenting_layers", check_other_layers(self.augmenting_layers, given))
        check_bool("rotary", self.rotary)
        check_bool("own_place", self.own_place)
        if self.own_place and not self.rotary:
            raise ConfigError("own_place needs rotary, by which a token tells its own place: leave rotary=False out")
        if self.rotary and self.head_dim is not None and self.head_dim % 2:
            raise ConfigError(f"rotary turns pairs of channels: head_dim must be even, got {self.head_dim}")

    def attention_settings(self) -> dict[str, Any]:
        """Rotary positions, and biases on queries, keys and values."""
        rotary = Rotary(self.head_dim) if self.rotary and self.head_dim is not None else None
        return {"rotary": rotary, "bias": self.own_place, "out_bias": False}

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> Any:
        """There is none.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a composed adapter reads another language model, and none can be made up: give mmattn.AugmentingModel(lm)"
        )

    def build(self, sites: Sequence[Site]) -> ComposedLayers:
        """The trainable part for these sites.

        Raises:
            AttachError: another number of augmenting layers than of layers.
        """
        return ComposedLayers(self, sites)


class ComposedLayers(BlockLayers):
    """The trainable part of one composed adapter on one host.

    Args:
        config: the settings.
        sites: where the blocks are.
    """

    reads_whole_text = True

    def __init__(self, config: ComposedAdapter, sites: Sequence[Site]) -> None:
        layers = [site.layer for site in sites]
        others = tuple(layers) if config.augmenting_layers is None else config.augmenting_layers
        if len(others) != len(layers):
            raise AttachError(
                f"the adapter is put at layers {layers} of the host and augmenting_layers names {list(others)}: name "
                "one for each"
            )
        super().__init__(config, sites)
        self.augmenting_layers = dict(zip(self.layers, others, strict=True))
        if config.own_place:
            for layer in self.layers:
                _begin_at_own_place(self.attention(layer))

    def bind_memory(self, memory: object, host: nn.Module) -> AugmentedSource:
        """Bind an augmenting model for one call: what it has read is forgotten with the call.

        Raises:
            ShapeError: something else, or a model that does not fit this adapter or the host.
            ConditionError: the model is being trained.
        """
        if not isinstance(memory, AugmentingModel):
            raise ShapeError(
                f"adapter {self.name!r} is of kind 'composed' and got {type(memory).__name__}: give it "
                "mmattn.AugmentingModel(lm)"
            )
        memory.check(self, host)
        return AugmentedSource(memory, self)

    def why_whole(self) -> str | None:
        """Return why a memory cannot come in parts: it is another model."""
        return "kind 'composed'"


def _begin_at_own_place(attention: CrossAttention) -> None:
    """Let every head begin by looking at the state of the token's own place, e³ times as much as at the one before it.

    A bias that queries and keys share is turned with them: their product is highest where both stand at one place. Only
    the fastest quarter of the pairs has it, the others hardly tell neighbours apart.
    """
    rotary, k = attention.kv_proj.rotary, attention.head_dim
    assert rotary is not None
    bias = torch.zeros(k)
    bias[: max(1, k // 8)] = 1
    here, there = rotary(bias.expand(1, 1, 2, k), torch.arange(2))[0, 0]
    bias *= (3 / (attention.kv_proj.scale * (here @ here - here @ there))).sqrt()
    with torch.no_grad():
        attention.kv_proj.v_proj.bias.zero_()
        for projection in (attention.q_proj, attention.kv_proj.k_proj):
            projection.bias.copy_(bias.repeat(projection.out_features // k))
