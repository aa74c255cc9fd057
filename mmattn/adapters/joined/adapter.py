"""Rectangular attention (KBLaM, arXiv 2410.10450, section 3.2 and equation 4): a memory in the host's own softmax.

With q, K, V the queries, keys and values of a host's attention, M (b, m, e) the memory and α a gate that starts at 0:

    o = attend(q, K, V)
    y = o + tanh(α) · (attend(q, [norm(M) Wk'; K], [norm(M) Wv'; V]) − o)

before the host's own output projection. The keys of a memory have no position: slots have no order, the text stands
where it stood, and what a layer sees of the text by a window it sees of a memory always.

Departures from the paper: the gate, so that a fresh adapter is exactly nothing; the paper's attention is tanh(α) = 1.
The queries are the host's own, as it turned them to their positions, where the paper trains a copy Wq' of the host's
query projection: a linear map of the queries of a head would be one of its keys again. With `length_norm`, C of the
paper's section 3.2, log C − log m is added to the scores of m slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.gated.block import Gate
from mmattn.adapters.joined.host_attention import JoinSlots
from mmattn.adapters.joined.slots import JoinedRequests, JoinedSlots, JoinedView, slots_of
from mmattn.adapters.projection import ProjectedMemory
from mmattn.adapters.protocols import BoundMemory, HeadSizes, JoinRequests, KeepFinite, Site, Traits
from mmattn.adapters.settings import AdapterConfig, default_norm, settle, settle_layers
from mmattn.adapters.text_state import TextState
from mmattn.core.key_values import KeyValue
from mmattn.core.tracing import all_finite, may_read
from mmattn.errors import check_choice, check_float

GATES = ("scalar", "head")


@dataclass(frozen=True)
class JoinedAdapter(AdapterConfig):
    """Settings of rectangular attention: slots are further keys and values of a language model's own attention.

    Args:
        memory_dim: e, width of the memory.
        every: join slots at every n-th host layer (layers n-1, 2n-1, …). Without `layers` it defaults to 4, or to the
            depth of a smaller host.
        layers: the host layers with slots, counted from 0, instead of `every`.
        gate: "scalar" or "head": one gate value for the layer or for each head.
        length_norm: C, rescales the total weight of the slots to that of C identical slots; None: no rescaling.
        memory_norm: normalise the memory. By default from a width of 12 on: a norm leaves little more than signs of a
            narrower vector.

    >>> JoinedAdapter(memory_dim=24, layers=[3, 1]).layers
    (1, 3)
    """

    memory_dim: int
    every: int | None = None
    layers: tuple[int, ...] | None = None
    gate: str = "scalar"
    length_norm: float | None = None
    memory_norm: bool | None = None

    kind: ClassVar[str] = "joined"
    positions: ClassVar[tuple[str, ...]] = ("joined",)
    example_call: ClassVar[str] = "model.generate(input_ids, memory=memory)"

    def __post_init__(self) -> None:
        settle_layers(self)
        check_choice("gate", self.gate, GATES)
        if self.length_norm is not None:
            check_float("length_norm", self.length_norm, at_least=1)
        settle(self, memory_norm=default_norm(self.memory_norm, self.memory_dim))


class JoinedBlock(JoinSlots):
    """Keys and values of a memory for the attention of one host layer, and the gate of what they change."""

    def __init__(self, config: JoinedAdapter, size: HeadSizes) -> None:
        super().__init__(Gate(size.num_heads if config.gate == "head" else 1))
        self.num_kv_heads, self.head_dim = size.num_kv_heads, size.head_dim
        self.length_norm = config.length_norm
        self.k_proj = nn.Linear(config.memory_dim, size.num_kv_heads * size.head_dim, bias=False)
        self.v_proj = nn.Linear(config.memory_dim, size.num_kv_heads * (size.value_dim or size.head_dim), bias=False)

    def project(
        self,
        memory: Tensor,
        *,
        mask: Tensor | None = None,
        scores: Tensor | None = None,
        queries: int | None = None,
        hidden_are_zero: bool = False,
    ) -> KeyValue:
        keys, values = (
            projection(memory).unflatten(2, (self.num_kv_heads, -1)).transpose(1, 2)
            for projection in (self.k_proj, self.v_proj)
        )
        if queries is not None:
            return KeyValue(keys, values, mask)
        finite = may_read(keys) and all_finite(keys, values)
        return KeyValue(keys.contiguous(), values.contiguous(), mask, finite=finite)

    def projecting_parameters(self) -> list[Tensor]:
        return [self.k_proj.weight, self.v_proj.weight]

    def score_mask(self, attention_mask: Tensor | None, slots: int) -> Tensor | None:
        if self.length_norm is None:
            return attention_mask
        if attention_mask is None:
            attention_mask = torch.ones(1, 1, 1, slots, dtype=torch.bool, device=self.k_proj.weight.device)
        count = attention_mask.sum(-1, keepdim=True).clamp(min=1)
        bias = (math.log(self.length_norm) - count.float().log()).expand(attention_mask.shape)
        return bias.masked_fill(~attention_mask, torch.finfo(torch.float32).min)


class JoinedLayers(AdapterLayers):
    """The trainable part of one joined adapter on one host."""

    def __init__(self, config: JoinedAdapter, sites: Sequence[Site]) -> None:
        super().__init__(config, sites)
        # A slot that is there twice weighs twice as much beside the text.
        self.traits = Traits(duplicates_matter=config.length_norm is None)
        self._add_reader(config.memory_norm)
        self.blocks = nn.ModuleDict({str(site.layer): JoinedBlock(config, site.sizes) for site in self.sites})

    def attention(self, layer: int) -> nn.Module:
        return self.block(layer)

    def bind_memory(self, memory: object, host: nn.Module) -> JoinedVectors:
        return JoinedVectors(self.prepare(memory), self)


class JoinedVectors(ProjectedMemory):
    """A prepared memory whose slots, without positions, are joined with the text in the host's own attention."""

    def view(
        self, text: TextState, projected: Mapping[int, Any], attention_mask: Tensor | None, has_memory: Tensor | None
    ) -> JoinedView:
        slots = slots_of(projected)
        repeated = slots.repeated(text.rows // max(slots.batch, 1))
        return JoinedView(repeated, None if attention_mask is None else attention_mask[:, 0].to(slots.mask.device))

    def hide_from(self, tokens: int) -> None:
        BoundMemory.hide_from(self, tokens)

    def together(self, requests: Sequence[BoundMemory | None], join: JoinRequests, keep: KeepFinite) -> JoinedRequests:
        slots = {n: one.slots for n, one in enumerate(requests) if isinstance(one, JoinedVectors)}
        return JoinedRequests(self.name, len(requests), slots)

    def slots(self) -> JoinedSlots:
        """Return the slots of a request."""
        return slots_of(self.project_all())
