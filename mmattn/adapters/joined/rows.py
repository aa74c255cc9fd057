"""Slots that are joined with a host's own keys and values, for rows of text, packed documents, and requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmattn.adapters.joined.host_attention import HostAttention
from mmattn.adapters.packed_text import PackedText
from mmattn.adapters.prepared_memory import ProjectedMemory, ProjectedView
from mmattn.adapters.text_state import TextState
from mmattn.core.kv_cache import KeyValue
from mmattn.errors import ConditionError
from mmattn.memory import Memory


class JoinedRowsView:
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
        """What this forward sees, computed now; rows of the memory are repeated for the beams of a text."""
        view: ProjectedView = super().see(text)
        times = text.rows // max(self.prepared.batch, 1)

        def repeated(one: Tensor) -> Tensor:
            return one if times == 1 else one.repeat_interleave(times, 0)

        slots = {layer: (repeated(one.keys), repeated(one.values)) for layer, one in view.projected.items()}
        mask = repeated(real_slots(next(iter(view.projected.values()))))[:, None, None]
        if view.attention_mask is not None:
            mask = mask & view.attention_mask.to(mask.device)
        return JoinedRowsView(slots, mask)


class JoinedSteps:
    """The memories of the requests of one step of continuous batching, which share a row of text.

    Args:
        sources: of each request; None where it has none.
        name: of the adapter that reads them.
    """

    follows_text = False

    def __init__(self, sources: Sequence[JoinedProjectedMemory | None], name: str) -> None:
        self.sources, self.name = sources, name
        self.rows: int | None = len(sources)

    def step(self, text: TextState) -> JoinedRowsView:
        """What this forward sees: each request its own slots.

        Raises:
            ShapeError: the text is not that of the requests.
        """
        text.check_rows(self.rows, self.name)
        assert text.packed is not None, "transformers says where the requests of a step begin"
        given = [(number, one) for number, one in enumerate(self.sources) if one is not None]
        adapter = given[0][1].adapter
        layers = adapter.layers if text.layer is None else (text.layer,)
        slots, owner = {}, text.packed.numbers.new_zeros(0)
        for layer in layers:
            parts = [one.prepared.project(adapter, layer, one.prepared.read(adapter), 1) for _, one in given]
            slots[layer] = torch.cat([one.keys for one in parts], 2), torch.cat([one.values for one in parts], 2)
            owners = [
                torch.where(real_slots(part)[0], number, -2) for (number, _), part in zip(given, parts, strict=True)
            ]
            owner = torch.cat(owners).to(text.packed.numbers.device)
        mask = text.packed.numbers[:, :, None] == owner
        return JoinedRowsView(slots, mask[:, None], packed=True)

    def as_memory(self, text: TextState) -> Memory:
        """There is no one memory of several requests.

        Raises:
            ConditionError: always.
        """
        raise ConditionError("a step of continuous batching has several memories: examine one request with a call")


def real_slots(slots: KeyValue) -> Tensor:
    """Which slots (b, m) are real."""
    if slots.mask is not None:
        return slots.mask
    return torch.ones(slots.batch, slots.slots, dtype=torch.bool, device=slots.keys.device)
