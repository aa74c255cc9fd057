"""Slots as keys and values in a host's own attention: of rows of text, of packed documents, of requests.

Slots may stand in the text, at positions before it, which then begins after them; or have no position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.joined.host_attention import HostAttention
from mmattn.adapters.joined.rotation import Rotations
from mmattn.adapters.protocols import BoundMemory, JoinRequests, KeepFinite, Scale, Traits, View, check_one_row
from mmattn.adapters.text_state import PackedText, TextState
from mmattn.core.key_values import KeyValue
from mmattn.core.tracing import may_read
from mmattn.errors import ConditionError
from mmattn.memory import Memory


@dataclass(frozen=True, eq=False)
class JoinedSlots:
    """Keys and values of a memory for the attention layers of a host."""

    # by host layer (b, g, m, k), turned to the positions of their slots if the host turns keys
    keys: Mapping[int, Tensor]
    values: Mapping[int, Tensor]  # by host layer (b, g, m, v)
    mask: Tensor  # (b, m) bool, which slots are real
    positions: Tensor | None = None  # (b, m), of the slots in the text; None for slots without positions
    # (b,) or for each token (b, l), what is added to the positions of the text, for rows with real slots; None for
    # nothing
    offsets: Tensor | None = None
    lengths: Sequence[int] | None = None  # number of real slots of each row; None if only a device knows the mask
    _repeated: dict[int, JoinedSlots] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.lengths is None and may_read(self.mask):
            object.__setattr__(self, "lengths", self.mask.sum(1).tolist())

    @property
    def batch(self) -> int:
        """Number of rows b."""
        return len(self.mask)

    def tensors(self) -> list[Tensor]:
        """Return keys and values of every layer."""
        return [*self.keys.values(), *self.values.values()]

    def nbytes(self) -> int:
        """Return the bytes of keys and values."""
        return sum(one.nbytes for one in self.tensors())

    def repeated(self, times: int) -> JoinedSlots:
        """Return each row several times, for the beams of a text; computed once without gradients."""
        if times == 1:
            return self
        if torch.is_grad_enabled():
            return self._repeat(times)
        if times not in self._repeated:
            with torch.inference_mode(False), torch.no_grad():
                self._repeated[times] = self._repeat(times)
        return self._repeated[times]

    def _repeat(self, times: int) -> JoinedSlots:
        keys, values = (
            {layer: one.repeat_interleave(times, 0) for layer, one in part.items()} for part in (self.keys, self.values)
        )
        positions, offsets = (
            None if one is None else one.repeat_interleave(times, 0) for one in (self.positions, self.offsets)
        )
        lengths = None if self.lengths is None else [one for one in self.lengths for _ in range(times)]
        return JoinedSlots(keys, values, self.mask.repeat_interleave(times, 0), positions, offsets, lengths)


class JoinedView(View):
    """Slots in the attention of one forward.

    Args:
        slots: their keys and values.
        visible: (b or 1, l, m) which of them each token attends to; None for all that are real.
        is_packed: they are those of packed rows.
    """

    def __init__(self, slots: JoinedSlots, visible: Tensor | None = None, is_packed: bool = False) -> None:
        self.slots, self._is_packed = slots, is_packed
        self.stands_in_text = slots.positions is not None
        lengths, all_slots = slots.lengths, slots.mask.shape[1]
        self.is_empty = not all_slots or (lengths is not None and not any(lengths))
        self.moves_text = slots.offsets is not None and not self.is_empty
        self.visible = slots.mask[:, None] if visible is None else slots.mask[:, None].to(visible.device) & visible
        # If all tokens attend to all slots, there is no mask to widen; if all to some, the text alone is not needed.
        # What only a device knows is not asked, which would wait for it.
        if visible is None and lengths is not None:
            self.hides, all_see = any(one < all_slots for one in lengths), all(lengths)
        elif may_read(self.visible):
            sees = self.visible.any(-1)
            self.is_empty = self.is_empty or not bool(sees.any())
            self.hides, all_see = not bool(self.visible.all()), bool(sees.all())
        else:
            self.hides, all_see = True, False
        self.sees = None if all_see or self.is_empty else self.visible.any(-1)
        self.positions: Tensor | None = None
        self._masks: dict[tuple[torch.device, int | None], Tensor | None] = {}

    def shift_positions(self, positions: Tensor) -> Tensor:
        """Return positions (b or 1, l) or (n, b or 1, l) of the tokens of this forward, after the slots."""
        offsets = self.slots.offsets
        if offsets is not None:
            positions = positions + offsets.to(positions.device).reshape(len(offsets), -1)
        self.positions = positions if positions.dim() == 2 else positions[0]
        return positions

    def pack(self, text: PackedText) -> JoinedView:
        if self._is_packed:
            return self
        documents, _, m = self.visible.shape
        keys, values = (
            {layer: one.transpose(0, 1).flatten(1, 2)[None] for layer, one in part.items()}
            for part in (self.slots.keys, self.slots.values)
        )
        numbers = text.numbers.to(self.visible.device)
        blank = torch.zeros(*numbers.shape, m, dtype=torch.bool, device=numbers.device)
        visible = text.pack(self.visible.expand(documents, text.longest, m), blank)
        owned = numbers[..., None] == torch.arange(documents, device=numbers.device)
        every = torch.ones(1, documents * m, dtype=torch.bool, device=numbers.device)
        own = (owned[..., None] & visible[:, :, None]).flatten(2)
        return JoinedView(JoinedSlots(keys, values, every, lengths=[documents * m]), own, is_packed=True)

    def apply(self, x: HostAttention, block: nn.Module, layer: int, adapter_scale: Scale) -> HostAttention:
        """Return the attention of a layer with the slots; a token attends back as far as its layer does."""
        if self.is_empty:
            return x
        where = x.key.device
        window = x.window if self.stands_in_text else None
        if (where, window) not in self._masks:
            self._masks[where, window] = self._mask(where, window)
        return block(
            x,
            self.slots.keys[layer].to(where),
            self.slots.values[layer].to(where),
            attention_mask=self._masks[where, window],
            sees=None if self.sees is None else self.sees.to(where),
            adapter_scale=adapter_scale,
        )

    def _mask(self, where: torch.device, window: int | None) -> Tensor | None:
        """Return the slots that tokens attend to in layers on a device with this window, (b, 1, 1 or l, m) or None."""
        visible = self.visible
        if window is not None:
            assert self.positions is not None and self.slots.positions is not None
            distance = self.positions[:, :, None] - self.slots.positions.to(self.positions.device)[:, None]
            visible = visible.to(distance.device) & (distance < window)
        elif not self.hides:
            return None
        return visible[:, None].to(where)


class BeforeTextLayers(AdapterLayers):
    """Base of adapters whose slots stand before the text in the attention of every layer, and move its positions."""

    traits = Traits(order_matters=True, duplicates_matter=True, moves_text=True)
    #: How each layer rotates keys to other positions; None if it cannot. Set by `attach_to`.
    rotations: Rotations = None

    def attention(self, layer: int) -> nn.Module:
        return self.block(layer)

    def attach_to(self, host: Any) -> None:
        self.rotations = host.probe_before_text(self.sites)


class JoinedMemory(BoundMemory):
    """Slots before the text of a call, bound to the adapter that reads them.

    Args:
        name: of the adapter.
        rows: of the memory.
        slots: returns the slots for a text, or with None as they are now.
        shared: what other adapters of the call are given in place of the memory.
    """

    # A part of a host that is called by itself does not tell the positions of its tokens.
    follows_text = True

    def __init__(
        self, name: str, rows: int, slots: Callable[[TextState | None], JoinedSlots], shared: object = None
    ) -> None:
        self.name, self.rows, self.slots, self.shared = name, rows, slots, shared

    def step(self, text: TextState) -> JoinedView:
        if text.packed is not None:
            raise ConditionError(
                f"the memory of adapter {self.name!r} stands before a text, and packed rows hold several texts: give "
                "each document a row of its own (pad instead of packing)"
            )
        self.check_rows(text)
        if text.inputs is None:
            raise ConditionError(
                f"the memory of adapter {self.name!r} stands before the text, whose positions it moves, and only a "
                "part of the host was called: call the object that was given to attach"
            )
        return JoinedView(self.slots(text).repeated(text.rows // max(self.rows or 1, 1)))

    def shareable(self) -> object:
        return self.shared

    def for_request(self) -> JoinedMemory | None:
        check_one_row(self)
        return self

    def together(self, requests: Sequence[BoundMemory | None], join: JoinRequests, keep: KeepFinite) -> BoundMemory:
        slots = {n: partial(one.slots, None) for n, one in enumerate(requests) if isinstance(one, JoinedMemory)}
        return JoinedRequests(self.name, len(requests), slots)

    def projected(self) -> list[Tensor]:
        return self.slots(None).tensors()

    def as_memory(self, text: TextState) -> Memory:
        raise ConditionError(
            f"adapter {self.name!r} puts keys and values that differ by layer before the text, which are no Memory: "
            "compare calls with other passages or prefixes, or without"
        )


class JoinedRequests(BoundMemory):
    """The slots of the requests in one step of continuous batching, which share one packed row.

    Args:
        name: of the adapter.
        rows: number of requests.
        slots: by number of a request with a memory, what returns its slots.
    """

    follows_text = True

    def __init__(self, name: str, rows: int, slots: Mapping[int, Callable[[], JoinedSlots]]) -> None:
        self.name, self.rows, self._slots = name, rows, slots

    def step(self, text: TextState) -> JoinedView:
        self.check_rows(text)
        assert text.packed is not None, "transformers says where the requests of a step begin"
        numbers = text.packed.numbers
        slots = {number: compute() for number, compute in self._slots.items()}
        owner = torch.cat([torch.full((one.mask.shape[1],), number) for number, one in slots.items()])
        visible = numbers[:, :, None] == owner.to(numbers.device)
        return JoinedView(_in_one_row(slots, numbers), visible, is_packed=True)


class Capture(BoundMemory, View):
    """Records the keys and values of a text at the layers of a host, given as the memory of one call.

    Attributes:
        keys: by layer (b, g, l, k), as the host's attention was given them.
        values: by layer (b, g, l, v).
        windows: by layer, how far back a token attends; None for the whole text.
    """

    follows_text = stands_in_text = moves_text = True

    def __init__(self, view: JoinedView | None = None) -> None:
        self.name, self.shared, self.view = "", self, view
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.windows: dict[int, int | None] = {}

    def step(self, text: TextState) -> Capture:
        return self

    def shift_positions(self, positions: Tensor) -> Tensor:
        """Return the positions of the tokens of this forward."""
        return positions if self.view is None else self.view.shift_positions(positions)

    def apply(self, x: HostAttention, block: nn.Module, layer: int, adapter_scale: Scale) -> HostAttention:
        self.keys[layer], self.values[layer], self.windows[layer] = x.key, x.value, x.window
        return x if self.view is None else self.view.apply(x, block, layer, adapter_scale)


def _in_one_row(slots: Mapping[int, JoinedSlots], numbers: Tensor) -> JoinedSlots:
    """Return the slots of requests, one row each, as one row for tokens (1, l) of the requests `numbers`."""
    parts = list(slots.values())
    keys, values = (
        {layer: torch.cat([getattr(one, part)[layer] for one in parts], 2) for layer in parts[0].keys}
        for part in ("keys", "values")
    )
    mask = torch.cat([one.mask for one in parts], 1).to(numbers.device)
    counts = [one.lengths[0] for one in parts if one.lengths is not None]
    lengths = [sum(counts)] if len(counts) == len(parts) else None
    positions = [one.positions for one in parts if one.positions is not None]
    if not positions:
        return JoinedSlots(keys, values, mask, lengths=lengths)
    offsets = torch.zeros_like(numbers)
    for number, one in slots.items():
        if one.offsets is not None:
            offsets = torch.where(numbers == number, one.offsets.to(numbers.device), offsets)
    return JoinedSlots(keys, values, mask, torch.cat(positions, 1).to(numbers.device), offsets, lengths)


def slots_of(projected: Mapping[int, KeyValue]) -> JoinedSlots:
    """Return projected keys and values by layer as slots without positions."""
    first = next(iter(projected.values()))
    mask, lengths = first.mask, None
    if mask is None:
        mask = torch.ones(first.batch, first.slots, dtype=torch.bool, device=first.keys.device)
        lengths = [first.slots] * first.batch
    keys, values = ({layer: getattr(one, part) for layer, one in projected.items()} for part in ("keys", "values"))
    return JoinedSlots(keys, values, mask, lengths=lengths)
