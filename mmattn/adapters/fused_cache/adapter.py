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
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.composed.prompt import AugmentedPrompt
from mmattn.adapters.fused_cache.source import FusedSource
from mmattn.adapters.gated.block import Gate
from mmattn.adapters.layer_choice import check_layers, check_other_layers, chosen_sites
from mmattn.adapters.protocols import HeadSizes, Host, Site
from mmattn.adapters.registry import register_adapter
from mmattn.errors import AttachError, ConfigError, ShapeError, check_choice, check_int
from mmattn.memory import Memory

GATES = ("scalar", "head")


@register_adapter
@dataclass(frozen=True)
class FusedCacheAdapter:
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

    memory_dim: int
    every: int | None = None
    layers: tuple[int, ...] | None = None
    augmenting_layers: tuple[int, ...] | None = None
    hidden_dim: int = 256
    gate: str = "scalar"

    kind: ClassVar[str] = "fused_cache"
    positions: ClassVar[tuple[str, ...]] = ("joined",)
    example_call: ClassVar[str] = "model.generate(input_ids, memory=mmattn.AugmentingModel(lm).prefill(input_ids))"

    def __post_init__(self) -> None:
        check_int("memory_dim", self.memory_dim, at_most=1 << 20)
        check_int("hidden_dim", self.hidden_dim, at_most=1 << 20)
        check_choice("gate", self.gate, GATES)
        given = self.layers
        object.__setattr__(self, "layers", check_layers(self.every, given))
        object.__setattr__(self, "augmenting_layers", check_other_layers(self.augmenting_layers, given))

    def sites(self, host: Host) -> list[Site]:
        """The attention of the layers that `layers` or `every` names.

        Raises:
            AttachError: the host is not that deep, or a layer has no attention that can be reached.
        """
        every = 1 if self.every is None and self.layers is None else self.every
        return chosen_sites(host.sites("joined"), every, self.layers)

    def build(self, sites: Sequence[Site]) -> FusedCacheLayers:
        """The trainable part for these sites.

        Raises:
            AttachError: another number of augmenting layers than of layers.
        """
        return FusedCacheLayers(self, sites)

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> Any:
        """There is none.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a fused cache is that of another language model, and none can be made up: give "
            "mmattn.AugmentingModel(lm).prefill(input_ids)"
        )


class CacheFuser(nn.Module):
    """What the keys and values of one host layer are changed by.

    Args:
        config: the settings.
        size: of the host's attention.
    """

    def __init__(self, config: FusedCacheAdapter, size: HeadSizes) -> None:
        super().__init__()
        self.key_dim, value_dim = size.head_dim, size.value_dim or size.head_dim
        self.num_kv_heads = size.num_kv_heads
        own = size.num_kv_heads * (size.head_dim + value_dim)
        self.host_norm, self.memory_norm = nn.LayerNorm(own), nn.LayerNorm(config.memory_dim)
        self.in_proj = nn.Linear(own + config.memory_dim, config.hidden_dim)
        self.out_proj = nn.Linear(config.hidden_dim, own)
        self.gate = Gate(2, size.num_kv_heads if config.gate == "head" else 1)

    def forward(self, key: Tensor, value: Tensor, states: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to keys and values, before the gates.

        Args:
            key: (b, g, p, k), of the host, at position 0.
            value: (b, g, p, v).
            states: (b, p, e), keys and values of the augmenting model.
            visible: (b, p) bool, tokens that the augmenting model has read; the others stay as they are.
        """
        weight, hidden = self.in_proj.weight, ~visible[..., None]
        own = torch.cat([key, value], -1).transpose(1, 2).flatten(2).to(weight.dtype).masked_fill(hidden, 0)
        states = states.to(weight.device, weight.dtype).masked_fill(hidden, 0)
        inner = F.gelu(self.in_proj(torch.cat([self.host_norm(own), self.memory_norm(states)], -1)))
        change = self.out_proj(inner).masked_fill(hidden, 0).unflatten(2, (self.num_kv_heads, -1)).transpose(1, 2)
        return change[..., : self.key_dim], change[..., self.key_dim :]


class FusedCacheLayers(AdapterLayers):
    """The trainable part of one adapter that fuses caches, on one host.

    Args:
        config: the settings.
        sites: the attention layers of the host that it acts in.
    """

    orders_slots = True
    counts_slots = True
    reads_whole_text = True

    def __init__(self, config: FusedCacheAdapter, sites: Sequence[Site]) -> None:
        super().__init__(config, sites)
        others = self.layers if config.augmenting_layers is None else config.augmenting_layers
        if len(others) != len(self.layers):
            raise AttachError(
                f"the adapter is put at layers {list(self.layers)} of the host and augmenting_layers names "
                f"{list(others)}: name one for each"
            )
        self.augmenting_layers = dict(zip(self.layers, others, strict=True))
        blocks = {}
        for site in self.sites:
            assert site.heads is not None
            blocks[str(site.layer)] = CacheFuser(config, site.heads)
        self.blocks = nn.ModuleDict(blocks)
        #: How each layer of the host turns its keys; None where they follow positions otherwise, and stay as they are.
        self.rotations: Mapping[int, Any] | None = None

    @property
    def weight(self) -> Tensor:
        """A weight of the first layer."""
        return self.fuser(self.layers[0]).in_proj.weight

    def fuser(self, layer: int) -> CacheFuser:
        """What changes keys and values at host layer `layer`."""
        block = self.block(layer)
        assert isinstance(block, CacheFuser)
        return block

    def read(self, memory: Memory) -> Memory:
        """Refused: what is read is a cache.

        Raises:
            ShapeError: always.
        """
        raise ShapeError(_NO_CACHE.format(name=self.name, given="a Memory"))

    def bind_memory(self, memory: object, host: nn.Module) -> FusedSource:
        """Bind what an augmenting model has read.

        Raises:
            ShapeError: something else, another width, or fewer layers.
        """
        if not isinstance(memory, AugmentedPrompt):
            raise ShapeError(_NO_CACHE.format(name=self.name, given=type(memory).__name__))
        wanted, deepest = self.config.memory_dim, max(self.augmenting_layers.values())
        if deepest >= len(memory.states):
            raise ShapeError(
                f"adapter {self.name!r} reads layer {deepest} of the augmenting model, got one with layers 0 to "
                f"{len(memory.states) - 1}: use the one it was trained with, or name other augmenting_layers"
            )
        widths = {memory.states[layer].shape[2] for layer in self.augmenting_layers.values()}
        if widths != {wanted}:
            raise ShapeError(
                f"adapter {self.name!r} was made for memory_dim={wanted}, got keys and values of {sorted(widths)} "
                "numbers for a token: use the augmenting model it was trained with"
            )
        return FusedSource(memory, self)

    def attach_to(self, host: Any) -> None:
        """Prove that changed keys and values reach the output, and learn how the host turns its keys."""
        host.check_adapter(self)
        self.rotations = host.probe_rotations()


_NO_CACHE = (
    "adapter {name!r} (kind 'fused_cache') reads the cache of another model, got {given}: give it "
    "mmattn.AugmentingModel(lm).prefill(input_ids, attention_mask) of the prompts"
)
