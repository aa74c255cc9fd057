"""Protocols between adapters, memories and hosts, so that a new kind is one file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmattn.adapters.text_state import PackedText, TextState
from mmattn.core.key_values import KeyValue
from mmattn.core.projection import AttendableMemory
from mmattn.errors import ConditionError, ShapeError
from mmattn.memory import Memory

POSITIONS = ("before", "after", "inside", "joined")

#: Multiplies what an adapter adds: one number, or one for each row.
Scale = float | Tensor


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of one attention layer of a host."""

    num_heads: int  # h
    num_kv_heads: int  # g
    head_dim: int  # k
    value_dim: int | None = None  # v, the width of a value; k by default

    def heads(self) -> dict[str, Any]:
        """Return the arguments of a `KeyValueProjection` of these sizes."""
        return {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}


@dataclass(frozen=True)
class Site:
    """A place in a host at which an adapter may act.

    Args:
        layer: number of the host's layer, counted from 0; an encoder's layers follow those of the decoder.
        position: "before" or "after" the layer, on its hidden states (b, l, d); "inside" an attention layer, on its
            queries (b, h, l, k); "joined" with the keys and values of an attention layer, a `HostAttention`.
        module: dotted name of the layer in the host.
        width: d of the hidden states; "inside", the input width of the host's key and value projections.
        device: device of the hidden states, and so of the adapter's block.
        heads: "inside" and "joined", the sizes of the host's attention.
        part: "encoder" or "decoder" in a host with both; "stream" for layers with text and picture in one stream, in a
            host that also has layers with separate ones.
    """

    layer: int
    position: str
    module: str
    width: int
    device: torch.device
    heads: HeadSizes | None = None
    part: str | None = None

    @property
    def sizes(self) -> HeadSizes:
        """Sizes of the attention of a site that is "inside" or "joined"."""
        assert self.heads is not None
        return self.heads


@dataclass(frozen=True)
class Traits:
    """Traits of an adapter, read by hosts and the contract tests.

    Args:
        starts_as_identity: a new adapter leaves the output of the host unchanged, bit for bit.
        order_matters: the order of the slots changes the result.
        duplicates_matter: repeating a slot changes the result.
        moves_text: slots precede the text and shift its positions.
        reads_whole_text: the memory depends on the whole text, so `generate` records it.
        adds_to_block: "inside" attention, the result is added to the output of the block around the attention.
    """

    starts_as_identity: bool = True
    order_matters: bool = False
    duplicates_matter: bool = False
    moves_text: bool = False
    reads_whole_text: bool = False
    adds_to_block: bool = False


class Host(Protocol):
    """The members of an adapted model that an adapter's settings may use."""

    def sites(self, position: str) -> list[Site]:
        """Return every site of this position, in the order of the layers."""


class View(ABC):
    """The memory as the tokens of one forward attend to it.

    Attributes:
        stands_in_text: its slots have positions in the text; it has `shift_positions` and `moves_text`.
    """

    stands_in_text = False

    @abstractmethod
    def apply(self, x: Any, block: nn.Module, layer: int, adapter_scale: Scale) -> Any:
        """Apply an adapter at a site.

        Args:
            x: hidden states (b, l, d), returned changed; "inside" an attention layer its queries (b, h, l, k), and the
                result is added to the output of the host's heads; "joined" a `HostAttention`, returned with more keys
                and values.
            block: the adapter's block at this layer.
            layer: number of the host's layer.
            adapter_scale: factor of the added output.
        """

    def pack(self, text: PackedText) -> View:
        """Return the view for packed rows, whose documents are the rows of this; itself if it is for packed rows."""
        return PackedView(self, text)


class PackedView(View):
    """The memory as parts of flattened rows attend to it: documents of packed rows, or chunks of texts."""

    def __init__(self, view: View, text: PackedText) -> None:
        self.view, self.text = view, text

    def apply(self, x: Tensor, block: nn.Module, layer: int, adapter_scale: Scale) -> Tensor:
        return (
            x
            if not self.text.documents
            else self.text.pack(self.view.apply(self.text.unpack(x), block, layer, adapter_scale), x)
        )


#: Put keys and values of several requests together, by the name of the adapter and the layer.
JoinRequests = Callable[[tuple[str, int], list[KeyValue]], KeyValue | AttendableMemory]
#: From hidden states and their changed values, take the changed ones that are finite.
KeepFinite = Callable[[Tensor, Tensor], Tensor]


class BoundMemory(ABC):
    """The memory of one call, bound to its adapter; the result of `AdapterLayers.bind`.

    Unsupported methods raise ConditionError, like the defaults here.

    Attributes:
        name: of the adapter.
        rows: rows of the memory; None fits any text.
        follows_text: `step` needs the text; if False, the host may be called in part or compiled.
        shared: the object that other adapters of the call receive instead of the memory.
        unchecked: the memory if its values need not be finite, else None.
    """

    name: str
    rows: int | None = None
    follows_text: bool = False
    shared: object = None
    unchecked: Memory | None = None

    @abstractmethod
    def step(self, text: TextState) -> View:
        """Return what this forward attends to; called once for each forward of the host.

        Raises:
            ShapeError: the rows do not fit.
            ConditionError: the text does not have the required information.
        """

    def first_keys(self, text: TextState, positions: Tensor) -> Mapping[int, tuple[Tensor, Tensor]] | None:
        """Return keys (b, g, m, k) and values of the first m tokens, at their positions (b, l), by layer of the host.

        The host does not read these tokens then; None if it reads all.
        """
        return None

    def as_memory(self, text: TextState) -> Memory:
        """Return everything that a whole text attends to as one `Memory`, for experiments with other contents."""
        raise ConditionError(f"adapter {self.name!r} reads no Memory whose contents could be exchanged")

    def shareable(self) -> object:
        """Return the object that `model.prepare` hands out for many calls."""
        raise ConditionError(
            f"the memory of adapter {self.name!r} belongs to one call: give it to each call as memory="
        )

    def hide_arrivals(self) -> None:
        """Make `step` read `text.arrivals`, for a call with `arrived=`."""
        raise ConditionError(
            f"arrived= hides slots of a Memory, and adapter {self.name!r} does not read its slots one by one: leave "
            "it out"
        )

    def for_request(self) -> BoundMemory | None:
        """Return the memory for a request of continuous batching, or None if it has no slots."""
        raise ConditionError(
            f"adapter {self.name!r} must know the text of each request to choose what it attends to, and continuous "
            "batching does not tell it: use generate"
        )

    def hide_from(self, tokens: int) -> None:
        """Hide the memory of a request from its first tokens."""
        raise ConditionError(
            f"adapter {self.name!r} cannot hide the memory of a request from its first tokens: leave visible_from= out"
        )

    def together(self, requests: Sequence[BoundMemory | None], join: JoinRequests, keep: KeepFinite) -> BoundMemory:
        """Combine this memory with the memories of the other requests in the step."""
        raise ConditionError(f"adapter {self.name!r} takes no part in continuous batching: use generate")

    def sources(self) -> list[Tensor]:
        """Return the tensors of the memory, to notice an edit."""
        return []

    def projected(self) -> list[Tensor]:
        """Return keys, values and biases that were not checked to be finite."""
        return []

    def prepare_graph(self) -> None:  # noqa: B027
        """Compute the inputs of a compiled host, outside of its graph."""

    def check_graph(self) -> None:  # noqa: B027
        """Raise ConditionError if weights or memory were edited since `prepare_graph`, too late for a compiled host."""

    def check_rows(self, text: TextState) -> None:
        """Raise ShapeError unless rows of text are rows of memory, or inside `generate` the beams of them."""
        rows, ours = text.rows, self.rows
        if ours is None or rows == ours or any(rows == times * ours for times in text.expansions):
            return
        hint = f"; to use one memory for all rows, give memory[[0] * {rows}]" if ours == 1 else ""
        if text.packed is not None:
            raise ShapeError(
                f"the packed rows hold {rows} documents and the memory of adapter {self.name!r} has {ours} rows: give "
                f"one row of memory for each document, in order{hint.replace('all rows', 'all of them')}"
            )
        if text.expansions and rows < ours:
            raise ShapeError(
                f"generate goes on with {rows} rows and the memory of adapter {self.name!r} has {ours}: which are left "
                "is not known; generate one row at a time"
            )
        raise ShapeError(
            f"the text has {rows} rows and the memory of adapter {self.name!r} has {ours}: give one row of memory for "
            f"each row of text{hint}"
        )


def check_one_row(memory: BoundMemory) -> None:
    """Check that the memory of a request has one row."""
    if memory.rows != 1:
        raise ShapeError(f"a request has one row of memory, got {memory.rows}: add a request for each row")
