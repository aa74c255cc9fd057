"""What belongs to one call: the memory it was given, and what was made of that memory.

The call lives in a context variable, not on a module: threads, nested blocks and exceptions each see their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmattn.adapters.base import AdapterLayers
from mmattn.core.kv import KeyValue
from mmattn.core.tensor_cache import TensorCache
from mmattn.errors import ConditionError, ShapeError
from mmattn.memory import Memory

if TYPE_CHECKING:
    from mmattn.hosts.augmenting import AugmentingModel, Reading
    from mmattn.hosts.causal_lm.text_state import Noted
    from mmattn.hosts.neighbours import Blocks, Neighbours

# Kept keys and values decode faster at every size measured, but the memory itself is held once for all layers: above
# this many bytes of K and V per adapter it is kept instead.
ABSORB_ABOVE = 1 << 30
# Queries per memory row from which an absorbed memory is projected for the occasion.
ABSORB_BELOW = 32


@dataclass(frozen=True)
class Kept:
    """What an adapter made of a memory: by host layer, and under None the memory as it reads it."""

    adapter: weakref.ref[AdapterLayers]
    autocast: bool
    made: TensorCache = field(default_factory=TensorCache)


class Prepared:
    """A memory and what the adapters of one host made of it, used by many calls.

    Keys and values are made at their first use, kept only while no gradients are needed, and made again when the memory
    or a weight was changed.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._kept: dict[str, Kept] = {}

    @property
    def batch(self) -> int:
        """Number of rows b."""
        return self.memory.batch

    def look(self, name: str, adapter: AdapterLayers, layer: int, queries: int) -> tuple[Memory, KeyValue | None]:
        """The memory as an adapter reads it, and where they are kept its keys and values for the block at a host layer.

        Args:
            queries: how many look at each row of the memory.
        """
        if self._passing(adapter):
            return adapter.read(self.memory), None
        kept = self._kept_by(name, adapter).made
        memory: Memory = kept.get(
            None, [*self.memory.tensors(), *adapter.reading_parameters()], lambda: adapter.read(self.memory)
        )
        attention = adapter.attention(layer)
        size = 2 * memory.batch * memory.length * attention.num_kv_heads * attention.head_dim * len(adapter.layers)
        absorb = attention.absorbable and size * memory.tokens.element_size() > ABSORB_ABOVE
        if absorb and queries > ABSORB_BELOW:
            return memory, None
        scores = memory.scores if adapter.score_bias else None
        # Absorbed, every layer reads the same tensor: made once.
        shared = absorb and scores is None
        made: KeyValue = kept.get(
            -1 if shared else layer,
            [memory.tokens, *(() if shared else attention.projecting_parameters())],
            lambda: attention.project(memory.tokens, mask=memory.mask, scores=scores, absorb=absorb),
        )
        return memory, made

    def _passing(self, adapter: AdapterLayers) -> bool:
        """Nothing is kept while gradients are needed, nor inside a graph being traced."""
        if torch.compiler.is_compiling():
            return True
        return torch.is_grad_enabled() and (
            self.memory.tokens.requires_grad or any(parameter.requires_grad for parameter in adapter.parameters())
        )

    def _kept_by(self, name: str, adapter: AdapterLayers) -> Kept:
        autocast = torch.is_autocast_enabled(adapter.weight.device.type)
        kept = self._kept.get(name)
        # Another host may have an adapter of this name.
        if kept is None or kept.adapter() is not adapter or kept.autocast != autocast:
            kept = self._kept[name] = Kept(weakref.ref(adapter), autocast)
        return kept

    def nbytes(self) -> int:
        """Bytes of kept keys and values."""
        return sum(kept.made.nbytes() for kept in self._kept.values())


@dataclass
class Call:
    """The memories of one call or block, by adapter, and what the current piece of text may see.

    Args:
        memories: for each active adapter a prepared memory, the neighbours of chunks, or a model that reads along.
        images: (b, l) how many images began at or before each token, where the caller says so.
        strength: multiplies what the adapters add.
        expands: rows of text may be a multiple of the rows of memory (beams, inside `generate`).
        probe: (place, host layer) -> row instead of a memory: disturb that row there.
        prompt: (b, l) ids or (b, l, d) embeddings that `generate` began with. next_noted: what the host gets next.
        readings: by adapter what a model that reads along has read.
    """

    memories: Mapping[str, Prepared | Neighbours | AugmentingModel]
    images: Tensor | None = None
    strength: float = 1.0
    expands: bool = False
    probe: Mapping[tuple[str, int], int] | None = None
    prompt_images: dict[int | None, Tensor] = field(default_factory=dict)
    prompt: Tensor | None = None
    next_noted: Noted | None = None
    readings: dict[str, Reading] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """The tokens of one forward of the host: their ids, how many tokens went before, and what each adapter reads there.

    Args:
        parts: by adapter, which tokens read which neighbours, or what a model that reads along has read.
    """

    input_ids: Tensor | None
    past: int | None
    parts: Mapping[str, Blocks | Reading] = field(default_factory=dict)


# One variable for all hosts: entries (key of the host's handle, call), the last one of a host counts.
_calls: ContextVar[tuple[tuple[object, Call | None], ...]] = ContextVar("mmattn_calls", default=())
_piece: ContextVar[Piece | None] = ContextVar("mmattn_piece", default=None)


def reading(piece: Piece | None) -> None:
    """Note which piece of the text the host is about to read; None when it has."""
    if piece is not None or _piece.get() is not None:
        _piece.set(piece)


def part_of_piece(name: str) -> Any:
    """What an adapter reads at the tokens that the host is reading, as noted.

    Raises:
        ConditionError: the layers of the host were called without the host.
    """
    piece = _piece.get()
    if piece is None or name not in piece.parts:
        raise ConditionError(
            f"adapter {name!r} must see the whole text, and only a part of the host was called: "
            "call the object that was given to attach"
        )
    return piece.parts[name]


@contextmanager
def entered(key: object, call: Call | None) -> Iterator[None]:
    """Make `call` the current one of a host inside the block."""
    token = _calls.set((*_calls.get(), (key, call)))
    try:
        yield
    finally:
        _calls.reset(token)


_off: ContextVar[tuple[tuple[object, frozenset[str]], ...]] = ContextVar("mmattn_off", default=())


@contextmanager
def without(key: object, names: Iterable[str]) -> Iterator[None]:
    """Inside the block these adapters of a host do not exist, whatever memory a call gives."""
    token = _off.set((*_off.get(), (key, frozenset(names))))
    try:
        yield
    finally:
        _off.reset(token)


def is_off(key: object, name: str) -> bool:
    """Whether a block around this call has switched the adapter off."""
    return any(owner is key and name in names for owner, names in _off.get())


def current(key: object) -> tuple[bool, Call | None]:
    """Whether any call of this host is under way here, and the innermost one."""
    for owner, call in reversed(_calls.get()):
        if owner is key:
            return True, call
    return False, None


def check_rows(rows: int, call: Call, name: str, prepared: Prepared | Neighbours | AugmentingModel) -> None:
    """Rows of text must be rows of memory, or inside `generate` a multiple of them.

    Raises:
        ShapeError: they are not.
    """
    memory_rows = prepared.batch
    if memory_rows is None or rows == memory_rows or (call.expands and memory_rows and rows % memory_rows == 0):
        return
    hint = f"; to share one memory between all rows say memory.expand({rows})" if memory_rows == 1 else ""
    raise ShapeError(
        f"the text has {rows} rows and the memory of adapter {name!r} has {memory_rows}: give one row of memory for "
        f"each row of text{hint}"
    )


def images_so_far(input_ids: Tensor, media_token: int) -> Tensor:
    """How many images began at or before each token, (b, l), from the ids of their tokens."""
    return (input_ids == media_token).cumsum(1)


def images_of_piece(call: Call, media_token: int | None, rows: int, length: int) -> Tensor:
    """How many images began at or before each token (rows, length) of what the host is reading.

    Raises:
        ConditionError: it cannot be known here.
    """
    piece = _piece.get()
    past = None if piece is None else piece.past
    known = call.images if call.images is not None else call.prompt_images.get(media_token)
    if known is None and media_token is not None and piece is not None and piece.input_ids is not None and past == 0:
        known = images_so_far(piece.input_ids, media_token)
    if known is None:
        raise ConditionError(
            "look='latest' and 'previous' must know which images began before each token: give images=(b, l), or "
            "media_token= to the adapter and the text from its first token on"
        )
    if known.shape[1] == length and not call.expands:
        past = 0
    if past is None:
        raise ConditionError("the host does not say how many tokens went before this piece: give images=(b, l) for it")
    if known.shape[0] != rows:
        known = known.repeat_interleave(rows // known.shape[0], 0)
    # Tokens written after the prompt look at its last image.
    index = torch.arange(past, past + length, device=known.device).clamp(max=known.shape[1] - 1)
    return known[:, index]
