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

from dataclasses import dataclass
from typing import ClassVar

import torch

from mmattn.adapters.protocols import Host, Site
from mmattn.adapters.resampler import Resampler, settle_resampler
from mmattn.adapters.settings import default_norm, random_memory, settle
from mmattn.errors import check_bool, check_choice, check_int
from mmattn.memory import Memory

PROJECTIONS = ("mlp", "linear")


@dataclass(frozen=True)
class InsertedAdapter:
    """Settings of a memory that is inserted as tokens before the text of a causal language model.

    Args:
        memory_dim: e, width of the memory.
        projection: "mlp", two linear layers with GELU between them, as in LLaVA 1.5; or "linear", as in LLaVA.
        gate: what the tokens change in the attention of each layer is weighed by tanh of a number that starts at 0, so
            that a fresh adapter is the host. False is LLaVA's own form, in which even a fresh one changes every answer:
            it is not the identity at the start, and only where this is asked for.
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
        settle_resampler(self)
        settle(self, memory_norm=default_norm(self.memory_norm, self.memory_dim))

    def sites(self, host: Host) -> list[Site]:
        """Return the attention of every layer."""
        return host.sites("joined")

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> Memory:
        """Return a random memory (rows, 5, e), some slots masked."""
        return random_memory(generator, rows, self.memory_dim)
