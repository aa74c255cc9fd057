"""Passages that the host itself has read, one by one, before the text of a call (arXiv 2409.15355, section 2).

Keys and values of every layer, as the host computed them of each passage alone, stand before those of the text, and
share its softmax. Keys are turned to the positions where the passages now stand; the text begins after the last one
and sees all of them. One leading passage is what it would be in the prompt. Nothing is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NoReturn

import torch

from mmattn.adapters.protocols import Host, Site
from mmattn.errors import ConfigError


@dataclass(frozen=True)
class PassageAdapter:
    """Settings of passages as keys and values of the host; `mmattn.hosts.PassageCache` reads and selects them.

    It has no weights, so that there is nothing to train: what can be trained is the host, to read passages that do not
    see each other.

    >>> PassageAdapter().kind
    'passages'
    """

    kind: ClassVar[str] = "passages"
    positions: ClassVar[tuple[str, ...]] = ("joined",)
    example_call: ClassVar[str] = "model.generate(input_ids, memory=passages.select([[0]]))"
    reads: ClassVar[str] = "what the host itself has read"
    memory_dim: ClassVar[int] = 0

    def sites(self, host: Host) -> list[Site]:
        """Return the attention of every layer."""
        return host.sites("joined")

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> NoReturn:
        """Raise ConfigError: the host itself computes passages."""
        raise ConfigError(
            "passages are read by the host, and none can be made up without it: make a "
            "mmattn.hosts.PassageCache(model), add passages, and select some"
        )
