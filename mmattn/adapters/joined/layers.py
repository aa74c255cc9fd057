"""The trainable part of one adapter on one host, and the memory of a call for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.gated.block import Gate
from mmattn.adapters.joined.config import JoinedAdapter
from mmattn.adapters.joined.host_attention import JoinSlots
from mmattn.adapters.joined.slots import JoinedRequests, JoinedView, slots_of
from mmattn.adapters.projection import ProjectedMemory
from mmattn.adapters.protocols import BoundMemory, HeadSizes, JoinRequests, KeepFinite, Site, Traits
from mmattn.adapters.text_state import TextState
from mmattn.core.kv_cache import KeyValue
from mmattn.core.tracing import all_finite, may_read

GATES = ("scalar", "head")


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
        """Return the mask (b, 1, l, m), with `length_norm` as a bias of the scores."""
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

    def view(
        self,
        text: TextState,
        projected: Mapping[int, KeyValue],
        attention_mask: Tensor | None,
        has_memory: Tensor | None,
    ) -> JoinedView:
        """Return the slots without positions; rows of the memory are repeated for the beams of a text."""
        slots = slots_of(projected)
        repeated = slots.repeated(text.rows // max(slots.batch, 1))
        return JoinedView(repeated, None if attention_mask is None else attention_mask[:, 0].to(slots.mask.device))

    def join_requests(
        self, requests: Sequence[BoundMemory | None], join: JoinRequests, keep: KeepFinite
    ) -> JoinedRequests:
        vectors = {n: one for n, one in enumerate(requests) if isinstance(one, ProjectedMemory)}
        slots = {n: partial(lambda one: slots_of(one.project_all()), one) for n, one in vectors.items()}
        return JoinedRequests(self.name, len(requests), slots)
