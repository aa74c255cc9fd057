"""The cache of another model in one call: which tokens of the text it has read, and what their keys become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mmattn.adapters.composed.prompt import AugmentedPrompt
from mmattn.adapters.composed.text import token_places
from mmattn.adapters.joined.host_attention import HostAttention
from mmattn.adapters.protocols import BoundMemory, View
from mmattn.adapters.text_state import TextState
from mmattn.core.tensor_cache import TensorVersion, autocast_dtype
from mmattn.errors import ConditionError
from mmattn.memory import Memory


@dataclass(frozen=True)
class PromptTokens:
    """Where the tokens of a prompt stand in a text of t tokens.

    Args:
        numbers: (b, end), the number of each token in the prompt of its row; −1 where it is not of it.
        whole: every token of every prompt is among them.
    """

    numbers: Tensor
    whole: bool

    @property
    def end(self) -> int:
        """How many tokens of the text there are up to the last one of a prompt."""
        return self.numbers.shape[1]


@dataclass
class Changes:
    """What the keys and values of a host's cache are changed by, for as long as that cache lives.

    Args:
        numbers: of the tokens, as in `PromptTokens`.
        version: of the adapter's weights.
        dtype: of autocast.
        by_layer: changes of keys (b, g, end, k) and values (b, g, end, v).
    """

    numbers: Tensor
    version: TensorVersion
    dtype: torch.dtype | None
    by_layer: dict[int, tuple[Tensor, Tensor]]


class FusedSource(BoundMemory):
    """What a model has read of the prompts of one call, bound to the adapter that fuses it.

    Args:
        prompt: of b rows.
        adapter: the trainable part of a fused cache.
    """

    follows_text = True

    def __init__(self, prompt: AugmentedPrompt, adapter: Any) -> None:
        self.prompt, self.adapter = prompt.left_aligned(), adapter
        self.name, self.shared, self.rows = adapter.name, prompt, prompt.batch
        # By cache of the host: a block may hold several texts.
        self._changes: WeakKeyDictionary[Any, Changes] = WeakKeyDictionary()

    def step(self, text: TextState) -> FusedView:
        """Which tokens of the text so far were read.

        Raises:
            ShapeError: the rows of the text are not those of the prompts.
            ConditionError: a text that begins otherwise, of which only a part is known, or several texts in a row.
        """
        name = self.adapter.name
        if text.packed is not None:
            raise ConditionError(
                f"adapter {name!r} fuses what was read of the beginning of a row, and packed rows hold several texts: "
                "give each document a row of its own (pad instead of packing)"
            )
        self.check_rows(text)
        real, ids = text.whole
        if text.past is None:
            raise ConditionError(
                f"adapter {name!r} must know how much text the host has cached, and {text.length} tokens were given "
                "with a cache that does not say, of recurrent layers: give all of it, or take another host"
            )
        times = text.rows // max(self.rows or 1, 1)
        prompt = self.prompt
        if times > 1:  # beams of a text
            states = tuple(one.repeat_interleave(times, 0) for one in prompt.states)
            known = None if prompt.ids is None else prompt.ids.repeat_interleave(times, 0)
            prompt = AugmentedPrompt(states, prompt.real.repeat_interleave(times, 0), known)
        counts, places = prompt.real.sum(1).to(real.device), token_places(real)
        visible = real & (places < counts[:, None])
        if ids is not None:
            prompt.check_begins(ids, places, visible, name)
        read = visible.any(0).nonzero()
        end = int(read[-1]) + 1 if len(read) else 0
        tokens = PromptTokens(places.masked_fill(~visible, -1)[:, :end], bool((visible.sum(1) == counts).all()))
        return FusedView(self, prompt, tokens, real, text)

    def kept(self, cache: Any, tokens: PromptTokens) -> Changes | None:
        """Changes that were computed of a cache of the host; None where they must be computed now."""
        known = None if cache is None else self._changes.get(cache)
        adapter = self.adapter
        if known is None or not known.version.holds(adapter.parameters()):
            return None
        same = known.dtype == autocast_dtype(adapter.weight.device) and torch.equal(known.numbers, tokens.numbers)
        return known if same else None

    def keep(self, cache: Any, tokens: PromptTokens) -> Changes | None:
        """Room for the changes of a cache of the host; None where nothing may be cached."""
        if cache is None or torch.is_grad_enabled() or not tokens.whole:
            return None
        adapter = self.adapter
        version = TensorVersion(adapter.parameters())
        made = Changes(tokens.numbers, version, autocast_dtype(adapter.weight.device), {})
        self._changes[cache] = made
        return made

    def shareable(self) -> object:
        """Return the prompts as they were read."""
        return self.shared

    def as_memory(self, text: TextState) -> Memory:
        """There is none: it is part of keys and values of the host.

        Raises:
            ConditionError: always.
        """
        raise ConditionError(
            f"adapter {self.adapter.name!r} fuses the cache of another model into that of the host, which is no "
            "Memory: compare calls with what was read of other prompts, or without"
        )


class FusedView(View):
    """The tokens of one forward, whose keys and values are changed where another model has read them.

    Args:
        source: of the call.
        prompt: what was read, a row for each row of text.
        tokens: where its tokens stand in the text.
        real: (b, t) bool, tokens of the whole text that are no padding.
        text: of this forward.
    """

    stands_in_text = True
    moves_text = False

    def __init__(
        self, source: FusedSource, prompt: AugmentedPrompt, tokens: PromptTokens, real: Tensor, text: TextState
    ) -> None:
        self.source, self.prompt, self.tokens, self.real = source, prompt, tokens, real
        assert text.past is not None
        self.past, self.cache = text.past, text.cache
        self.positions: Tensor | None = None
        # What is cached holds for tokens that the host has read before; those of this forward may be read anew.
        cached = None if self.past < tokens.end else source.kept(self.cache, tokens)
        self.cached = source.keep(self.cache, tokens) if cached is None else cached

    def shift_positions(self, positions: Tensor) -> Tensor:
        """Positions of the tokens of this forward, which stay."""
        own = positions if positions.dim() == 2 else positions[0]
        self.positions = own.expand(len(self.real), -1)
        return positions

    def apply(self, x: HostAttention, block: nn.Module, layer: int, adapter_scale: Any) -> HostAttention:
        """The attention of a layer with the keys and values that the prompt has now.

        Raises:
            ConditionError: another adapter stands before the text in this layer.
        """
        if x.before is not None:
            raise ConditionError(
                f"adapter {self.source.adapter.name!r} changes keys and values of the text, and another one has put "
                "its own before them: name the fused cache first in memory={…}"
            )
        # A window that is cut to its length holds the last tokens only.
        first = max(0, self.real.shape[1] - x.key.shape[2])
        if first >= self.tokens.end:
            return x
        known = None if self.cached is None else self.cached.by_layer.get(layer)
        if known is None:
            known = self._change(x, block, layer, first)
            if self.cached is not None and first == 0:
                self.cached.by_layer[layer] = known
        elif first:
            known = known[0][:, :, first:], known[1][:, :, first:]
        gates: Any = block.gate
        key, value = (
            _added(own, change, adapter_scale * share[:, None, None])
            for own, change, share in zip((x.key, x.value), known, gates(), strict=True)
        )
        return x.with_text(key, value)

    def _change(self, x: HostAttention, block: nn.Module, layer: int, first: int) -> tuple[Tensor, Tensor]:
        """What keys and values are changed by, from a token of the text on."""
        where = x.key.device
        numbers = self.tokens.numbers[:, first:].to(where)
        places = self._places()[:, first : self.tokens.end].to(where)
        adapter = self.source.adapter
        rotation = None if adapter.rotations is None else adapter.rotations[layer]
        # Several adapters change what the host computed, each by itself.
        key, value = (one[:, :, : numbers.shape[1]] for one in x.computed or (x.key, x.value))
        if rotation is not None:
            key = rotation(key, -places[:, None])
        states = self.prompt.states[adapter.augmenting_layers[layer]].to(where)
        index = numbers.clamp(min=0)[..., None].expand(-1, -1, states.shape[2])
        change, changed_value = block(key, value, states.gather(1, index), numbers >= 0)
        return change if rotation is None else rotation(change, places[:, None]), changed_value

    def _places(self) -> Tensor:
        """The position of each token of the text so far (b, t), by that of the first real one of this forward."""
        assert self.positions is not None, "a forward of the whole host tells the positions of its tokens"
        own = self.real[:, self.past :]
        begin = own.to(torch.uint8).argmax(1, keepdim=True)
        known = self.positions.to(own.device).gather(1, begin)
        return known - (self.past + begin) + torch.arange(self.real.shape[1], device=own.device)


def _added(own: Tensor, change: Tensor, share: Tensor) -> Tensor:
    """Keys or values of a text with a share of what the first ones are changed by."""
    count = change.shape[2]
    wide = torch.promote_types(share.dtype, own.dtype)
    changed = own[:, :, :count].to(wide) + share.to(own.device, wide) * change.to(own.device, wide)
    return torch.cat([changed.to(own.dtype), own[:, :, count:]], 2)
