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

from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch

from mmattn.adapters.protocols import Host, Site
from mmattn.adapters.settings import chosen_sites, settle_augmenting_layers, settle_layers
from mmattn.errors import ConfigError, check_choice, check_int

GATES = ("scalar", "head")
FUSERS = ("network", "ridge")


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
            into it, counted from 0; by default those of the same numbers, or with "ridge" the two that `fit` chooses.
        hidden_dim: width of the network between.
        gate: "scalar" or "head": how many numbers the gates of its layer have, for keys and for values.
        fuser: "network", which is trained and adds to the host's keys and values; or "ridge", a map without gates that
            `model.adapter(name).fit` computes in closed form and that replaces them.

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
    example_call: ClassVar[str] = "model.generate(input_ids, memory=mmattn.AugmentingModel(lm).prefill(input_ids))"

    def __post_init__(self) -> None:
        settle_augmenting_layers(self, self.layers, self.augmenting_layers)
        settle_layers(self)
        check_choice("gate", self.gate, GATES)
        check_choice("fuser", self.fuser, FUSERS)
        check_int("hidden_dim", self.hidden_dim, at_most=1 << 20)
        if self.fuser == "ridge" and self.gate != "scalar":
            raise ConfigError("gate belongs to fuser='network': leave it out with fuser='ridge'")

    def sites(self, host: Host) -> list[Site]:
        """Return the chosen attention layers, all by default."""
        return chosen_sites(self, host.sites("joined"), default_every=1)

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> NoReturn:
        """Raise ConfigError: the memory is the cache of another model."""
        raise ConfigError(
            "a fused cache is that of another language model, and none can be made up: give "
            "mmattn.AugmentingModel(lm).prefill(input_ids)"
        )
