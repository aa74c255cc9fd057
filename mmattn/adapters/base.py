"""The trainable part of an adapter on one host: how it reads a memory, and a block for each site."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.prepared_memory import PreparedMemory, ProjectedMemory
from mmattn.adapters.protocols import MemorySource, Site
from mmattn.adapters.resampler import PerceiverResampler, Resampler
from mmattn.errors import ConditionError, ShapeError
from mmattn.memory import Memory


class AdapterLayers(nn.Module, ABC):
    """The trainable part of one adapter on one host.

    A kind of its own makes `blocks`, a `ModuleDict` from `str(site.layer)` to what `View.apply` is given, and says how
    a memory is read; what `bind` returns decides what the blocks are called with.

    Args:
        config: the settings, an `AdapterConfig`.
        sites: where it acts.
    """

    blocks: nn.ModuleDict
    score_bias = False
    # Whether its memory depends on the whole text, which `generate` must then note.
    reads_whole_text = False
    # Whether the order of the slots, and whether each is there once or twice, means something to it.
    orders_slots = False
    counts_slots = False
    # Whether a fresh one leaves the host's answer bit for bit what it was.
    starts_as_nothing = True
    # Whether, "inside" attention, it adds to what the block around it hands on.
    adds_to_block = False
    # Whether keys and values of its own stand "joined" before the text; it is then given `rotations`.
    stands_before_text = False
    # Whether the host reads its slots as embeddings; it is then given a `reader`.
    read_by_host = False
    # Whether it reads keys of the host as they are at position 0; it is then given `rotations`.
    reads_host_keys = False

    def __init__(self, config: Any, sites: Sequence[Site]) -> None:
        super().__init__()
        self.config = config
        self.sites = tuple(sites)
        self.layers = tuple(site.layer for site in self.sites)
        self.name = "default"
        self.resampler: PerceiverResampler | None = None

    def _add_resampler(self, settings: Resampler | None) -> None:
        if settings is not None:
            self.resampler = PerceiverResampler(settings, self.config.memory_dim)
            # Its latents attend to each other beside the slots.
            self.counts_slots = True

    @property
    def position(self) -> str:
        """The position of its sites."""
        return self.sites[0].position

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """A weight on the device and in the dtype in which a memory is read."""

    def block(self, layer: int) -> nn.Module:
        """The block at host layer `layer`."""
        return self.blocks[str(layer)]

    def attention(self, layer: int) -> Any:
        """The attention over the memory at host layer `layer`: a `CrossAttention` or `MemoryHeads`; None is none."""
        return None

    def recorded_attention(self, layer: int) -> Any:
        """What gives the weights over the memory at host layer `layer` when they are recorded; None is nothing."""
        return self.attention(layer)

    def kv_projection(self, layer: int) -> Any:
        """What projects keys and values of the memory for host layer `layer`: by default its attention."""
        return self.attention(layer)

    @abstractmethod
    def read(self, memory: Memory) -> Memory:
        """The memory as every block sees it."""

    def reading_parameters(self) -> Iterator[nn.Parameter]:
        """The weights that `read` uses: all that are not of a block."""
        yield from self.parameters(recurse=False)
        for name, part in self.named_children():
            if name != "blocks":
                yield from part.parameters()

    def projecting_modules(self) -> Iterator[nn.Module]:
        """The parts on which keys and values of a memory depend, and those that hold them."""
        yield from (self, self.blocks, *self.blocks.children())
        for name, part in self.named_children():
            if name != "blocks":
                yield from part.modules()
        for layer in self.layers:
            yield from self.kv_projection(layer).modules()

    def check_memory(self, memory: Memory) -> None:
        """Refuse a memory that this adapter cannot read.

        Raises:
            ShapeError: another width.
        """
        if memory.dim != self.config.memory_dim:
            raise ShapeError(
                f"adapter {self.name!r} was made for memory_dim={self.config.memory_dim}, got a memory of width "
                f"{memory.dim}: use the encoder it was trained with"
            )

    def prepare(self, memory: Any) -> Any:
        """What is given as `memory=`, checked, as an object that many calls can share.

        Args:
            memory: a `Memory`, a tensor (b, m, e), or what this returned before.

        Raises:
            ShapeError: something else, or a memory that this adapter cannot read.
            NonFiniteError: NaN or infinity in a slot that may be attended to.
        """
        if isinstance(memory, Tensor):
            memory = Memory(memory)
        if not isinstance(memory, (Memory, PreparedMemory)):
            hint = "; a function that finds neighbours is for a ChunkedAdapter" if callable(memory) else ""
            raise ShapeError(
                f"the memory of adapter {self.name!r} (kind {self.config.kind!r}) must be a Memory or a tensor "
                f"(b, m, e), got {type(memory).__name__}{hint}"
            )
        self.check_memory(memory.memory if isinstance(memory, PreparedMemory) else memory)
        if isinstance(memory, PreparedMemory):
            return memory
        if memory.finite_checked and not torch.compiler.is_compiling():
            memory.check_finite()
        return PreparedMemory(memory)

    def bind(self, prepared: Any, host: nn.Module) -> MemorySource:
        """The source of one call, of what `prepare` returned.

        Args:
            prepared: the memory.
            host: the frozen model, for kinds whose memory must fit it.

        Raises:
            ShapeError: a memory that does not fit.
        """
        return ProjectedMemory(prepared, self)

    def check_shareable(self, prepared: Any) -> None:
        """Refuse what cannot be kept by the caller for many calls: `model.prepare` asks.

        Raises:
            ConditionError: it belongs to one call.
        """
        if not isinstance(prepared, PreparedMemory):
            raise ConditionError(f"a {type(prepared).__name__} belongs to a call: give it to each call as memory=")

    def initialise(self, host: Any) -> None:
        """Begin from weights of the adapted host, where the settings ask for it; called before the first training."""

    def slot_norm(self) -> nn.LayerNorm | None:
        """What alone `read` does to each slot, for a memory that is searched; None where it is the slot itself.

        Raises:
            ConditionError: it does more.
        """
        raise ConditionError(
            f"adapter {self.name!r} (kind {self.config.kind!r}) reads no memory that is searched, such as "
            "index.as_memory(): give a Memory, such as hits.memory() of a search"
        )

    def first_tokens(self, memory: Memory, batch: Mapping[str, Any]) -> Tensor | None:
        """The first token that may see each slot (b, m), the text's length where none may; None where all tokens may.

        Args:
            memory: one that this adapter reads.
            batch: what the host is called with, by name.
        """
        counts = batch.get("arrived")
        if counts is None:
            return None
        return (counts.cpu()[:, None] <= torch.arange(memory.length)[:, None]).sum(2)

    def to_sites(self) -> None:
        """Move each block to the device of its site, and what reads the memory to the first one."""
        for site in self.sites:
            self.block(site.layer).to(site.device)
        for child in self.children():
            if child is not self.blocks:
                child.to(self.sites[0].device)

    def _cast_memory(self, memory: Memory) -> Memory:
        """The memory on the device and in the dtype of the weights, padding set to 0."""
        weight = self.weight
        tokens = memory.tokens.to(weight.device)
        # Norms take narrower states than their weights under autocast, and never wider ones.
        if not torch.is_autocast_enabled(tokens.device.type) or tokens.element_size() > weight.element_size():
            tokens = tokens.to(weight.dtype)
        if memory.mask is not None:
            tokens = tokens.masked_fill(~memory.mask.to(tokens.device)[..., None], 0)
        return memory.replace(tokens)


def random_memory(
    generator: torch.Generator, rows: int, dim: int, segments: int = 1, scores: bool = False, slots: int = 5
) -> Memory:
    """A random memory with padding in some rows, for `example_memory` of an adapter's settings.

    Args:
        generator: of the random numbers.
        rows: b.
        dim: e.
        segments: how many things (images, chunks) each row is about; numbered where they are several.
        scores: whether slots have scores.
        slots: slots of each segment.

    >>> random_memory(torch.Generator().manual_seed(0), rows=2, dim=7).lengths
    [5, 3]
    """
    m = segments * slots
    real = torch.tensor([slots, slots - 2, slots - 1])[torch.arange(rows) % 3]
    mask = torch.arange(m) % slots < real[:, None]
    owner = torch.arange(segments).repeat_interleave(slots).expand(rows, m) if segments > 1 else None
    tokens = torch.randn(rows, m, dim, generator=generator)
    return Memory(tokens, mask, owner, torch.randn(rows, m, generator=generator) if scores else None)
