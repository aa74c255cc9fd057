"""A memory of vectors with what adapters computed of it: read and projected once, for many calls; and who reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Protocol, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from mmattn.adapters.protocols import AdapterConfig
from mmattn.adapters.resampler import PerceiverResampler
from mmattn.adapters.text_state import TextState
from mmattn.core.kv_cache import KeyValue
from mmattn.core.tracing import all_finite, readable
from mmattn.errors import NonFiniteError
from mmattn.memory import Memory
from mmattn.storage.tensor_cache import KeyValueCache, autocast_dtype, cached

_TENSORS = attrgetter("tokens", "mask", "segments", "scores")


class Projection(Protocol):
    """Computes keys and values of a memory for one layer."""

    def project(
        self, memory: Tensor, *, mask: Tensor | None, scores: Tensor | None, queries: int | None
    ) -> KeyValue: ...

    def projecting_parameters(self) -> list[Tensor]: ...


class Reader(nn.Module):
    """The part of `AdapterLayers` that reads and projects a memory."""

    config: AdapterConfig
    name: str
    layers: tuple[int, ...]
    blocks: nn.ModuleDict
    score_bias = False
    follows_text = False
    changes_all = False

    def __init__(self) -> None:
        super().__init__()
        self.memory_norm: nn.LayerNorm | None = None
        self.resampler: PerceiverResampler | None = None

    @property
    def weight(self) -> Tensor:
        """Return a weight on the device and in the dtype in which a memory is read."""
        if self.memory_norm is not None:
            return self.memory_norm.weight
        # Gates, which stay in float32, are no matrices.
        return next(parameter for parameter in self.parameters() if parameter.dim() > 1)

    def block(self, layer: int) -> nn.Module:
        """Return the block at host layer `layer`."""
        return self.blocks[str(layer)]

    def attention(self, layer: int) -> nn.Module | None:
        """Return the module that attends to the memory at host layer `layer`, whose weights are recorded, or None."""
        return None

    def kv_projection(self, layer: int) -> Projection:
        """Return the module that projects keys and values for host layer `layer`."""
        attention = self.attention(layer)
        return cast(Projection, getattr(attention, "kv_proj", attention))

    def read(self, memory: Memory) -> Memory:
        """Return the memory as every block attends to it: normalised and resampled, as the settings have it."""
        read = self._cast_memory(memory)
        if self.memory_norm is not None:
            read = read.replace(self.memory_norm(read.tokens))
        return read if self.resampler is None else self.resampler(read)

    def reading_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the weights that `read` uses: all outside the blocks."""
        yield from self.parameters(recurse=False)
        for name, part in self.named_children():
            if name != "blocks":
                yield from part.parameters()

    def visible_slots(self, text: TextState, memory: Memory) -> Tensor | None:
        """Return the slots that each token attends to, (b, 1, l, m) bool; None for all that are real."""
        return None

    def _cast_memory(self, memory: Memory) -> Memory:
        """Return the memory on the device and in the dtype of the weights, padding set to 0."""
        weight = self.weight
        tokens = memory.tokens.to(weight.device)
        # Norms take narrower states than their weights under autocast, and never wider ones.
        if not torch.is_autocast_enabled(tokens.device.type) or tokens.element_size() > weight.element_size():
            tokens = tokens.to(weight.dtype)
        if memory.mask is not None:
            tokens = tokens.masked_fill(~memory.mask.to(tokens.device)[..., None], 0)
        return memory.replace(tokens)


class PreparedMemory:
    """A memory with what the adapters of a host computed of it, used by many calls; what `model.prepare` returns.

    Keys and values are projected at their first use, cached only while no gradients are needed, and projected again
    when the memory or a weight was changed.

    Args:
        memory: the memory; it stays as it is.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.cache = KeyValueCache(partial(_TENSORS, memory))
        #: The adapters that can read it.
        self.checked_by: WeakSet[nn.Module] = WeakSet()

    @property
    def batch(self) -> int:
        """Number of rows b."""
        return self.memory.batch

    def project(self, adapter: Reader, layer: int, memory: Memory, queries: int) -> KeyValue:
        """Return keys and values of the memory for the block at a host layer.

        Args:
            adapter: the trainable part that reads.
            layer: number of the host's layer.
            memory: what `read` returned.
            queries: how many attend to each row of the memory, where nothing is cached.

        Raises:
            NonFiniteError: they overflow, though the memory is finite.
        """

        def project(queries: int | None = None) -> KeyValue:
            projected = project_layer(adapter, layer, memory, queries)
            check_projected(adapter, layer, self.memory, projected)
            return projected

        if self.is_uncached(adapter):
            return project(queries)
        values = self.cache.values(adapter)
        if values.get("read") is not memory:  # another thread has edited the memory since: not to be cached as of now
            return project(queries)
        return cached(values, layer, project)

    def read(self, adapter: Reader) -> Memory:
        """Return the memory as an adapter reads it."""
        if self.is_uncached(adapter):
            return adapter.read(self.memory)
        return self.cache.get(adapter, "read", lambda: adapter.read(self.memory))

    def is_uncached(self, adapter: nn.Module) -> bool:
        """Return whether nothing may be cached: gradients are needed, or a graph is being traced."""
        if torch.compiler.is_compiling():
            return True
        return torch.is_grad_enabled() and (
            self.memory.tokens.requires_grad or any(parameter.requires_grad for parameter in adapter.parameters())
        )

    def nbytes(self) -> int:
        """Return the bytes of cached keys and values."""
        return self.cache.nbytes()


def prepared_memory(memory: Memory | Tensor | PreparedMemory, check: Callable[[Memory], None]) -> PreparedMemory:
    """Return vectors given as `memory=` as a `PreparedMemory`, after `check` has looked at their shape."""
    if isinstance(memory, PreparedMemory):
        check(memory.memory)
        return memory
    if isinstance(memory, Tensor):
        memory = Memory(memory)
    check(memory)
    if memory.finite_checked and not torch.compiler.is_compiling():
        memory.check_finite()
    return PreparedMemory(memory)


def project_layer(adapter: Reader, layer: int, memory: Memory, queries: int | None = None) -> KeyValue:
    """Return keys and values of a memory that an adapter has read, for so many queries per row (None: to be cached)."""
    projection = adapter.kv_projection(layer)
    tokens = memory.tokens.to(projection.projecting_parameters()[0].device)
    scores = memory.scores if adapter.score_bias else None
    return projection.project(tokens, mask=memory.mask, scores=scores, queries=queries)


def check_projected(adapter: Reader, layer: int, memory: Memory, projected: KeyValue) -> None:
    """Check that keys, values and biases of a finite memory are finite, too.

    A cast to half precision, a norm or a product may overflow; NaN in one row would reach others by masked attention,
    in which 0 · NaN is NaN.
    """

    def project_row(row: Memory) -> list[Tensor]:
        return project_layer(adapter, layer, adapter.read(row)).unchecked()

    check_read(adapter, memory, projected.unchecked(), project_row)


def check_read(
    adapter: Reader, memory: Memory, read: Sequence[Tensor], read_row: Callable[[Memory], Sequence[Tensor]]
) -> None:
    """Check that what an adapter computed of a memory is finite, if the values of the memory must be."""
    if not (read and memory.finite_checked and all(map(readable, read))) or all_finite(*read):
        return
    with torch.no_grad():
        rows = [row for row in range(memory.batch) if not _finite(read_row(memory[row]))]
    if not rows:
        return
    if not _finite(adapter.parameters()):
        raise NonFiniteError(
            f"weights of adapter {adapter.name!r} are not finite: load others, or train with a lower learning rate"
        )
    which = f"row {', '.join(map(str, rows))} of the memory of adapter {adapter.name!r}"
    first = memory[rows[0]]
    largest = float(first.tokens.detach().abs().masked_fill(~first.real_slots()[..., None], 0).max())
    if not math.isfinite(largest):
        raise NonFiniteError(f"{which} is not finite: repair its vectors, or mask such slots out")
    dtype = autocast_dtype(adapter.weight.device) or adapter.weight.dtype
    raise NonFiniteError(
        f"{which} overflows in {str(dtype).removeprefix('torch.')} (values up to {largest:.3g}): scale its vectors, or "
        "use a wider dtype"
    )


def _finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
