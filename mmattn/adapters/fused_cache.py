"""Cache-to-Cache (arXiv 2510.03215, section 3.3): the cache of another language model, fused into that of the host.

Both models read one prompt. With K, V (b, g, p, k) the keys and values that the host computes of it in a layer, and
K_o, V_o those that the other model has cached in one of its layers,

    [ΔK; ΔV] = W_out gelu(W_in [norm([K; V]); norm([K_o; V_o])])      for each token by itself, all heads together
    K' = K + tanh(α_K) · ΔK,    V' = V + tanh(α_V) · ΔV

and every token attends to K', V' in place of K, V. What is written after the prompt is the host's alone: the other
model has read the prompt once and is not asked again, where a `ComposedAdapter` asks it for every token.

Departures from the paper: keys are fused as they are at position 0 and turned back, so that what is learned of a token
does not depend on where it stands; one network for keys and values, which sees both of both models; its gates begin at
0, as those of all adapters do, instead of being drawn (Gumbel-sigmoid), and heads are not weighed by a further network;
the tokens of the prompt see each other's fused keys and values, too, from one layer to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.augmenting_model import AugmentedPrompt, token_places
from mmattn.adapters.base import AdapterLayers, AttachedHost
from mmattn.adapters.gated_block import Gate
from mmattn.adapters.host_attention import HostAttention
from mmattn.adapters.joined_slots import TextHost
from mmattn.adapters.key_rotation import Rotations
from mmattn.adapters.protocols import BoundMemory, HeadSizes, Scale, Site, View
from mmattn.adapters.settings import LayeredAdapter, augmenting_layers_of, register_adapter, settle_augmenting_layers
from mmattn.adapters.text_state import TextState
from mmattn.core.tensor_cache import KeyValueCache
from mmattn.errors import ConditionError, ConfigError, ShapeError, check_choice, check_int
from mmattn.memory import Memory

GATES = ("scalar", "head")


@register_adapter
@dataclass(frozen=True)
class FusedCacheAdapter(LayeredAdapter):
    """Settings of the cache of another language model, fused into that of the host.

    The memory of a call is `mmattn.AugmentingModel(lm).prefill(input_ids, attention_mask)` of the prompts with which
    its texts begin. For several models attach an adapter for each.

    Args:
        memory_dim: e, `cache_dim` of the augmenting model: keys and values of all heads of one of its layers.
        every: fused at every n-th host layer (layers n-1, 2n-1, …); at all where `layers` is not given either.
        layers: or the explicit list of host layers, counted from 0.
        augmenting_layers: for each of these layers, in the order given, the layer of the augmenting model that is fused
            into it, counted from 0; those of the same numbers by default.
        hidden_dim: width of the network between.
        gate: "scalar" or "head": how many numbers the gates of a layer have, for keys and for values.

    >>> FusedCacheAdapter(memory_dim=64, layers=[3, 1], augmenting_layers=[5, 2]).augmenting_layers
    (2, 5)
    """

    augmenting_layers: tuple[int, ...] | None = None
    hidden_dim: int = 256
    gate: str = "scalar"

    kind: ClassVar[str] = "fused_cache"
    positions: ClassVar[tuple[str, ...]] = ("joined",)
    default_every: ClassVar[int] = 1
    example_call: ClassVar[str] = "model.generate(input_ids, memory=mmattn.AugmentingModel(lm).prefill(input_ids))"

    def __post_init__(self) -> None:
        settle_augmenting_layers(self, self.layers, self.augmenting_layers)
        super().__post_init__()
        check_int("hidden_dim", self.hidden_dim, at_most=1 << 20)
        check_choice("gate", self.gate, GATES)

    def build(self, sites: Sequence[Site]) -> FusedCacheLayers:
        """Return the trainable part for these sites."""
        return FusedCacheLayers(self, sites)

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> NoReturn:
        """Raise ConfigError: the memory is the cache of another model."""
        raise ConfigError(
            "a fused cache is that of another language model, and none can be made up: give "
            "mmattn.AugmentingModel(lm).prefill(input_ids)"
        )


class CacheFuser(nn.Module):
    """The network that changes keys and values of one host layer."""

    def __init__(self, config: FusedCacheAdapter, size: HeadSizes) -> None:
        super().__init__()
        self.key_dim, value_dim = size.head_dim, size.value_dim or size.head_dim
        self.num_kv_heads = size.num_kv_heads
        width = size.num_kv_heads * (size.head_dim + value_dim)
        self.host_norm, self.memory_norm = nn.LayerNorm(width), nn.LayerNorm(config.memory_dim)
        self.in_proj = nn.Linear(width + config.memory_dim, config.hidden_dim)
        self.out_proj = nn.Linear(config.hidden_dim, width)
        self.gate = Gate(2, size.num_kv_heads if config.gate == "head" else 1)

    def forward(self, key: Tensor, value: Tensor, states: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Return the changes of keys and values, before the gates."""
        weight, hidden = self.in_proj.weight, ~visible[..., None]
        host = torch.cat([key, value], -1).transpose(1, 2).flatten(2).to(weight.dtype).masked_fill(hidden, 0)
        states = states.to(weight.device, weight.dtype).masked_fill(hidden, 0)
        inner = F.gelu(self.in_proj(torch.cat([self.host_norm(host), self.memory_norm(states)], -1)))
        change = self.out_proj(inner).masked_fill(hidden, 0).unflatten(2, (self.num_kv_heads, -1)).transpose(1, 2)
        return change[..., : self.key_dim], change[..., self.key_dim :]


class FusedCacheLayers(AdapterLayers):
    """The trainable part of one adapter that fuses caches, on one host."""

    orders_slots = True
    counts_slots = True
    reads_whole_text = True

    def __init__(self, config: FusedCacheAdapter, sites: Sequence[Site]) -> None:
        super().__init__(config, sites)
        self.augmenting_layers = augmenting_layers_of(config.augmenting_layers, self.layers)
        self.blocks = nn.ModuleDict({str(site.layer): CacheFuser(config, site.sizes) for site in self.sites})
        #: How each layer of the host turns its keys; None if positions enter otherwise. Set by `attach_to`.
        self.rotations: Rotations = None

    def fuser(self, layer: int) -> CacheFuser:
        """Return the block at a host layer."""
        return cast(CacheFuser, self.block(layer))

    def read(self, memory: Memory) -> Memory:
        raise ShapeError(_NO_CACHE.format(name=self.name, memory="a Memory"))

    def bind_memory(self, memory: object, host: nn.Module) -> FusedMemory:
        if not isinstance(memory, AugmentedPrompt):
            raise ShapeError(_NO_CACHE.format(name=self.name, memory=type(memory).__name__))
        deepest = max(self.augmenting_layers.values())
        if deepest >= len(memory.states):
            raise ShapeError(
                f"adapter {self.name!r} reads layer {deepest} of the augmenting model, got one with layers 0 to "
                f"{len(memory.states) - 1}: use the one it was trained with, or name other augmenting_layers"
            )
        widths = {memory.states[layer].shape[2] for layer in self.augmenting_layers.values()}
        if widths != {self.config.memory_dim}:
            raise ShapeError(
                f"adapter {self.name!r} was made for memory_dim={self.config.memory_dim}, got keys and values of "
                f"{sorted(widths)} numbers for a token: use the augmenting model it was trained with"
            )
        return FusedMemory(memory, self)

    def attach_to(self, host: AttachedHost) -> None:
        """Prove that changed keys and values reach the output, and learn how the host turns its keys."""
        host.check_adapter(self)
        assert isinstance(host, TextHost)
        self.rotations = host.probe_rotations()


#: Changes of keys (b, g, end, k) and values (b, g, end, v) by layer.
Changes = dict[int, tuple[Tensor, Tensor]]


class FusedMemory(BoundMemory):
    """The prompts that a model has read for one call, bound to the adapter that fuses them."""

    follows_text = True

    def __init__(self, prompt: AugmentedPrompt, adapter: FusedCacheLayers) -> None:
        self.shared, self.prompt, self.adapter = prompt, prompt.left_aligned(), adapter
        self.name, self.rows = adapter.name, prompt.batch
        self._cache = KeyValueCache(tuple)

    def step(self, text: TextState) -> FusedView:
        if text.packed is not None:
            raise ConditionError(
                f"adapter {self.name!r} fuses what was read of the beginning of a row, and packed rows hold several "
                "texts: give each document a row of its own (pad instead of packing)"
            )
        self.check_rows(text)
        real, ids = text.whole
        if text.past is None:
            raise ConditionError(
                f"adapter {self.name!r} must know how much text the host has cached, and its cache does not say: give "
                "the whole text, or take another host"
            )
        prompt = self.prompt.repeated(text.rows // max(self.rows or 1, 1))
        counts, places = prompt.real.sum(1).to(real.device), token_places(real)
        visible = real & (places < counts[:, None])
        if ids is not None:
            prompt.check_begins(ids, places, visible, self.name)
        read = visible.any(0).nonzero()
        end = int(read[-1]) + 1 if len(read) else 0
        numbers = places.masked_fill(~visible, -1)[:, :end]
        is_whole = bool((visible.sum(1) == counts).all())
        return FusedView(self.adapter, prompt, numbers, real, text.past, self._changes(text, numbers, is_whole))

    def _changes(self, text: TextState, numbers: Tensor, is_whole: bool) -> Changes | None:
        """Return the changes computed for a cache of the host, or room for them; None if nothing may be cached.

        They hold for tokens that the host has read before; those of this forward may be read again.
        """
        # A block may hold several texts, each with a cache of the host.
        by_text: WeakKeyDictionary[object, tuple[Tensor, Changes]]
        by_text = self._cache.get(self.adapter, "by text", WeakKeyDictionary)
        before, changes = (None, None) if text.cache is None else by_text.get(text.cache, (None, None))
        if before is not None and (text.past or 0) >= numbers.shape[1] and torch.equal(before, numbers):
            return changes
        if text.cache is None or torch.is_grad_enabled() or not is_whole:
            return None
        changes = {}
        by_text[text.cache] = numbers, changes
        return changes

    def shareable(self) -> object:
        return self.shared

    def as_memory(self, text: TextState) -> Memory:
        raise ConditionError(
            f"adapter {self.name!r} fuses the cache of another model into that of the host, which is no Memory: "
            "compare calls with what was read of other prompts, or without"
        )


class FusedView(View):
    """The tokens of one forward, whose keys and values are changed if another model has read them."""

    stands_in_text = True
    moves_text = False

    def __init__(
        self,
        adapter: FusedCacheLayers,
        prompt: AugmentedPrompt,
        numbers: Tensor,
        real: Tensor,
        past: int,
        changes: Changes | None,
    ) -> None:
        self.adapter, self.prompt, self.numbers, self.real = adapter, prompt, numbers, real
        self.past, self.changes = past, changes
        self.positions: Tensor | None = None

    def shift_positions(self, positions: Tensor) -> Tensor:
        """Return the positions of the tokens of this forward, which stay."""
        rows = positions if positions.dim() == 2 else positions[0]
        self.positions = rows.expand(len(self.real), -1)
        return positions

    def apply(self, x: HostAttention, block: nn.Module, layer: int, adapter_scale: Scale) -> HostAttention:
        # A window that is cut to its length holds the last tokens only.
        first = max(0, self.real.shape[1] - x.key.shape[2])
        if first >= self.numbers.shape[1]:
            return x
        change = None if self.changes is None else self.changes.get(layer)
        if change is None:
            change = self._change(x, block, layer, first)
            if self.changes is not None and first == 0:
                self.changes[layer] = change
        elif first:
            change = change[0][:, :, first:], change[1][:, :, first:]
        key_share, value_share = (adapter_scale * share[:, None, None] for share in self.adapter.fuser(layer).gate())
        return x.with_text(_added(x.key, change[0], key_share), _added(x.value, change[1], value_share))

    def _change(self, x: HostAttention, block: nn.Module, layer: int, first: int) -> tuple[Tensor, Tensor]:
        """Compute the changes of keys and values from a token of the text on."""
        device, adapter = x.key.device, self.adapter
        numbers = self.numbers[:, first:].to(device)
        places = self._positions_of_text()[:, None, first : self.numbers.shape[1]].to(device)
        rotation = None if adapter.rotations is None else adapter.rotations[layer]
        # Several adapters change what the host computed, each by itself.
        key, value = (one[:, :, : numbers.shape[1]] for one in x.computed or (x.key, x.value))
        states = self.prompt.states[adapter.augmenting_layers[layer]].to(device)
        index = numbers.clamp(min=0)[..., None].expand(-1, -1, states.shape[2])
        key = key if rotation is None else rotation(key, -places)
        change, value_change = block(key, value, states.gather(1, index), numbers >= 0)
        return change if rotation is None else rotation(change, places), value_change

    def _positions_of_text(self) -> Tensor:
        """Return the position of each token of the text so far (b, t), from that of the first real one here."""
        assert self.positions is not None, "a forward of the whole host tells the positions of its tokens"
        real = self.real[:, self.past :]
        begin = real.to(torch.uint8).argmax(1, keepdim=True)
        position = self.positions.to(real.device).gather(1, begin)
        return position - (self.past + begin) + torch.arange(self.real.shape[1], device=real.device)


def _added(text: Tensor, change: Tensor, share: Tensor) -> Tensor:
    """Return keys or values of a text, the first ones with a share of their change."""
    count = change.shape[2]
    wide = torch.promote_types(share.dtype, text.dtype)
    changed = text[:, :, :count].to(wide) + share.to(text.device, wide) * change.to(text.device, wide)
    return torch.cat([changed.to(text.dtype), text[:, :, count:]], 2)


_NO_CACHE = (
    "adapter {name!r} (kind 'fused_cache') reads the cache of another model, got {memory}: give it "
    "mmattn.AugmentingModel(lm).prefill(input_ids, attention_mask) of the prompts"
)
