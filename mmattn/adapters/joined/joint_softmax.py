"""A memory as keys and values that are joined with those of a host's own attention, and where its tokens then stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.joined.host_attention import HostAttention
from mmattn.adapters.protocols import BoundMemory, JoinRequests, KeepFinite, View, check_one_row
from mmattn.adapters.text_state import TextState
from mmattn.errors import ConditionError
from mmattn.memory import Memory


@dataclass(frozen=True, eq=False)
class JoinedSlots:
    """Keys and values of a memory for the attention layers of a host.

    Args:
        keys: by host layer (b, g, m, k), turned to the positions of their slots where the host turns keys.
        values: by host layer (b, g, m, v).
        mask: (b, m) bool, which slots are real.
        positions: (b, m), of the slots in the text of the host.
        offsets: (b,), at which position the text of each row begins.
    """

    keys: Mapping[int, Tensor]
    values: Mapping[int, Tensor]
    mask: Tensor
    positions: Tensor
    offsets: Tensor
    _repeated: dict[int, JoinedSlots] = field(default_factory=dict, init=False, repr=False)

    @property
    def batch(self) -> int:
        """Number of rows b."""
        return len(self.mask)

    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(one.nbytes for part in (self.keys, self.values) for one in part.values())

    def repeated(self, times: int) -> JoinedSlots:
        """Each row several times, one after the other, for the beams of a text; put together once without gradients."""
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
        rows = (one.repeat_interleave(times, 0) for one in (self.mask, self.positions, self.offsets))
        return JoinedSlots(keys, values, *rows)


def check_text(text: TextState, memory: BoundMemory) -> None:
    """Check that the slots of a memory can stand before the text of a forward.

    Raises:
        ShapeError: the rows of the text are not those of the memory.
        ConditionError: only a part of the host was called, or rows are packed.
    """
    if text.packed is not None:
        raise ConditionError(
            f"the memory of adapter {memory.name!r} stands before a text, and packed rows hold several texts: give "
            "each document a row of its own (pad instead of packing)"
        )
    memory.check_rows(text)
    if text.inputs is None:
        raise ConditionError(
            f"the memory of adapter {memory.name!r} stands before the text, whose positions it moves, and only a part "
            "of the host was called: call the object that was given to attach"
        )


class JoinedMemory(BoundMemory):
    """Joined slots bound to the adapter that reads them.

    Args:
        slots: a row for each row of text.
        name: of the adapter.
        shared: the object that the slots are of.
    """

    # The text is told where it stands: a part of a host that is called by itself is not.
    follows_text = True

    def __init__(self, slots: JoinedSlots, name: str, shared: object = None) -> None:
        self._slots, self.name, self.shared = slots, name, shared
        self.rows = slots.batch

    @property
    def slots(self) -> JoinedSlots:
        """A row for each row of text."""
        return self._slots

    def step(self, text: TextState) -> JoinedView:
        """Return what this forward attends to.

        Raises:
            ShapeError: the rows of the text are not those of the memory.
            ConditionError: only a part of the host was called, or rows are packed.
        """
        check_text(text, self)
        return JoinedView(self.slots.repeated(text.rows // max(self.rows or 1, 1)))

    def shareable(self) -> object:
        """Return the object that the slots are of."""
        return self.shared

    def for_request(self) -> BoundMemory:
        """Return this memory, which must be of one row.

        Raises:
            ShapeError: it has several rows.
        """
        check_one_row(self)
        return self

    def together(self, requests: Sequence[BoundMemory | None], join: JoinRequests, keep: KeepFinite) -> BoundMemory:
        """Return the memories of all requests in one step of continuous batching."""
        return JoinedRequests([one.slots if isinstance(one, JoinedMemory) else None for one in requests], self.name)

    def projected(self) -> list[Tensor]:
        """Return keys and values of every layer."""
        return [*self.slots.keys.values(), *self.slots.values.values()]

    def as_memory(self, text: TextState) -> Memory:
        """Raise ConditionError: keys and values differ by layer."""
        raise ConditionError(
            f"adapter {self.name!r} puts keys and values that differ by layer before the text, which are no Memory: "
            "compare calls with other passages or prefixes, or without"
        )


class JoinedView(View):
    """Joined slots in one forward.

    Args:
        slots: a row for each row of text.
        visible: (b, l, m) bool, which slots each token sees; None for all.
    """

    stands_in_text = True

    def __init__(self, slots: JoinedSlots, visible: Tensor | None = None) -> None:
        self.slots, self.visible = slots, visible
        some, every = slots.mask.any(1), slots.mask.all()
        self.sees = None if bool(some.all()) else some[:, None]
        self.mask = None if bool(every) else slots.mask[:, None, None]
        if visible is not None:
            self.mask = (slots.mask[:, None] & visible)[:, None]
        self.positions: Tensor | None = None
        self.moves_text = bool(slots.offsets.any())

    def shift_positions(self, positions: Tensor) -> Tensor:
        """Positions of the tokens of this forward, after the slots.

        Args:
            positions: (b or 1, l), or several of them (n, b or 1, l), of the text by itself.
        """
        shifted = positions + self.slots.offsets.to(positions.device)[:, None]
        self.positions = shifted if shifted.dim() == 2 else shifted[0]
        return shifted

    def apply(self, x: HostAttention, block: nn.Module, layer: int, adapter_scale: Any) -> HostAttention:
        """The attention of a layer with the slots joined to it; a token sees back as far as its layer does."""
        key, value = self.slots.keys[layer], self.slots.values[layer]
        mask, sees = self.mask, self.sees
        if x.window is not None:
            assert self.positions is not None
            distance = self.positions[:, :, None] - self.slots.positions.to(self.positions.device)[:, None]
            near = (distance < x.window)[:, None]
            mask = near if mask is None else mask.to(near.device) & near
        where = x.key.device
        joined: HostAttention = block(
            x,
            key.to(where),
            value.to(where),
            attention_mask=None if mask is None else mask.to(where),
            sees=None if sees is None else sees.to(where),
            adapter_scale=adapter_scale,
        )
        return joined


class NothingBefore(View):
    """A forward whose memory has no slot."""

    moves_text = False
    stands_in_text = True

    def shift_positions(self, positions: Tensor) -> Tensor:
        """Positions of the tokens of this forward."""
        return positions

    def apply(self, x: HostAttention, block: nn.Module, layer: int, adapter_scale: Any) -> HostAttention:
        """The attention as it is."""
        return x


class JoinedRequests(BoundMemory):
    """Joined slots of the requests of one step of continuous batching, which share a row of text.

    Args:
        slots: of each request, of one row; None where it has none.
        name: of the adapter that reads them.
    """

    follows_text = True

    def __init__(self, slots: Sequence[JoinedSlots | None], name: str) -> None:
        self.slots, self.name = slots, name
        self.rows = len(slots)

    def step(self, text: TextState) -> JoinedRequestsView:
        """What this forward sees.

        Raises:
            ShapeError: the text is not that of the requests.
        """
        self.check_rows(text)
        assert text.packed is not None, "transformers says where the requests of a step begin"
        return JoinedRequestsView(self.slots, text.packed.numbers)


class JoinedRequestsView(View):
    """Joined slots of several requests in one forward.

    Args:
        slots: of each request, of one row; None where it has none.
        numbers: (1, l), the request of each token; -1 is none.
    """

    stands_in_text = True

    def __init__(self, slots: Sequence[JoinedSlots | None], numbers: Tensor) -> None:
        given = [(number, one) for number, one in enumerate(slots) if one is not None]
        self.is_packed = True
        self.given, self.numbers = [one for _, one in given], numbers
        self.owner = torch.cat([torch.full((one.mask.shape[1],), number) for number, one in given]).to(numbers.device)
        self.places = torch.cat([one.positions[0] for one in self.given]).to(numbers.device)
        offsets = torch.tensor([0 if one is None else int(one.offsets) for one in slots], device=numbers.device)
        self.offsets = offsets[numbers.clamp(min=0)].masked_fill(numbers < 0, 0)
        self.moves_text = bool(offsets.any())
        self.sees = torch.isin(numbers, self.owner)
        self.positions = numbers

    def shift_positions(self, positions: Tensor) -> Tensor:
        """Positions of the tokens of this forward, after the slots of their requests.

        Args:
            positions: (1, l).
        """
        self.positions = positions + self.offsets.to(positions.device)
        return self.positions

    def apply(self, x: HostAttention, block: nn.Module, layer: int, adapter_scale: Any) -> HostAttention:
        """The attention of a layer with the slots joined to it; a token sees those of its request."""
        mask = self.numbers[:, :, None] == self.owner
        if x.window is not None:
            mask = mask & (self.positions[:, :, None] - self.places < x.window)
        key, value = (
            torch.cat([part[layer] for part in parts], 2)
            for parts in ([one.keys for one in self.given], [one.values for one in self.given])
        )
        where = x.key.device
        joined: HostAttention = block(
            x,
            key.to(where),
            value.to(where),
            attention_mask=mask[:, None].to(where),
            sees=self.sees.to(where),
            adapter_scale=adapter_scale,
        )
        return joined


class Capture(BoundMemory, View):
    """Records the keys and values of a text at the layers of a host, as the memory of one call.

    Args:
        joined: what the text sees besides; None is nothing.

    Attributes:
        keys: by layer (b, g, l, k), as the host's attention was given them.
        values: by layer (b, g, l, v).
        windows: by layer, how far back a token sees; None is to the first.
    """

    stands_in_text = True

    follows_text = True
    moves_text = True

    def __init__(self, joined: JoinedView | None = None) -> None:
        self.name, self.shared, self.view = "", self, joined
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.windows: dict[int, int | None] = {}

    def step(self, text: TextState) -> Capture:
        """Itself: one forward is recorded."""
        return self

    def shift_positions(self, positions: Tensor) -> Tensor:
        """Positions of the tokens of this forward."""
        return positions if self.view is None else self.view.shift_positions(positions)

    def apply(self, x: HostAttention, block: nn.Module, layer: int, adapter_scale: Any) -> HostAttention:
        """The attention as it is, of which keys and values are captured, with what is joined to it."""
        self.keys[layer], self.values[layer], self.windows[layer] = x.key, x.value, x.window
        return x if self.view is None else self.view.apply(x, block, layer, adapter_scale)
