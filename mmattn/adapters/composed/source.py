"""A frozen language model that reads the text of a host beside it: its states of that text as a memory.

It has a key/value cache of its own, which follows the host's: begun anew where the host begins anew, put in the order
of the beams, cut where a draft was rejected. Which rows and tokens stay cached is told by the text itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.composed.augmenting_model import AugmentingModel
from mmattn.adapters.composed.text import AugmentedText, token_places
from mmattn.adapters.protocols import BoundMemory, View
from mmattn.adapters.text_state import TextState
from mmattn.core.attention_inputs import combine_masks, visible_rows
from mmattn.core.kv_cache import KeyValue
from mmattn.core.masks import causal
from mmattn.core.tracing import may_read
from mmattn.errors import ConfigError
from mmattn.memory import Memory


class AugmentedSource(BoundMemory):
    """An augmenting model bound to the adapter that reads it, for one call.

    Args:
        model: the augmenting model.
        adapter: the trainable part of a composed adapter.
    """

    follows_text = True

    def __init__(self, model: AugmentingModel, adapter: Any) -> None:
        self.model, self.adapter = model, adapter
        self.name, self.shared = adapter.name, model
        self._read: dict[None, AugmentedText] = {}

    def step(self, text: TextState) -> AugmentedStates:
        """What this forward sees: the model reads as far as the text has come.

        Raises:
            ConditionError: the ids of the whole text are not known.
            NonFiniteError: states that are not finite.
        """
        keep = not torch.is_grad_enabled() and self.model.caches
        # Taken out: no two threads ever fill one cache.
        before = self._read.pop(None, None)
        if text.past == 0 or not keep:
            before = None
        layers = sorted(set(self.adapter.augmenting_layers.values()))
        read = self.model.read(text, layers, before, self.adapter.name, keep)
        if keep:
            self._read[None] = read
        return AugmentedStates(read, self.adapter)

    def as_memory(self, text: TextState) -> Memory:
        """There is none: the states change with the text.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"adapter {self.adapter.name!r} reads the states of another model, which no other memory can stand for: "
            "give a batch with a memory for the other adapters"
        )


@dataclass(frozen=True)
class AugmentedStates(View):
    """What the tokens of one forward see of an augmenting model: the states of the text up to each token's own.

    Args:
        text: what the model has read.
        adapter: the trainable part of a composed adapter.
    """

    text: AugmentedText
    adapter: Any

    def apply(self, x: Tensor, block: nn.Module, layer: int, adapter_scale: Any) -> Tensor:
        """What a block gives for the hidden states x (b, l, d) of the last l tokens; padding stays bit for bit."""
        rows, length = x.shape[:2]
        total, real = self.text.length, self.text.real.to(x.device)
        mask = None if may_read(real) and bool(real.all()) else real
        rule = causal(length, total, total - length, device=x.device).tensor if length > 1 else None
        allowed = combine_masks(mask, rule, (rows, rows, 1, length, total))
        out: Tensor = block(
            x,
            self._memory(layer, mask, x.device),
            attention_mask=rule,
            query_positions=token_places(real)[:, total - length :],
            seen=visible_rows(allowed, rows, total, device=x.device),
            adapter_scale=adapter_scale,
        )
        return out

    def _memory(self, layer: int, mask: Tensor | None, device: torch.device) -> KeyValue:
        """Keys and values of the states that a host layer attends to; cached where nothing is trained."""
        text, adapter = self.text, self.adapter
        states = text.states[adapter.augmenting_layers[layer]]
        cached = text.projected.get(layer)
        past = 0 if cached is None else cached.slots
        positions = token_places(text.real.to(device))[:, past:]

        def project() -> KeyValue:
            new = Memory(states[:, past:], text.real[:, past:], check_finite=False)
            tokens = adapter.read(new).tokens.to(device)
            projected: KeyValue = adapter.attention(layer).project(tokens, memory_positions=positions)
            return projected

        if text.cache is None:
            return replace(project(), mask=mask, visible=None)
        if past < text.length:
            with torch.inference_mode(False), torch.no_grad():
                more = project()
                cached = text.projected[layer] = more if cached is None else cached.append(more)
        assert cached is not None
        return replace(cached, mask=mask, visible=None)
