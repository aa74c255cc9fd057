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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mmattn.adapters.gated.block import Gate
from mmattn.adapters.joined.host_attention import JoinSlots
from mmattn.adapters.joined.slots import BeforeTextLayers, JoinedMemory, JoinedSlots
from mmattn.adapters.projection import PreparedMemory, check_read
from mmattn.adapters.protocols import Site, check_one_row
from mmattn.adapters.resampler import Resampler, settle_resampler
from mmattn.adapters.settings import AdapterConfig, default_norm, settle
from mmattn.adapters.text_state import TextState
from mmattn.errors import check_bool, check_choice, check_int
from mmattn.memory import Memory
from mmattn.storage.tensor_cache import cached

PROJECTIONS = ("mlp", "linear")


@dataclass(frozen=True)
class InsertedAdapter(AdapterConfig):
    """Settings of inserted tokens: the memory becomes tokens before the text of a causal language model.

    Args:
        memory_dim: e, width of the memory.
        projection: "mlp", two linear layers with GELU between them, as in LLaVA 1.5; or "linear", as in LLaVA.
        gate: scale the tokens' effect on the attention of each layer by tanh of a value that starts at 0, so that a
            fresh adapter changes nothing. False is LLaVA's form, in which even a fresh adapter changes every answer.
        resampler: first reduce the memory to a few latents.
        memory_norm: normalise the memory. By default from a width of 12 on: a norm leaves little more than signs of a
            narrower vector.

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
        settle_resampler(self)
        settle(self, memory_norm=default_norm(self.memory_norm, self.memory_dim))


class InsertedLayers(BeforeTextLayers):
    """The trainable part of one adapter that inserts tokens, on one host."""

    config: InsertedAdapter

    def __init__(self, config: InsertedAdapter, sites: Sequence[Site]) -> None:
        super().__init__(config, sites)
        self.traits = replace(self.traits, starts_as_identity=config.gate)
        e, d = config.memory_dim, self.sites[0].width
        self._add_reader(config.memory_norm, config.resampler)
        layers = [nn.Linear(e, d)] if config.projection == "linear" else [nn.Linear(e, d), nn.GELU(), nn.Linear(d, d)]
        self.projector = nn.Sequential(*layers)
        self.blocks = nn.ModuleDict({str(layer): JoinSlots(Gate() if config.gate else None) for layer in self.layers})
        #: Runs the host on embeddings before a text, a `HostEmbeddingReader`. Set by `attach_to`.
        self.reader: Any = None

    @torch.no_grad()
    def initialise(self, host: Any) -> None:
        """Scale projected slots to the norm of the host's embeddings; else it ignores them or attends only to them."""
        last = cast(nn.Linear, self.projector[-1])
        last.bias.zero_()
        generator = torch.Generator().manual_seed(0)
        slots = torch.randn(512, self.config.memory_dim, generator=generator, device="cpu").to(last.weight)
        size = self.projector(slots).float().square().mean().sqrt()
        last.weight.mul_(self.reader.embedding_size() / max(float(size), 1e-12))

    def read(self, memory: Memory) -> Memory:
        read = super().read(memory)
        return read.replace(self.projector(read.tokens))

    def bind_memory(self, memory: object, host: nn.Module) -> InsertedMemory:
        return InsertedMemory(self.prepare(memory), self)

    def slots_for(self, prepared: PreparedMemory, text: TextState | None) -> JoinedSlots:
        """Return the slots for a text, or as the host computes them now.

        Without gradients the host computes keys and values once for each state of memory, projector and host, in
        evaluation mode; with gradients, and in training mode, in each forward of the text. A text that continues keeps
        the slots that it began with.
        """
        reader, grad = self.reader, torch.is_grad_enabled()
        cache = None if text is None else text.cache
        # These fall with the adapter's weights, the memory and autocast; slots depend on the host, too.
        values = prepared.cache.values(self)
        by_text: WeakKeyDictionary[object, JoinedSlots] = cached(values, "by text", WeakKeyDictionary)
        if text is not None and text.past and not grad and cache in by_text:
            return by_text[cache]
        sources = [*prepared.memory.tensors(), *self.reading_parameters(), *reader.tensors()]
        if reader.is_training or (grad and any(one.requires_grad for one in sources)):
            return self.insert(prepared.memory)
        if "unchanged" not in values or not values["unchanged"]():
            values.pop("slots", None)
            values["unchanged"] = reader.unchanged()
        slots = cached(values, "slots", lambda: self.insert(prepared.memory))
        if cache is not None:
            by_text[cache] = slots
        return slots

    def attach_to(self, host: Any) -> None:
        self.reader = host.embedding_reader(self.sites)

    def insert(self, memory: Memory) -> JoinedSlots:
        """Compute keys and values of every layer by the host, of a memory as it was given; finite, if it must be."""
        inserted = self._insert(memory)
        check_read(self, memory, inserted.tensors(), lambda row: self._insert(row).tensors())
        return inserted

    def _insert(self, memory: Memory) -> JoinedSlots:
        read = self.read(memory)
        real = read.real_slots().to(read.device)
        counts = real.sum(1, keepdim=True)
        lengths = counts.flatten().tolist()
        longest = max(lengths, default=0)
        # Real slots stand one after the other, whatever lies between them.
        order = torch.sort((~real).to(torch.uint8), dim=1, stable=True).indices[:, :longest]
        number = torch.arange(longest, device=read.device)
        mask = number < counts
        gated = self.config.gate
        # Learned positions have none before 0: there the tokens stand beside the first of the text.
        positions = number - counts if gated and self.reader.turns_keys else number.expand_as(mask)
        offsets = None if gated else counts[:, 0]
        if not longest:
            return JoinedSlots({}, {}, mask, positions, offsets, lengths)
        embeddings = read.tokens.gather(1, order[..., None].expand(-1, -1, read.tokens.shape[2]))
        embeddings = embeddings.masked_fill(~mask[..., None], 0)
        keys, values = self.reader.read(self.name, embeddings, mask, positions)
        return JoinedSlots(keys, values, mask, positions, offsets, lengths)


class InsertedMemory(JoinedMemory):
    """A prepared memory bound to the adapter that inserts it before a text."""

    def __init__(self, prepared: PreparedMemory, adapter: InsertedLayers) -> None:
        super().__init__(adapter.name, prepared.batch, partial(adapter.slots_for, prepared), prepared)
        self.memory = prepared.memory
        self.unchecked = None if self.memory.finite_checked else self.memory

    def as_memory(self, text: TextState) -> Memory:
        return self.memory.detach()

    def sources(self) -> list[Tensor]:
        return self.memory.tensors()

    def for_request(self) -> JoinedMemory | None:
        """Return the slots as the host computes them now: in a step of transformers' manager its attention differs."""
        check_one_row(self)
        with torch.no_grad():
            slots = self.slots(None)
        return JoinedMemory(self.name, 1, lambda text: slots, self.shared) if slots.keys else None
