"""Prefix tuning (arXiv 2101.00190, section 4; Cartridges, arXiv 2506.06266, section 3): trained keys and values before
the text, in the attention of every layer.

With q, K, V of a layer of the host, and P_k, P_v (g, p, k) trained for it, a token gets softmax(q [P_k; K]ᵀ) [P_v; V].
The p virtual tokens stand at positions 0 to p − 1 and the text after them, as if the host had read a text of p tokens
before it. P_k are keys as the host's attention sees them, turned to their positions; where a row has several prefixes,
the later ones are turned to the positions after the first.

Unlike other adapters, an untrained prefix changes the output. A row without one, `adapter_scale=0`, a disabled and an
unloaded adapter give the host's own answer bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from mmattn.adapters.host_models import to_device
from mmattn.adapters.joined.host_attention import JoinSlots
from mmattn.adapters.joined.slots import BeforeTextLayers, JoinedMemory, JoinedSlots
from mmattn.adapters.passages.adapter import PassageLayers, Passages
from mmattn.adapters.protocols import HeadSizes, Site, Traits
from mmattn.adapters.settings import AdapterConfig
from mmattn.adapters.text_state import TextState
from mmattn.errors import ConditionError, ShapeError, check_int
from mmattn.memory import Memory
from mmattn.storage.tensor_cache import KeyValueCache


@dataclass(frozen=True)
class PrefixAdapter(AdapterConfig):
    """Settings of trained keys and values before the text of a language model.

    The memory of a call is the number of each row's prefix: a tensor (b,) or a list. Use −1 or None for a row without
    one, and a list of numbers for several prefixes in sequence.

    Args:
        num_virtual_tokens: p, slots of a prefix, as in peft.
        num_prefixes: number of prefixes (tasks, documents or users), each with separate weights.

    >>> PrefixAdapter(num_virtual_tokens=16, num_prefixes=3).num_prefixes
    3
    """

    num_virtual_tokens: int
    num_prefixes: int = 1

    kind: ClassVar[str] = "prefix"
    positions: ClassVar[tuple[str, ...]] = ("joined",)
    example_call: ClassVar[str] = "model.generate(input_ids, memory=[0])  # the prefix of each row"
    reads: ClassVar[str] = "the numbers of its prefixes, and no vectors"
    memory_dim: ClassVar[int] = 0  # type: ignore[misc]

    def __post_init__(self) -> None:
        check_int("num_virtual_tokens", self.num_virtual_tokens, at_most=1 << 20)
        check_int("num_prefixes", self.num_prefixes, at_most=1 << 20)

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> PrefixRows:
        """Return a random prefix for each row."""
        numbers = torch.randint(self.num_prefixes, (rows,), generator=generator, device=generator.device)
        return PrefixRows.of(numbers, self.num_prefixes, "default")


class PrefixRows:
    """The numbers of the prefixes of each row, in their order, with the keys and values computed for them."""

    def __init__(self, numbers: Sequence[Sequence[int]]) -> None:
        self.numbers = tuple(tuple(row) for row in numbers)
        self.cache = KeyValueCache(tuple)

    @staticmethod
    def of(memory: object, count: int, name: str) -> PrefixRows:
        """Check what was given as `memory=` to an adapter with `count` prefixes."""
        if not isinstance(memory, PrefixRows):
            plain = _plain(memory)
            rows: list[Any] = [_plain(row) for row in (plain if isinstance(plain, (list, tuple)) else [plain])]
            rows = [[] if row is None or (isinstance(row, int) and row == -1) else row for row in rows]
            rows = [row if isinstance(row, (list, tuple)) else [row] for row in rows]
            if any(not isinstance(number, int) or isinstance(number, bool) for row in rows for number in row):
                raise ShapeError(
                    f"the memory of adapter {name!r} must be the prefixes of each row: a tensor (b,) of their numbers, "
                    f"-1 for none, or a list such as [0, None, [2, 1]]; got {memory!r:.100}"
                )
            memory = PrefixRows(rows)
        missing = sorted({number for row in memory.numbers for number in row if not 0 <= number < count})
        if missing:
            raise ShapeError(
                f"adapter {name!r} has prefixes 0 to {count - 1}, and {missing} were asked for; a row without one has "
                "-1 or None"
            )
        return memory

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self.numbers)

    def __getitem__(self, rows: int | slice | Sequence[int] | Tensor) -> PrefixRows:
        """Return some rows, by number, slice or list."""
        chosen = torch.arange(len(self.numbers))[rows].reshape(-1).tolist()
        return PrefixRows([self.numbers[row] for row in chosen])

    def nbytes(self) -> int:
        """Return the bytes of the keys and values computed for these rows."""
        return self.cache.nbytes()


def _plain(value: object) -> Any:
    """Return a number or numbers (n,) of a tensor as Python has them, and anything else as it is."""
    return value.tolist() if isinstance(value, Tensor) and value.dim() < 2 else value


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
