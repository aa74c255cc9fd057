"""The trainable part of one adapter on one host, and the memory of a call for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import nn

from mmattn.adapters.joined.host_attention import JoinSlots
from mmattn.adapters.joined.slots import BeforeTextLayers, JoinedMemory, JoinedSlots
from mmattn.adapters.language_models import to_device
from mmattn.adapters.passages.layers import PassageLayers, Passages
from mmattn.adapters.prefix.config import PrefixAdapter
from mmattn.adapters.prefix.rows import PrefixRows
from mmattn.adapters.protocols import HeadSizes, Site, Traits
from mmattn.adapters.text_state import TextState
from mmattn.errors import ConditionError, ShapeError
from mmattn.memory import Memory


class PrefixBlock(JoinSlots):
    """Keys and values of all prefixes for the attention of one host layer."""

    def __init__(self, config: PrefixAdapter, size: HeadSizes) -> None:
        super().__init__()
        shape = config.num_prefixes, size.num_kv_heads, config.num_virtual_tokens
        self.keys = nn.Parameter(torch.randn(*shape, size.head_dim) * 0.02)
        self.values = nn.Parameter(torch.randn(*shape, size.value_dim or size.head_dim) * 0.02)


class PrefixLayers(BeforeTextLayers):
    """The trained prefixes of one adapter on one host."""

    config: PrefixAdapter
    traits = Traits(starts_as_identity=False, order_matters=True, duplicates_matter=True, moves_text=True)

    def __init__(self, config: PrefixAdapter, sites: Sequence[Site]) -> None:
        super().__init__(config, sites)
        self.blocks = nn.ModuleDict({str(site.layer): PrefixBlock(config, site.sizes) for site in self.sites})

    def prefix(self, layer: int) -> PrefixBlock:
        """Return keys and values of all prefixes at a host layer."""
        return cast(PrefixBlock, self.block(layer))

    @torch.no_grad()
    def copy_passages(self, passages: Passages, adapter: PassageLayers, numbers: Sequence[int] | None = None) -> None:
        """Initialise prefixes from texts: each becomes what the host computed of the first tokens of a row of passages.

        If every row has as many tokens as a prefix, the answers are those to the passages in the prompt.

        Args:
            passages: `PassageCache.select(…)`, a row for each prefix.
            adapter: the passage adapter that reads them, `model.adapter(name)`.
            numbers: of the prefixes; by default all of them, in order.

        Raises:
            ShapeError: another number of rows than of prefixes, or a row with fewer tokens than a prefix has.
            ConditionError: the host's weights have changed since it read the passages.
        """
        every, count = list(range(self.config.num_prefixes)), self.config.num_virtual_tokens
        numbers = every if numbers is None else list(numbers)
        slots = passages.slots(adapter)
        lengths = slots.mask.sum(1).tolist()
        if len(numbers) != slots.batch or not set(numbers) <= set(every) or min(lengths, default=count) < count:
            raise ShapeError(
                f"prefixes {numbers} of {len(every)} with {count} virtual tokens each begin from as many rows of "
                f"passages with at least as many tokens, got rows of {lengths}: select other passages, or give numbers="
            )
        for layer in self.layers:
            block = self.prefix(layer)
            block.keys[numbers] = slots.keys[layer][:, :, :count].to(block.keys)
            block.values[numbers] = slots.values[layer][:, :, :count].to(block.values)

    def slots(self, rows: PrefixRows) -> JoinedSlots:
        """Return keys and values of the prefixes of each row, one after the other."""
        p, longest = self.config.num_virtual_tokens, max(map(len, rows.numbers), default=0)
        if self.rotations is None and longest > 1:
            raise ConditionError(
                f"a row has {longest} prefixes, and the keys of this host cannot be turned to stand one after the "
                "other (learned positions): give each row one"
            )
        device, lengths = self.prefix(self.layers[0]).keys.device, [p * len(row) for row in rows.numbers]
        counts = to_device(torch.tensor(lengths, dtype=torch.long), device)
        padded = [[*row, *[0] * (longest - len(row))] for row in rows.numbers]
        numbers = to_device(torch.tensor(padded, dtype=torch.long).reshape(rows.batch, longest), device)
        keys, values = {}, {}
        for layer in self.layers:
            block, rotation = self.prefix(layer), None if self.rotations is None else self.rotations[layer]
            here = numbers.to(block.keys.device)
            parts = [block.keys[here[:, place]] for place in range(longest)]
            if rotation is not None:
                parts = [rotation(part, place * p) if place else part for place, part in enumerate(parts)]
            empty = block.keys.new_zeros(len(here), block.keys.shape[1], 0, block.keys.shape[3])
            keys[layer] = torch.cat([empty, *parts], 2)
            values[layer] = block.values[here].transpose(1, 2).flatten(2, 3)
        place = torch.arange(longest * p, device=device)
        return JoinedSlots(keys, values, place < counts[:, None], place.expand(len(numbers), -1), counts, lengths)

    def read(self, memory: Memory) -> Memory:
        raise ShapeError(f"adapter {self.name!r} (kind 'prefix') reads no vectors: give the numbers of its prefixes")

    def bind_memory(self, memory: object, host: nn.Module) -> JoinedMemory:
        rows = PrefixRows.of(memory, self.config.num_prefixes, self.name)
        return JoinedMemory(self.name, rows.batch, partial(self._cached_slots, rows), rows)

    def _cached_slots(self, rows: PrefixRows, text: TextState | None) -> JoinedSlots:
        """Compute keys and values once if no gradients are needed, and again after a change of the weights."""
        if torch.is_grad_enabled() and any(one.requires_grad for one in self.parameters()):
            return self.slots(rows)
        return rows.cache.get(self, "slots", lambda: self.slots(rows))
