"""Rectangular attention (KBLaM, arXiv 2410.10450, section 3.2 and equation 4): a memory in the host's own softmax.

With q, K, V the queries, keys and values of a host's attention, M (b, m, e) the memory and α a gate that starts at 0:

    o = attend(q, K, V)
    y = o + tanh(α) · (attend(q, [norm(M) Wk'; K], [norm(M) Wv'; V]) − o)

before the host's own output projection. The keys of a memory have no position: slots have no order, the text stands
where it stood, and what a layer sees of the text by a window it sees of a memory always.

Departures from the paper: the gate, so that a fresh adapter is exactly nothing; the paper's attention is tanh(α) = 1.
The queries are the host's own, as it turned them to their positions, where the paper trains a copy Wq' of the host's
query projection: a linear map of the queries of a head would be one of its keys again. With `length_norm`, C of the
paper's section 3.2, log C − log m is added to the scores of m slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mmattn.adapters.protocols import Host, Site
from mmattn.adapters.settings import chosen_sites, default_norm, random_memory, settle, settle_layers
from mmattn.errors import check_choice, check_float
from mmattn.memory import Memory

GATES = ("scalar", "head")


@dataclass(frozen=True)
class JoinedAdapter:
    """Settings of rectangular attention: slots as further keys and values of a language model's own attention.

    Args:
        memory_dim: e, width of the memory.
        every: slots are joined at every n-th host layer (layers n-1, 2n-1, …); 4 where `layers` is not given
            either, or the depth of a host with fewer.
        layers: or the explicit list of host layers, counted from 0.
        gate: "scalar" or "head": how many numbers the gate of a layer has.
        length_norm: C, rescales the total weight of the slots to that of C identical slots; None: no rescaling.
        memory_norm: normalise the memory; None is where it is 12 wide or more: of few numbers a norm leaves little more
            than signs.

    >>> JoinedAdapter(memory_dim=24, layers=[3, 1]).layers
    (1, 3)
    """

    memory_dim: int
    every: int | None = None
    layers: tuple[int, ...] | None = None
    gate: str = "scalar"
    length_norm: float | None = None
    memory_norm: bool | None = None

    kind: ClassVar[str] = "joined"
    positions: ClassVar[tuple[str, ...]] = ("joined",)
    example_call: ClassVar[str] = "model.generate(input_ids, memory=memory)"

    def __post_init__(self) -> None:
        settle_layers(self)
        check_choice("gate", self.gate, GATES)
        if self.length_norm is not None:
            check_float("length_norm", self.length_norm, at_least=1)
        settle(self, memory_norm=default_norm(self.memory_norm, self.memory_dim))

    def sites(self, host: Host) -> list[Site]:
        """Return the chosen attention layers."""
        return chosen_sites(self, host.sites("joined"))

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> Memory:
        """Return a random memory (rows, 5, e), some slots masked."""
        return random_memory(generator, rows, self.memory_dim)
