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

from dataclasses import dataclass
from typing import ClassVar

import torch

from mmattn.adapters.prefix.rows import PrefixRows
from mmattn.adapters.protocols import Host, Site
from mmattn.errors import check_int


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
        """Return the attention of every layer."""
        return host.sites("joined")

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> PrefixRows:
        """Return a random prefix for each row."""
        numbers = torch.randint(self.num_prefixes, (rows,), generator=generator, device=generator.device)
        return PrefixRows.of(numbers, self.num_prefixes, "default")
