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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.composed.augmenting_model import AugmentedPrompt, AugmentingModel
from mmattn.adapters.fused_cache.fusers import CacheFuser, CacheMap, batches, fit_maps, read_tokens
from mmattn.adapters.joined.host_attention import HostAttention
from mmattn.adapters.joined.rotation import Rotations
from mmattn.adapters.protocols import BoundMemory, Scale, Site, Traits, View
from mmattn.adapters.settings import (
    AdapterConfig,
    augmenting_layers_of,
    settle_augmenting_layers,
    settle_layers,
)
from mmattn.adapters.text_state import TextState
from mmattn.core.positions import token_positions
from mmattn.errors import ConditionError, ConfigError, ShapeError, check_choice, check_int
from mmattn.memory import Memory
from mmattn.storage.tensor_cache import KeyValueCache

GATES = ("scalar", "head")
FUSERS = ("network", "ridge")


@dataclass(frozen=True)
class FusedCacheAdapter(AdapterConfig):
    """Settings of fused caches: the cache of another language model changes the host's cache.

    The memory of a call is `mmattn.AugmentingModel(lm).prefill(input_ids, attention_mask)` of the prompts at the start
    of its texts. For several models, attach one adapter for each.

    Args:
        memory_dim: e, `cache_dim` of the augmenting model: keys and values of all heads of one of its layers.
        every: fuse at every n-th host layer (layers n-1, 2n-1, …); at every layer by default.
        layers: the host layers to fuse at, counted from 0, instead of `every`.
        augmenting_layers: for each of these host layers, in the order of `layers`, the layer of the augmenting model
            that is fused into it, counted from 0; the same numbers by default, or with "ridge" the two that `fit`
            chooses.
        hidden_dim: hidden width of the network.
        gate: "scalar" or "head": one gate value for the layer or for each head, of keys and of values.
        fuser: "network", which is trained and adds to the host's keys and values; or "ridge", a map without gates that
            `model.adapter(name).fit` computes in closed form and whose output replaces them.

    >>> FusedCacheAdapter(memory_dim=64, layers=[3, 1], augmenting_layers=[5, 2]).augmenting_layers
    (2, 5)
    """

    memory_dim: int
    every: int | None = None
    layers: tuple[int, ...] | None = None
    augmenting_layers: tuple[int, ...] | None = None
    hidden_dim: int = 256
    gate: str = "scalar"
    fuser: str = "network"

    kind: ClassVar[str] = "fused_cache"
    positions: ClassVar[tuple[str, ...]] = ("joined",)
    default_every: ClassVar[int] = 1
    example_call: ClassVar[str] = "model.generate(input_ids, memory=mmattn.AugmentingModel(lm).prefill(input_ids))"

    def __post_init__(self) -> None:
        settle_augmenting_layers(self, self.layers, self.augmenting_layers)
        settle_layers(self)
        check_choice("gate", self.gate, GATES)
        check_choice("fuser", self.fuser, FUSERS)
        check_int("hidden_dim", self.hidden_dim, at_most=1 << 20)
        if self.fuser == "ridge" and self.gate != "scalar":
            raise ConfigError("gate belongs to fuser='network': leave it out with fuser='ridge'")

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> NoReturn:
        """Raise ConfigError: the memory is the cache of another model."""
        raise ConfigError(
            "a fused cache is computed by another language model, so it has no example: give "
            "mmattn.AugmentingModel(lm).prefill(input_ids)"
        )


#: Layers of the augmenting model that `fit` chooses for a host layer.
MAPPED_LAYERS = 2
#: Mean cosine of attention outputs below which `fit` refuses a pair of models.
MIN_COSINE = 0.9


class FusedCacheLayers(AdapterLayers):
    """The trainable part of one adapter that fuses caches, on one host."""

    traits = Traits(order_matters=True, duplicates_matter=True, reads_whole_text=True)

    config: FusedCacheAdapter

    def __init__(self, config: FusedCacheAdapter, sites: Sequence[Site]) -> None:
        super().__init__(config, sites)
        named, self.is_map, self.blocks = config.augmenting_layers, config.fuser == "ridge", nn.ModuleDict()
        for site in self.sites:
            self.blocks[str(site.layer)] = (
                CacheMap(config.memory_dim, MAPPED_LAYERS if named is None else 1, site.sizes)
                if self.is_map
                else CacheFuser(config.memory_dim, config.hidden_dim, config.gate, site.sizes)
            )
        #: The layer of the augmenting model for each host layer; None if `fit` chooses.
        self.augmenting_layers = None if self.is_map and named is None else augmenting_layers_of(named, self.layers)
        #: How each layer of the host turns its keys; None if positions enter otherwise. Set by `attach_to`.
        self.rotations: Rotations = None
        self._at_all_layers = False
        #: Inside `fit`, cosines of attention outputs by layer.
        self.cosines: dict[int, list[Tensor]] | None = None

    @property
    def maps(self) -> dict[int, CacheMap]:
        """The blocks by host layer, of an adapter that is fitted."""
        return {layer: cast(CacheMap, self.block(layer)) for layer in self.layers}

    def sources(self, layer: int) -> list[int]:
        """Return the layers of the augmenting model that are read for a host layer; 0 before `fit`."""
        if self.augmenting_layers is not None:
            return [self.augmenting_layers[layer]]
        chosen: list[int] = self.maps[layer].augmenting_layers.clamp(min=0).tolist()
        return chosen

    @property
    def replaces_all(self) -> bool:
        """Return True if keys and values are replaced in every layer of the host, as after `fit`."""
        fitted = self.is_map and all(bool(block.gate().all()) for block in self.maps.values())
        return fitted and self._at_all_layers and self.cosines is None

    @torch.no_grad()
    def fit(
        self,
        model: nn.Module,
        augmenting_model: AugmentingModel,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        min_cosine: float = MIN_COSINE,
    ) -> float:
        """Compute the map from the cache of another model to that of the host, in closed form (arXiv 2608.03893).

        Both models read the prompts. Every eighth is held out: there attention with the mapped keys and values is
        compared with the host's own.

        Args:
            model: the adapted model with this adapter.
            augmenting_model: whose caches are mapped.
            input_ids: (n, p), of some hundred prompts such as those to come, in tokens of the host.
            attention_mask: (n, p), 1 = a real token; all by default.
            min_cosine: least mean cosine of the outputs of attention with which the map is kept.

        Returns:
            the mean cosine over the tokens and layers.

        Raises:
            ConfigError: the fuser is a network, or the model has not this adapter.
            ConditionError: the cosine is below `min_cosine`, and the adapter as before; or a model is in training mode.
            ShapeError: the cache of the augmenting model has another width, there are fewer than eight prompts, or no
                eighth one has two tokens.
        """
        adapted = cast(Any, model)
        if not self.is_map or self not in adapted.adapters.values():
            raise ConfigError(
                f"fit is for FusedCacheAdapter(fuser='ridge') on the model it is attached to, got "
                f"fuser={self.config.fuser!r} on a {type(model).__name__}"
            )
        real = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).bool()
        if input_ids.dim() != 2 or real.shape != input_ids.shape:
            raise ShapeError(
                f"input_ids and attention_mask must be (n, p), got {tuple(input_ids.shape)} and {tuple(real.shape)}"
            )
        held, counts = torch.arange(len(input_ids)) % 8 == 7, real.sum(1).cpu()
        if not bool((counts[held] > 1).any()) or int(counts[~held].sum()) < 2:
            raise ShapeError(
                f"fit measures on every eighth prompt, on all tokens but the last, got {len(counts)} prompts of "
                f"{int(counts.sum())} tokens together: give some hundred, of several tokens each"
            )
        before = {name: one.clone() for name, one in self.state_dict().items()}
        host = AugmentingModel(adapted.host)
        try:
            sources, targets = read_tokens((augmenting_model, host), input_ids[~held], real[~held])
            self._check_fits([one.shape[1] for one in sources])
            fit_maps(self.maps, self.augmenting_layers, sources, targets)
            self.cosines = {layer: [] for layer in self.layers}
            for some, mask in batches(input_ids[held], real[held]):
                memory = {self.name: augmenting_model.prefill(some, mask)}
                adapted.base_model(input_ids=some, attention_mask=mask.long(), memory=memory, use_cache=False)
            cosine = float(torch.stack([torch.cat(one).mean() for one in self.cosines.values()]).mean())
            if not cosine >= min_cosine:
                raise ConditionError(
                    f"attention with the mapped cache has cosine {cosine:.2f} with the host's own, below min_cosine="
                    f"{min_cosine}: take another augmenting model or more prompts, or train fuser='network'"
                )
        except BaseException:
            self.load_state_dict(before)
            raise
        finally:
            self.cosines = None
        return cosine

    def _check_fits(self, widths: Sequence[int]) -> None:
        """Check the width of what another model caches in each layer."""
        layers = {number for layer in self.layers for number in self.sources(layer)}
        if max(layers) >= len(widths):
            raise ShapeError(
                f"adapter {self.name!r} reads layer {max(layers)} of the augmenting model, got one with layers 0 to "
                f"{len(widths) - 1}: use the one it was trained with, or name other augmenting_layers"
            )
        actual = {widths[number] for number in layers}
        if actual != {self.config.memory_dim}:
            raise ShapeError(
                f"adapter {self.name!r} was made for memory_dim={self.config.memory_dim}, got keys and values of "
                f"{sorted(actual)} numbers for a token: use the augmenting model it was trained with"
            )

    def read(self, memory: Memory) -> Memory:
        raise ShapeError(_NO_CACHE.format(name=self.name, memory="a Memory"))

    def bind_memory(self, memory: object, host: nn.Module) -> FusedMemory:
        if not isinstance(memory, AugmentedPrompt):
            raise ShapeError(_NO_CACHE.format(name=self.name, memory=type(memory).__name__))
        self._check_fits([one.shape[2] for one in memory.states])
        return FusedMemory(memory, self)

    def attach_to(self, host: Any) -> None:
        host.check_adapter(self)
        self.rotations = host.probe_rotations()
        self._at_all_layers = len(self.layers) == len(host.sites("joined"))


#: Changes of keys (b, g, end, k) and values (b, g, end, v) by layer.
Changes = dict[int, tuple[Tensor, Tensor]]


class FusedMemory(BoundMemory):
    """The prompts that a model has read for one call, bound to the adapter that fuses them."""

    follows_text = True

    def __init__(self, prompt: AugmentedPrompt, adapter: FusedCacheLayers) -> None:
        self.shared, self.prompt, self.adapter = prompt, prompt.left_aligned(), adapter
        self.name, self.rows = adapter.name, prompt.batch
        self._cache = KeyValueCache(tuple)
        #: Caches of the host that hold the mapped keys and values of the whole prompts.
        self._filled: WeakSet[Any] = WeakSet()

    def step(self, text: TextState) -> FusedView:
        if text.packed is not None:
            raise ConditionError(
                f"adapter {self.name!r} fuses what was read of the beginning of a row, and packed rows hold several "
                "texts: give each document a row of its own (pad instead of packing)"
            )
        self.check_rows(text)
        if text.cache is not None and text.cache in self._filled:
            nothing = torch.zeros(text.rows, 0)
            return FusedView(self.adapter, self.prompt, nothing, nothing, 0, None)
        prompt, numbers, is_whole = self._find(text)
        changes = self._changes(text, numbers, is_whole)
        return FusedView(self.adapter, prompt, numbers, text.whole[0], cast(int, text.past), changes)

    def _find(self, text: TextState) -> tuple[AugmentedPrompt, Tensor, bool]:
        """Return prompts by row of a text, the number in them of tokens to change (b, end), and if all are there."""
        real, ids = text.whole
        if text.past is None:
            raise ConditionError(
                f"adapter {self.name!r} must know how much text the host has cached, and its cache does not say: give "
                "the whole text, or take another host"
            )
        prompt = self.prompt.repeated(text.rows // max(self.rows or 1, 1))
        counts, places = prompt.real.sum(1).to(real.device), token_positions(real)
        visible = real & (places < counts[:, None])
        if ids is not None:
            prompt.check_begins(ids, places, visible, self.name)
        if self.adapter.is_map:
            # The last token of a prompt is read by the host, for the logits of the next.
            counts = (counts - 1).clamp(min=0)
            visible &= places < counts[:, None]
        read = visible.any(0).nonzero()
        end = int(read[-1]) + 1 if len(read) else 0
        return prompt, places.masked_fill(~visible, -1)[:, :end], bool((visible.sum(1) == counts).all())

    def first_keys(self, text: TextState, positions: Tensor) -> Mapping[int, tuple[Tensor, Tensor]] | None:
        if not self.adapter.replaces_all:
            return None
        prompt, numbers, is_whole = self._find(text)
        unread = text.whole[0][:, : numbers.shape[1]] & (numbers < 0)
        first = torch.cat([unread.any(0), torch.ones_like(unread[0, :1])]) if len(unread) else unread
        end = min(int(first.to(torch.uint8).argmax()), text.length - 1) if numbers.shape[1] else 0
        if not end:
            return None
        if is_whole and end == numbers.shape[1]:
            self._filled.add(text.cache)
        keys = {}
        for layer, block in self.adapter.maps.items():
            key, value = block.map(prompt.states_of(self.adapter.sources(layer), numbers[:, :end]))
            rotation = None if self.adapter.rotations is None else self.adapter.rotations[layer]
            places = positions[:, None, :end].to(key.device)
            keys[layer] = key if rotation is None else rotation(key, places), value
        return keys

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
            f"adapter {self.name!r} reads the cache of another model, not a Memory: compare calls with caches of other "
            "prompts, or without"
        )


@dataclass(eq=False)
class FusedView(View):
    """The tokens of one forward, whose keys and values are changed if another model has read them."""

    stands_in_text = True
    moves_text = False

    adapter: FusedCacheLayers
    prompt: AugmentedPrompt
    numbers: Tensor  # (b, end), in the prompt, of the tokens that are changed; -1 for the others
    real: Tensor  # (b, t) bool, tokens of the text so far that are no padding
    past: int  # tokens before this forward
    changes: Changes | None  # computed before, or room for them
    positions: Tensor | None = None  # (b, l), of the tokens of this forward

    def shift_positions(self, positions: Tensor) -> Tensor:
        """Return the positions of the tokens of this forward, which stay."""
        rows = positions if positions.dim() == 2 else positions[0]
        self.positions = rows.expand(len(self.real), -1)
        return positions

    def apply(self, x: HostAttention, block: Any, layer: int, adapter_scale: Scale) -> HostAttention:
        # A window that is cut to its length holds the last tokens only.
        first = max(0, self.real.shape[1] - x.key.shape[2])
        if first >= self.numbers.shape[1]:
            return x
        if self.adapter.is_map and x.computed is not None:
            raise ConditionError(
                f"adapter {self.adapter.name!r} replaces keys and values that another adapter has changed: activate "
                "one of them, model.set_adapter(name)"
            )
        change = None if self.changes is None else self.changes.get(layer)
        if change is None:
            change = self._change(x, block, layer, first)
            if self.changes is not None and first == 0:
                self.changes[layer] = change
        elif first:
            change = change[0][:, :, first:], change[1][:, :, first:]
        key_share, value_share = (adapter_scale * share[:, None, None] for share in block.gate())
        fused = x.with_text(_added(x.key, change[0], key_share), _added(x.value, change[1], value_share))
        if self.adapter.cosines is None:
            return fused
        later = (self.real & (token_positions(self.real) > 0)).to(x.key.device)
        host, mapped = (one.result()[0][later].float().flatten(1) for one in (x, fused))
        self.adapter.cosines[layer].append(torch.cosine_similarity(host, mapped, -1))
        return x

    def _change(self, x: HostAttention, block: nn.Module, layer: int, first: int) -> tuple[Tensor, Tensor]:
        """Compute the changes of keys and values from a token of the text on."""
        device, adapter = x.key.device, self.adapter
        numbers = self.numbers[:, first:].to(device)
        places = self._positions_of_text()[:, None, first : self.numbers.shape[1]].to(device)
        rotation = None if adapter.rotations is None else adapter.rotations[layer]
        # Several adapters change what the host computed, each by itself.
        key, value = (one[:, :, : numbers.shape[1]] for one in x.computed or (x.key, x.value))
        states = self.prompt.states_of(adapter.sources(layer), numbers)
        key = key if rotation is None else rotation(key, -places)
        change, value_change = block(key, value, states, numbers >= 0)
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
