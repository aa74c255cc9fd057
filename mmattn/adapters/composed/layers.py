"""Blocks that attend to the states of an augmenting model, which reads the text along with the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from mmattn.adapters.composed.augmenting_model import AugmentedText, AugmentingModel, token_places
from mmattn.adapters.composed.config import ComposedAdapter
from mmattn.adapters.gated.block import AttentionSettings, BlockLayers
from mmattn.adapters.projection import ProjectedView
from mmattn.adapters.protocols import BoundMemory, Site, Traits
from mmattn.adapters.settings import augmenting_layers_of
from mmattn.adapters.text_state import TextState
from mmattn.core.attention_inputs import combine_masks, visible_rows
from mmattn.core.cross_attention import CrossAttention
from mmattn.core.kv_cache import KeyValue
from mmattn.core.masks import causal
from mmattn.core.positions import Rotary
from mmattn.core.tracing import may_read
from mmattn.errors import ConfigError, ShapeError
from mmattn.memory import Memory


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
        """Return rotary positions, and biases on queries, keys and values."""
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
        return ProjectedView(projected, rule, has_memory, token_places(read.real)[:, total - length :])

    def _project(self, read: AugmentedText, layer: int, mask: Tensor | None) -> KeyValue:
        """Return keys and values of the states for a host layer; cached if nothing is trained."""
        adapter, states = self.adapter, read.states[self.adapter.augmenting_layers[layer]]
        attention = adapter.attention(layer)
        device = attention.q_proj.weight.device
        cached = read.projected.get(layer)
        past = 0 if cached is None else cached.slots

        def project() -> KeyValue:
            new = Memory(states[:, past:], read.real[:, past:], check_finite=False)
            positions = token_places(read.real.to(device))[:, past:]
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
    here, there = rotary(bias.expand(1, 1, 2, k), torch.arange(2))[0, 0]
    bias *= (3 / (attention.kv_proj.scale * (here @ here - here @ there))).sqrt()
    with torch.no_grad():
        attention.kv_proj.v_proj.bias.zero_()
        for projection in (attention.q_proj, attention.kv_proj.k_proj):
            projection.bias.copy_(bias.repeat(projection.out_features // k))
