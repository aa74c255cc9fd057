"""A memory whose slots a host reads as tokens: read once for each memory, and again when anything has changed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mmattn.adapters.joined.joint_softmax import JoinedMemory, JoinedSlots, JoinedView, NothingBefore, check_text
from mmattn.adapters.prepared_memory import PreparedMemory, Reader
from mmattn.adapters.protocols import BoundMemory, check_one_row
from mmattn.adapters.text_state import TextState
from mmattn.core.tensor_cache import TensorCache, TensorVersion, autocast_dtype
from mmattn.memory import Memory


class EmbeddingReader(Protocol):
    """Has a host read embeddings before a text; what it does in one forward no other adapter takes part in."""

    @property
    def turns_keys(self) -> bool:
        """Whether positions turn keys and may lie before 0; else they are learned, and begin at 0."""

    @property
    def is_training(self) -> bool:
        """Whether a part of the host is in training mode, in which it reads nothing twice alike."""

    def embedding_size(self) -> float:
        """Root of the mean square of the embeddings of the host's tokens."""

    def tensors(self) -> Iterable[Tensor]:
        """Weights of the host, on which what it reads depends."""

    def state(self) -> Hashable:
        """What of the host it depends on besides, such as which LoRA is active."""

    def read(
        self, name: str, embeddings: Tensor, real: Tensor, positions: Tensor
    ) -> tuple[Mapping[int, Tensor], Mapping[int, Tensor]]:
        """Keys (b, g, m, k) and values (b, g, m, v) of each layer.

        Args:
            name: of the adapter.
            embeddings: (b, m, d).
            real: (b, m) bool, which of them are tokens; padding is on the right.
            positions: (b, m).
        """


class Inserts(Reader, Protocol):
    """What is asked of the trainable part of an adapter that inserts tokens."""

    reader: EmbeddingReader | None

    def insert(self, memory: Memory) -> JoinedSlots | None:
        """Keys and values of every layer; None without a slot."""


class InsertedMemory(BoundMemory):
    """A prepared memory bound to the adapter that inserts it before a text.

    Without gradients the host reads it once for each state of memory, projector and host, in evaluation mode; with
    gradients, and in training mode, in each forward of the text.

    Args:
        prepared: the memory.
        adapter: the trainable part that reads it.
    """

    follows_text = True

    def __init__(self, prepared: PreparedMemory, adapter: Inserts) -> None:
        self.prepared, self.adapter = prepared, adapter
        self.name, self.shared, self.rows = adapter.name, prepared, prepared.batch
        self.unchecked = None if prepared.memory.finite_checked else prepared.memory
        # By cache of the host: a block may hold several texts, in several threads.
        self._read: WeakKeyDictionary[Any, tuple[TensorVersion, Any, JoinedSlots | None]] = WeakKeyDictionary()

    def step(self, text: TextState) -> JoinedView | NothingBefore:
        """What this forward sees.

        Raises:
            ShapeError: the rows of the text are not those of the memory.
            ConditionError: only a part of the host was called, rows are packed, or slots arrive while the text is read.
        """
        check_text(text, self)
        joined = self.joined(text)
        return NothingBefore() if joined is None else joined.step(text)

    def joined(self, text: TextState | None = None) -> JoinedMemory | None:
        """The slots as the host has read them; None without any.

        Args:
            text: one that may go on: then its first part is in the host's own cache, and with it the host's weights.
        """
        slots = self._slots(None if text is None else text.cache, text is not None and bool(text.past))
        return None if slots is None else JoinedMemory(slots, self.name, self.prepared)

    def _slots(self, cache: Any, goes_on: bool) -> JoinedSlots | None:
        prepared, adapter, reader = self.prepared, self.adapter, self.adapter.reader
        assert reader is not None
        own = [*prepared.memory.tensors(), *adapter.reading_parameters()]
        dtype, needs = autocast_dtype(adapter.weight.device), torch.is_grad_enabled()
        last = None if cache is None else self._read.get(cache)
        if goes_on and not needs and last is not None and last[1] == dtype and last[0].holds(own):
            return last[2]
        sources = [*own, *reader.tensors()]
        if reader.is_training or (needs and any(one.requires_grad for one in sources)):
            return adapter.insert(prepared.memory)
        # Beside the adapter's weights, on which the cache depends, these slots depend on the host's.
        by_host: TensorCache = prepared.cache.get(cast(nn.Module, adapter), "inserted", TensorCache)
        slots: JoinedSlots | None = by_host.get(reader.state(), sources, lambda: adapter.insert(prepared.memory))
        if cache is not None:
            self._read[cache] = TensorVersion(own), dtype, slots
        return slots

    def as_memory(self, text: TextState) -> Memory:
        """The memory itself."""
        return self.prepared.memory.detach()

    def shareable(self) -> PreparedMemory:
        """Return the prepared memory."""
        return self.prepared

    def for_request(self) -> JoinedMemory | None:
        """Return the slots as the host reads them now: in a step of transformers' manager its attention is another.

        Raises:
            ShapeError: the memory has several rows.
        """
        check_one_row(self)
        with torch.no_grad():
            return self.joined()
