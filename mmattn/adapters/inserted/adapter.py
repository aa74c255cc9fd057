"""A memory as tokens before the text: projected into the embedding space of a host, which reads them as it reads text.

With slots M (b, m, e) and a trained projector P, the host is given [P(M); E(text)], as LLaVA gives it the patches of
an image (arXiv 2304.08485, section 4.1; two layers with GELU between them, arXiv 2310.03744, section 3.3) and xRAG a
passage as one token (arXiv 2405.13792, section 3.2). The host reads P(M) by itself, once for each memory, and its
keys and values of them stand before those of the text, in the same softmax: in a causal model that is the same.

A new token is seen from the first step on, so that a fresh projector changes every answer. Where `gate` is set, what
the tokens change in the attention of each layer is weighed by a number that starts at 0,

    out = own + tanh(α) · (joined − own),

with `own` the attention of the text over itself and `joined` that over both, as zero-initialised attention does it
for prompts (arXiv 2303.16199, section 3.2); the text keeps its positions, and the tokens stand at those before 0. So a
fresh adapter is the host bit for bit, and one whose gates are open is what LLaVA has. Without the gate it is that from
the start: the text stands after the tokens, and a fresh adapter is not the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers, random_memory
from mmattn.adapters.block_adapter import resampler_settings
from mmattn.adapters.default_sizes import settle_norm
from mmattn.adapters.gated.block import Gate
from mmattn.adapters.inserted.memory import EmbeddingReader, InsertedMemory
from mmattn.adapters.joined.joint_softmax import JoinedSlots
from mmattn.adapters.joined.record import JoinSlots
from mmattn.adapters.prepared_memory import PreparedMemory, check_read
from mmattn.adapters.protocols import Host, Site
from mmattn.adapters.registry import register_adapter
from mmattn.adapters.resampler import Resampler
from mmattn.errors import check_bool, check_choice, check_int
from mmattn.memory import Memory

PROJECTIONS = ("mlp", "linear")


@register_adapter
@dataclass(frozen=True)
class InsertedAdapter:
    """Settings of a memory that is inserted as tokens before the text of a causal language model.

    Args:
        memory_dim: e, width of the memory.
        projection: "mlp", two linear layers with GELU between them, as in LLaVA 1.5; or "linear", as in LLaVA.
        gate: what the tokens change in the attention of each layer is weighed by tanh of a number that starts at 0, so
            that a fresh adapter is the host. False is LLaVA's own form, in which even a fresh one changes every answer:
            the one kind of adapter that does not start as nothing, and only where this is asked for.
        resampler: turn the memory into few latents first.
        memory_norm: normalise the memory; None is where it is 12 wide or more: of few numbers a norm leaves little more
            than signs.

    >>> InsertedAdapter(memory_dim=24).gate
    True
    """

    memory_dim: int
    projection: str = "mlp"
    gate: bool = True
    resampler: Resampler | None = None
    memory_norm: bool | None = None

    kind: ClassVar[str] = "inserted"
    positions: ClassVar[tuple[str, ...]] = ("joined",)
    example_call: ClassVar[str] = "model.generate(input_ids, memory=memory)"

    def __post_init__(self) -> None:
        check_int("memory_dim", self.memory_dim, at_most=65536)
        check_choice("projection", self.projection, PROJECTIONS)
        check_bool("gate", self.gate)
        resampler_settings(self)
        settle_norm(self)

    def sites(self, host: Host) -> list[Site]:
        """The attention of every layer.

        Raises:
            AttachError: a layer has none that can be reached.
        """
        return host.sites("joined")

    def build(self, sites: Sequence[Site]) -> InsertedLayers:
        """The trainable part for these sites."""
        return InsertedLayers(self, sites)

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> Memory:
        """A random memory (rows, 5, e), some slots masked."""
        return random_memory(generator, rows, self.memory_dim)


class InsertedLayers(AdapterLayers):
    """The trainable part of one adapter that inserts tokens, on one host.

    Args:
        config: the settings.
        sites: the attention of every layer.
    """

    orders_slots = True
    counts_slots = True
    moves_text = True

    def __init__(self, config: InsertedAdapter, sites: Sequence[Site]) -> None:
        super().__init__(config, sites)
        e, d = config.memory_dim, self.sites[0].width
        self.memory_norm = nn.LayerNorm(e) if config.memory_norm else None
        self._add_resampler(config.resampler)
        layers = [nn.Linear(e, d)] if config.projection == "linear" else [nn.Linear(e, d), nn.GELU(), nn.Linear(d, d)]
        self.projector = nn.Sequential(*layers)
        self.blocks = nn.ModuleDict({str(layer): JoinSlots(Gate() if config.gate else None) for layer in self.layers})
        #: Has the host read embeddings; known once the adapter is on a host.
        self.reader: EmbeddingReader | None = None

    @property
    def weight(self) -> Tensor:
        """A weight of the memory's norm, or of the projector where there is none."""
        weight = (self.projector[0] if self.memory_norm is None else self.memory_norm).weight
        assert isinstance(weight, Tensor)
        return weight

    def recorded_attention(self, layer: int) -> Any:
        """Where the tokens are joined at a layer."""
        return self.block(layer)

    @torch.no_grad()
    def initialise(self, host: Any) -> None:
        """Give projected slots the size of the host's embeddings: at another it ignores them, or hears nothing else."""
        assert self.reader is not None
        last = self.projector[-1]
        assert isinstance(last, nn.Linear)
        last.bias.zero_()
        slots = torch.randn(512, self.config.memory_dim, generator=torch.Generator().manual_seed(0)).to(last.weight)
        size = self.projector(slots).float().square().mean().sqrt()
        last.weight.mul_(self.reader.embedding_size() / max(float(size), 1e-12))

    def read(self, memory: Memory) -> Memory:
        """The slots as embeddings (b, m, d) of the host."""
        read = self._cast_memory(memory)
        if self.memory_norm is not None:
            read = read.replace(self.memory_norm(read.tokens))
        if self.resampler is not None:
            read = self.resampler(read)
        return read.replace(self.projector(read.tokens))

    def bind_vectors(self, prepared: PreparedMemory) -> InsertedMemory:
        """Bind a memory of vectors that was checked."""
        return InsertedMemory(prepared, self)

    def attach_to(self, host: Any) -> None:
        """Prove that embeddings before a text reach the output, and take the host's reader of embeddings."""
        self.reader = host.embedding_reader(self.sites)

    def insert(self, memory: Memory) -> JoinedSlots | None:
        """Keys and values of every layer, as the host computes them of the slots before a text; None without a slot.

        Args:
            memory: as it was given. The real slots of each row stand one after the other, whatever lies between them.

        Raises:
            NonFiniteError: what the host computes of a row overflows.
        """
        inserted = self._insert(memory)
        if inserted is not None:
            check_read(self, memory, _tensors(inserted), lambda row: _tensors(self._insert(row)))
        return inserted

    def _insert(self, memory: Memory) -> JoinedSlots | None:
        assert self.reader is not None
        read = self.read(memory)
        real = read.real_slots().to(read.device)
        counts = real.sum(1, keepdim=True)
        longest = int(counts.max()) if counts.numel() else 0
        if not longest:
            return None
        order = torch.sort((~real).to(torch.uint8), dim=1, stable=True).indices[:, :longest]
        number = torch.arange(longest, device=read.device)
        mask = number < counts
        embeddings = read.tokens.gather(1, order[..., None].expand(-1, -1, read.tokens.shape[2]))
        embeddings = embeddings.masked_fill(~mask[..., None], 0)
        gated = self.config.gate
        # Learned positions have none before 0: there the tokens stand beside the first of the text.
        positions = number - counts if gated and self.reader.turns_keys else number.expand_as(mask)
        keys, values = self.reader.read(self.name, embeddings, mask, positions)
        offsets = torch.zeros_like(counts[:, 0]) if gated else counts[:, 0]
        return JoinedSlots(keys, values, mask, positions, offsets)


def _tensors(slots: JoinedSlots | None) -> list[Tensor]:
    """Keys and values of slots, where there are any."""
    return [] if slots is None else [*slots.keys.values(), *slots.values.values()]
