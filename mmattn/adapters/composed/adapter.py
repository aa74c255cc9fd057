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
from dataclasses import dataclass, field, replace
from typing import ClassVar, NoReturn

import torch
from torch import Tensor, nn

from mmattn.adapters.composed.augmenting_model import AugmentedText, AugmentingModel
from mmattn.adapters.gated.block import AttentionSettings, BlockLayers
from mmattn.adapters.gated.config import POSITIONS, GatedLayout, settle_block
from mmattn.adapters.projection import ProjectedView
from mmattn.adapters.protocols import BoundMemory, Site, Traits
from mmattn.adapters.settings import AdapterConfig, augmenting_layers_of, settle_augmenting_layers
from mmattn.adapters.text_state import TextState
from mmattn.core.attention_inputs import combine_masks, visible_rows
from mmattn.core.cross_attention import CrossAttention
from mmattn.core.key_values import KeyValue
from mmattn.core.masks import causal
from mmattn.core.positions import Rotary, token_positions
from mmattn.core.tracing import may_read
from mmattn.errors import ConfigError, ShapeError, check_bool
from mmattn.memory import Memory


@dataclass(frozen=True)
class ComposedAdapter(AdapterConfig):
    """Settings of a language model that attends to the hidden states of another model, which reads the same text.

    The memory of a call is `mmattn.AugmentingModel(lm)`. For several augmenting models, attach one adapter for each.

    Args:
        memory_dim: e, width of the augmenting model.
        every: add a block at every n-th host layer (layers n-1, 2n-1, …). Without `layers` it defaults to 4, or to the
            depth of a smaller host.
        layers: the host layers with a block, counted from 0, instead of `every`.
        num_heads: h of the cross-attention; 8 by default, fewer for a narrow host, see `default_heads`.
        head_dim: k of the cross-attention; 64 by default, less for a narrow host.
        num_kv_heads: g of the cross-attention, h by default.
        feed_forward: hidden width of a gated feed-forward as a multiple of d; 0 (no feed-forward) by default, as in the
            paper.
        gate: "scalar", "head" or "channel": one gate value for the block, each head or each channel.
        qk_norm: normalise queries and keys, as in `CrossAttention`.
        null_slot: add a learned slot to the memory, as in `CrossAttention`.
        length_norm: C of arXiv 2410.10450, as in `CrossAttention`.
        dropout: probability of dropping an attention weight, in training.
        position: run the block "after" its host layer, or "before" it.
        layout: norms, activation and feed-forward as in published models.
        augmenting_layers: for each of these host layers, in the order of `layers`, the layer of the augmenting model
            whose states it reads, counted from 0; the same numbers by default. States of its last layer are read after
            its final norm.
        rotary: rotary positions (arXiv 2104.09864) for queries and keys.
        own_place: learned biases of queries and keys, initialised so that each token attends to the state at its own
            position (with head_dim 16 or more); needs `rotary`.

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

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> NoReturn:
        """Raise ConfigError: the memory is another model."""
        raise ConfigError(
            "a composed adapter reads another language model, so it has no example: give mmattn.AugmentingModel(lm)"
        )


class ComposedLayers(BlockLayers):
    """The trainable part of one composed adapter on one host."""

    traits = Traits(reads_whole_text=True)
    separable = False

    def __init__(self, config: ComposedAdapter, sites: Sequence[Site]) -> None:
        super().__init__(config, sites)
        self.augmenting_layers = augmenting_layers_of(config.augmenting_layers, self.layers)
        if config.own_place:
            for layer in self.layers:
                _begin_at_own_place(self.attention(layer))

    def attention_settings(self) -> AttentionSettings:
        config = self.config
        return {
            "rotary": Rotary(config.head_dim) if config.rotary else None,
            "bias": config.own_place,
            "out_bias": False,
        }

    def bind_memory(self, memory: object, host: nn.Module) -> AugmentedMemory:
        """Bind an augmenting model for one call: what it has read is forgotten with the call."""
        if not isinstance(memory, AugmentingModel):
            raise ShapeError(
                f"adapter {self.name!r} is of kind 'composed' and got {type(memory).__name__}: give it "
                "mmattn.AugmentingModel(lm)"
            )
        memory.check(self.name, self.config.memory_dim, max(self.augmenting_layers.values()), host)
        return AugmentedMemory(memory, self)


class AugmentedMemory(BoundMemory):
    """An augmenting model bound to the adapter that reads it, for one call.

    The model has a key/value cache of its own, which follows the host's: begun anew with the host's, put in the order
    of the beams, cut where a draft was rejected. The text itself tells which rows and tokens stay cached.
    """

    follows_text = True

    def __init__(self, model: AugmentingModel, adapter: ComposedLayers) -> None:
        self.model, self.adapter = model, adapter
        self.name, self.shared = adapter.name, model
        self._read: dict[None, AugmentedText] = {}

    def step(self, text: TextState) -> ProjectedView:
        """Return what this forward attends to: the model reads as far as the text has come."""
        keep = not torch.is_grad_enabled() and self.model.caches
        # Taken out: no two threads ever fill one cache.
        before = self._read.pop(None, None)
        if text.past == 0 or not keep:
            before = None
        layers = sorted(set(self.adapter.augmenting_layers.values()))
        read = self.model.read(text, layers, before, self.name, keep)
        if keep:
            self._read[None] = read
        return self._see(read, text)

    def _see(self, read: AugmentedText, text: TextState) -> ProjectedView:
        """Return the states as the last l tokens attend to them, each up to its own; padding stays as it is."""
        rows, length, total = text.rows, text.length, read.length
        mask = None if may_read(read.real) and bool(read.real.all()) else read.real
        rule = causal(length, total, total - length, device=read.real.device).tensor if length > 1 else None
        allowed = combine_masks(mask, rule, (rows, rows, 1, length, total))
        projected = {layer: self._project(read, layer, mask) for layer in self.adapter.layers}
        has_memory = visible_rows(allowed, rows, total, device=read.real.device)
        return ProjectedView(projected, rule, has_memory, token_positions(read.real)[:, total - length :])

    def _project(self, read: AugmentedText, layer: int, mask: Tensor | None) -> KeyValue:
        """Return keys and values of the states for a host layer; cached if nothing is trained."""
        adapter, states = self.adapter, read.states[self.adapter.augmenting_layers[layer]]
        attention = adapter.attention(layer)
        device = attention.q_proj.weight.device
        cached = read.projected.get(layer)
        past = 0 if cached is None else cached.slots

        def project() -> KeyValue:
            new = Memory(states[:, past:], read.real[:, past:], check_finite=False)
            positions = token_positions(read.real.to(device))[:, past:]
            return attention.project(adapter.read(new).tokens.to(device), memory_positions=positions)

        if read.cache is None:
            projected = project()
        else:
            if cached is None or past < read.length:
                with torch.inference_mode(False), torch.no_grad():
                    cached = read.projected[layer] = project() if cached is None else cached.append(project())
            projected = cached
        return replace(projected, mask=None if mask is None else mask.to(device), visible=None, additive=None)

    def as_memory(self, text: TextState) -> Memory:
        raise ConfigError(
            f"adapter {self.name!r} reads the states of another model, which no other memory can stand for: give a "
            "batch with a memory for the other adapters"
        )


def _begin_at_own_place(attention: CrossAttention) -> None:
    """Let every head begin by attending to the state of the token's own place, e³ times as much as to the one before.

    A bias that queries and keys share is turned with them: their product is highest where both stand at one place. Only
    the fastest quarter of the pairs has it, the others hardly tell neighbours apart.
    """
    rotary, k = attention.kv_proj.rotary, attention.head_dim
    assert rotary is not None
    bias = torch.zeros(k)
    bias[: max(1, k // 8)] = 1
    at_first, at_next = rotary(bias.expand(1, 1, 2, k), torch.arange(2))[0, 0]
    bias *= (3 / (attention.kv_proj.scale * (at_first @ at_first - at_first @ at_next))).sqrt()
    with torch.no_grad():
        attention.kv_proj.v_proj.bias.zero_()
        for projection in (attention.q_proj, attention.kv_proj.k_proj):
            projection.bias.copy_(bias.repeat(projection.out_features // k))
