"""Prefix tuning (arXiv 2101.00190, section 4; Cartridges, arXiv 2506.06266, section 3): trained keys and values before
the text, in the attention of every layer.

With q, K, V of a layer of the host, and P_k, P_v (g, p, k) trained for it, a token gets softmax(q [P_k; K]ᵀ) [P_v; V].
The p virtual tokens stand at positions 0 to p − 1 and the text after them, as if the host had read a text of p tokens
before it. P_k are keys as the host's attention sees them, turned to their positions; where a row has several prefixes,
the later ones are turned to the positions after the first.

A prefix is there to be seen: a fresh one changes the answer. A row without one, `adapter_scale=0`, a disabled and an
unloaded adapter give the host's own answer bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.joined.joint_softmax import JoinedMemory, JoinedSlots
from mmattn.adapters.joined.record import JoinSlots
from mmattn.adapters.passages.adapter import Passages
from mmattn.adapters.prefix.rows import PrefixRows
from mmattn.adapters.protocols import HeadSizes, Host, Site
from mmattn.adapters.registry import register_adapter
from mmattn.errors import ConditionError, ShapeError, check_int
from mmattn.memory import Memory


@register_adapter
@dataclass(frozen=True)
class PrefixAdapter:
    """Settings of trained keys and values before the text of a language model.

    The memory of a call says which prefix each row has: a tensor (b,) or a list of their numbers, −1 or None where a
    row has none, lists of several that stand one after the other.

    Args:
        num_virtual_tokens: p, slots of a prefix, as peft calls it.
        num_prefixes: how many there are, of tasks, documents or users, each with weights of its own.

    >>> PrefixAdapter(num_virtual_tokens=16, num_prefixes=3).num_prefixes
    3
    """

    num_virtual_tokens: int
    num_prefixes: int = 1

    kind: ClassVar[str] = "prefix"
    positions: ClassVar[tuple[str, ...]] = ("joined",)
    example_call: ClassVar[str] = "model.generate(input_ids, memory=[0])  # the prefix of each row"
    reads: ClassVar[str] = "the numbers of its prefixes, and no vectors"
    memory_dim: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_int("num_virtual_tokens", self.num_virtual_tokens, at_most=1 << 20)
        check_int("num_prefixes", self.num_prefixes, at_most=1 << 20)

    def sites(self, host: Host) -> list[Site]:
        """The attention of every layer.

        Raises:
            AttachError: a layer has none that can be reached.
        """
        return host.sites("joined")

    def build(self, sites: Sequence[Site]) -> PrefixLayers:
        """The trainable part for these sites."""
        return PrefixLayers(self, sites)

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> PrefixRows:
        """A random prefix for each row."""
        numbers = torch.randint(self.num_prefixes, (rows,), generator=generator)
        return PrefixRows.of(numbers, self.num_prefixes, "default")


class PrefixBlock(JoinSlots):
    """Keys and values of all prefixes for the attention of one host layer.

    Args:
        config: the settings.
        size: of the host's attention.
    """

    def __init__(self, config: PrefixAdapter, size: HeadSizes) -> None:
        super().__init__()
        shape = config.num_prefixes, size.num_kv_heads, config.num_virtual_tokens
        self.keys = nn.Parameter(torch.randn(*shape, size.head_dim) * 0.02)
        self.values = nn.Parameter(torch.randn(*shape, size.value_dim or size.head_dim) * 0.02)


class PrefixLayers(AdapterLayers):
    """The trained prefixes of one adapter on one host.

    Args:
        config: the settings.
        sites: the attention of every layer.
    """

    orders_slots = True
    counts_slots = True
    moves_text = True
    starts_as_nothing = False

    def __init__(self, config: PrefixAdapter, sites: Sequence[Site]) -> None:
        super().__init__(config, sites)
        blocks = {}
        for site in self.sites:
            assert site.heads is not None
            blocks[str(site.layer)] = PrefixBlock(config, site.heads)
        self.blocks = nn.ModuleDict(blocks)
        #: What turns keys to other positions, by layer; None where they cannot be moved. Known once it is on a host.
        self.rotations: Mapping[int, Any] | None = None

    @property
    def weight(self) -> Tensor:
        """The keys of the first layer."""
        return self.prefix(self.layers[0]).keys

    def attention(self, layer: int) -> Any:
        """Where the prefixes are joined at a layer."""
        return self.block(layer)

    def prefix(self, layer: int) -> PrefixBlock:
        """Keys and values of all prefixes at host layer `layer`."""
        block = self.block(layer)
        assert isinstance(block, PrefixBlock)
        return block

    @torch.no_grad()
    def copy_passages(self, passages: Passages, adapter: Any, numbers: Sequence[int] | None = None) -> None:
        """Begin from texts: each prefix becomes what the host computed of the first tokens of a row of passages.

        Where every row has just as many tokens as a prefix, the answers are those to the passages in the prompt.

        Args:
            passages: `PassageCache.select(…)`, a row for each prefix.
            adapter: the passage adapter that reads them, `model.adapter(name)`.
            numbers: of the prefixes; by default all of them, in order.

        Raises:
            ShapeError: another number of rows than of prefixes, or a row with fewer tokens than a prefix has.
            ConditionError: the host's weights have changed since it read the passages.
        """
        wanted, count = list(range(self.config.num_prefixes)), self.config.num_virtual_tokens
        chosen = wanted if numbers is None else list(numbers)
        slots = passages.slots(adapter)
        lengths = slots.mask.sum(1).tolist()
        if len(chosen) != slots.batch or not set(chosen) <= set(wanted) or min(lengths, default=count) < count:
            raise ShapeError(
                f"prefixes {chosen} of {len(wanted)} with {count} virtual tokens each begin from as many rows of "
                f"passages with at least as many tokens, got rows of {lengths}: select other passages, or give numbers="
            )
        for layer in self.layers:
            block = self.prefix(layer)
            for own, there in ((block.keys, slots.keys[layer]), (block.values, slots.values[layer])):
                own[chosen] = there[:, :, :count].to(own)

    def slots_of(self, rows: PrefixRows) -> JoinedSlots:
        """Keys and values of the prefixes of each row, one after the other.

        Args:
            rows: which they are.

        Raises:
            ConditionError: keys that cannot be moved, and a row with several prefixes.
        """
        p, longest = self.config.num_virtual_tokens, rows.longest
        counts = torch.tensor([len(row) for row in rows.numbers])
        padded = [[*row, *[0] * (longest - len(row))] for row in rows.numbers]
        numbers = torch.tensor(padded, dtype=torch.long).reshape(rows.batch, longest)
        if self.rotations is None and longest > 1:
            raise ConditionError(
                f"a row has {longest} prefixes, and the keys of this host cannot be turned to stand one after the "
                "other (learned positions): give each row one"
            )
        keys, values = {}, {}
        for layer in self.layers:
            block, rotation = self.prefix(layer), None if self.rotations is None else self.rotations[layer]
            own = numbers.to(block.keys.device)
            parts = [block.keys[own[:, place]] for place in range(longest)]
            if rotation is not None:
                parts = [rotation(part, place * p) if place else part for place, part in enumerate(parts)]
            nothing = block.keys.new_zeros(len(own), block.keys.shape[1], 0, block.keys.shape[3])
            keys[layer] = torch.cat([nothing, *parts], 2)
            values[layer] = block.values[own].transpose(1, 2).flatten(2, 3)
        place = torch.arange(longest * p)
        return JoinedSlots(keys, values, place < counts[:, None] * p, place.expand(len(numbers), -1), counts * p)

    def read(self, memory: Memory) -> Memory:
        """Refused: prefixes are weights, and nothing here reads vectors.

        Raises:
            ShapeError: always.
        """
        raise ShapeError(f"adapter {self.name!r} (kind 'prefix') reads no vectors: give the numbers of its prefixes")

    def bind_memory(self, memory: object, host: nn.Module) -> PrefixMemory:
        """Bind the numbers of the prefixes of each row.

        Raises:
            ShapeError: something else, or a prefix that is not there.
        """
        return PrefixMemory(PrefixRows.of(memory, self.config.num_prefixes, self.name), self)

    def attach_to(self, host: Any) -> None:
        """Prove that prefixes before a text reach the output, and learn how their keys are moved."""
        self.rotations = host.probe_before_text(self.sites)


class PrefixMemory(JoinedMemory):
    """The prefixes of the rows of one call."""

    def __init__(self, prefixes: PrefixRows, adapter: PrefixLayers) -> None:
        self.shared = self.prefixes = prefixes
        self.adapter, self.name, self.rows = adapter, adapter.name, prefixes.batch

    @property
    def slots(self) -> JoinedSlots:
        """Keys and values, put together once if no gradients are needed, and again when a weight was changed."""
        adapter, prefixes = self.adapter, self.prefixes
        if torch.is_grad_enabled() and any(one.requires_grad for one in adapter.parameters()):
            return adapter.slots_of(prefixes)
        slots: JoinedSlots = prefixes.cache.get(adapter, "slots", lambda: adapter.slots_of(prefixes))
        return slots
