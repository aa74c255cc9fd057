"""A memory of vectors with what adapters computed of it: read and projected once, for many calls; and who reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Protocol, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from mmattn.adapters.protocols import AdapterConfig
from mmattn.adapters.resampler import PerceiverResampler
from mmattn.adapters.text_state import TextState
from mmattn.core.attention_inputs import zero_hidden
from mmattn.core.device_checks import refuse_unless_finite
from mmattn.core.kv_cache import KeyValue
from mmattn.core.tracing import readable
from mmattn.errors import NonFiniteError
from mmattn.memory import Memory
from mmattn.storage.tensor_cache import KeyValueCache, Values, autocast_dtype

_TENSORS = attrgetter("tokens", "mask", "segments", "scores")


class Projection(Protocol):
    """Computes keys and values of a memory for one layer."""

    def project(
        self, memory: Tensor, *, mask: Tensor | None, scores: Tensor | None, queries: int | None, hidden_are_zero: bool
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
            tokens = zero_hidden(tokens, memory.mask.to(tokens.device)[..., None])
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

    def project(self, adapter: Reader, layers: Sequence[int], memory: Memory, queries: int) -> dict[int, KeyValue]:
        """Return keys and values of the memory for the blocks at some host layers.

        Args:
            adapter: the trainable part that reads.
            layers: numbers of the host's layers.
            memory: what `read` returned.
            queries: how many attend to each row of the memory, where nothing is cached.

        Raises:
            NonFiniteError: they overflow, though the memory is finite.
        """
        values = None if self.is_uncached(adapter) else self.cache.values(adapter)
        # Another thread may have edited the memory since it was read: that is not to be cached as of now.
        if values is None or values.get("read") is not memory:
            return check_projected(adapter, self.memory, project_layers(adapter, layers, memory, queries))
        missing = [layer for layer in layers if layer not in values]
        if missing:
            # A cached value must serve calls outside inference mode, too.
            with torch.inference_mode(False), torch.no_grad():
                projected = project_layers(adapter, missing, memory)
            for layer, one in check_projected(adapter, self.memory, projected, values).items():
                values[layer] = one
        return {layer: values[layer] for layer in layers}

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
    memory.check_in_call()
    return PreparedMemory(memory)


def project_layers(
    adapter: Reader, layers: Sequence[int], memory: Memory, queries: int | None = None
) -> dict[int, KeyValue]:
    """Return keys and values of a memory that an adapter has read, for so many queries per row (None: to be cached)."""
    mask, scores = memory.mask, memory.scores if adapter.score_bias else None
    # A norm or resampler may have made something of slots that are hidden: once for all layers they are 0 again.
    read = memory.tokens if mask is None else zero_hidden(memory.tokens, mask[..., None])
    projected = {}
    for layer in layers:
        projection = adapter.kv_projection(layer)
        tokens = read.to(projection.projecting_parameters()[0].device)
        projected[layer] = projection.project(tokens, mask=mask, scores=scores, queries=queries, hidden_are_zero=True)
    return projected


def check_projected(
    adapter: Reader, memory: Memory, projected: dict[int, KeyValue], cached: Values | None = None
) -> dict[int, KeyValue]:
    """Return keys and values by layer after a check that those and the biases of a finite memory are finite, too.

    A cast to half precision, a norm or a product may overflow; NaN in one row would reach others by masked attention,
    in which 0 · NaN is NaN. On a device, where that is known later only, each row must attend to itself; what is
    `cached` meanwhile is dropped if the check fails.
    """
    unchecked = [tensor for one in projected.values() for tensor in one.unchecked()]

    def project_row(row: Memory) -> list[Tensor]:
        again = project_layers(adapter, list(projected), adapter.read(row))
        return [tensor for one in again.values() for tensor in one.unchecked()]

    def forget() -> None:
        for layer in projected:
            if cached is not None:
                cached.pop(layer, None)

    is_finite = check_read(adapter, memory, unchecked, project_row, forget)
    return {layer: replace(one, finite=True) for layer, one in projected.items()} if is_finite else projected


def check_read(
    adapter: Reader,
    memory: Memory,
    read: Sequence[Tensor],
    read_row: Callable[[Memory], Sequence[Tensor]],
    forget: Callable[[], None] = lambda: None,
) -> bool:
    """Check that what an adapter computed of a memory is finite, if the values of the memory must be.

    Returns whether it may be taken for finite.
    """
    if not memory.finite_checked or not all(map(readable, read)):
        return False

    def explain() -> None:
        forget()
        _explain_overflow(adapter, memory, read_row)

    refuse_unless_finite(read, explain)
    return True


def _explain_overflow(adapter: Reader, memory: Memory, read_row: Callable[[Memory], Sequence[Tensor]]) -> None:
    """Raise NonFiniteError if rows of a memory are not finite as an adapter reads them."""
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
