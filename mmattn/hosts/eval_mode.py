"""A host in evaluation mode for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def in_eval_mode(host: nn.Module) -> Iterator[None]:
    """Inside the block every part of a host is in evaluation mode; afterwards each is in the mode that it had.

    Args:
        host: whose `train()` is not called, since some models do more there than set modes.
    """
    modes = [(module, module.training) for module in host.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode
