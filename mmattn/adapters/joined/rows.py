"""Slots that are joined with a host's own keys and values, for rows of text, packed documents, and requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmattn.adapters.joined.host_attention import HostAttention
from mmattn.adapters.packed_text import PackedText
from mmattn.adapters.projected_memory import ProjectedMemory, ProjectedView, RequestMemories
from mmattn.adapters.protocols import BoundMemory, JoinRequests, KeepFinite, View
from mmattn.adapters.text_state import TextState
from mmattn.core.kv_cache import KeyValue


class JoinedRowsView(View):
    """A memory in one forward, whose slots are joined with the host's own keys and values.

    Args:
        slots: by host layer keys (b or 1, g, m, k) and values (b or 1, g, m, v).
        mask: (b or 1, 1, l or 1, m) bool, which slots each token sees.
        packed: rows are packed, and `mask` says which slots each of their tokens sees.
    """

    def __init__(self, slots: Mapping[int, tuple[Tensor, Tensor]], mask: Tensor, packed: bool = False) -> None:
        self.slots, self.mask, self.is_packed = slots, mask, packed
        sees = mask[:, 0].any(-1)
        # Asked once for all layers: where all see all, there is no mask to widen.
        self.sees = None if bool(sees.all()) else sees
        self.hides = not bool(mask.all())

    def pack(self, text: PackedText) -> JoinedRowsView:
        """The same for packed rows: their tokens see the slots of their document.

        Args:
            text: where the documents lie, which are the rows of this.
        """
        s, m = self.mask.shape[0], self.mask.shape[-1]
        slots = {
            layer: tuple(one.transpose(0, 1).flatten(1, 2)[None] for one in both) for layer, both in self.slots.items()
        }
        numbers = text.numbers.to(self.mask.device)
        blank = torch.zeros(*numbers.shape, m, dtype=torch.bool, device=self.mask.device)
        seen = text.pack(self.mask[:, 0].expand(s, text.longest, m), blank)
        owned = numbers[..., None] == torch.arange(s, device=numbers.device)
        mask = (owned[..., None] & seen[:, :, None]).flatten(2)[:, None]
        return JoinedRowsView(slots, mask, packed=True)  # type: ignore[arg-type]

    def apply(self, x: HostAttention, block: Any, layer: int, adapter_scale: Any) -> HostAttention:
        """The attention of a layer with the slots joined to it."""
        where = x.query.device
        key, value = (one.to(where) for one in self.slots[layer])
        mask = self.mask.to(where) if self.hides else None
        sees = None if self.sees is None else self.sees.to(where)
        joined: HostAttention = block(x, key, value, attention_mask=mask, sees=sees, adapter_scale=adapter_scale)
        return joined


class JoinedProjectedMemory(ProjectedMemory):
    """A prepared memory bound to an adapter that joins its slots with the host's own keys and values."""

    def see(self, text: TextState) -> Any:
        """Compute what this forward attends to; rows of the memory are repeated for the beams of a text."""
        view: ProjectedView = super().see(text)
        times = text.rows // max(self.prepared.batch, 1)

        def repeated(one: Tensor) -> Tensor:
            return one if times == 1 else one.repeat_interleave(times, 0)

        slots = {layer: (repeated(one.keys), repeated(one.values)) for layer, one in view.projected.items()}
        mask = repeated(real_slots(next(iter(view.projected.values()))))[:, None, None]
        if view.attention_mask is not None:
            mask = mask & view.attention_mask.to(mask.device)
        return JoinedRowsView(slots, mask)

    def together(self, requests: Sequence[BoundMemory | None], join: JoinRequests, keep: KeepFinite) -> BoundMemory:
        """Return the memories of all requests in one step of continuous batching."""
        return JoinedProjectedRequests(self.name, requests, join, keep)


class JoinedProjectedRequests(RequestMemories):
    """The memories of requests that share a row of text, joined with the host's own keys and values."""

    def step(self, text: TextState) -> Any:
        """Return what this forward attends to: each request its own slots.

        Raises:
            ShapeError: the text is not that of the requests.
        """
        self.check_rows(text)
        assert text.packed is not None, "transformers says where the requests of a step begin"
        projected = [(number, one.project_all()) for number, one in enumerate(self.requests) if one is not None]
        slots, owner = {}, text.packed.numbers.new_zeros(0)
        for layer in projected[0][1]:
            parts = [one[layer] for _, one in projected]
            slots[layer] = torch.cat([one.keys for one in parts], 2), torch.cat([one.values for one in parts], 2)
            owners = [
                torch.where(real_slots(part)[0], number, -2) for (number, _), part in zip(projected, parts, strict=True)
            ]
            owner = torch.cat(owners).to(text.packed.numbers.device)
        mask = text.packed.numbers[:, :, None] == owner
        return JoinedRowsView(slots, mask[:, None], packed=True)


def real_slots(slots: KeyValue) -> Tensor:
    """Which slots (b, m) are real."""
    if slots.mask is not None:
        return slots.mask
    return torch.ones(slots.batch, slots.slots, dtype=torch.bool, device=slots.keys.device)
