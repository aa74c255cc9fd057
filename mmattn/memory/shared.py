"""`SharedMemory`: a memory of which all rows of text share one part."""

from __future__ import annotations

from torch import Tensor

from mmattn.errors import ShapeError
from mmattn.memory.memory import Memory


class SharedMemory:
    """A memory of two parts, attended to as one: slots that all rows share, and slots of each row.

    Gives the same answers as `Memory.cat([shared.expand(b), own])`, but stores and reads the shared slots only once:
    all rows attend to them together, and both parts are merged exactly by their log-sum-exp (Hydragen, arXiv
    2402.05099).

    Args:
        shared: one row (1, m, e), such as a handbook: a `Memory`, a tensor, or the output of `model.prepare`, with
            cached keys and values.
        own: (b, n, e), a row for each row of text, in the same forms.

    Raises:
        ShapeError: the shared part has several rows.

    >>> import torch
    >>> SharedMemory(torch.randn(1, 11, 24), torch.randn(3, 5, 24))
    SharedMemory(shared=Memory(b=1, m=11, e=24, float32), own=Memory(b=3, m=5, e=24, float32))
    """

    def __init__(self, shared: object, own: object) -> None:
        self.shared, self.own = (Memory(one) if isinstance(one, Tensor) else one for one in (shared, own))
        rows = getattr(self.shared, "batch", 1)
        if rows != 1:
            raise ShapeError(f"the shared part has one row, got {rows}: give a row for each row of text as own=")

    def __repr__(self) -> str:
        return f"SharedMemory(shared={self.shared!r}, own={self.own!r})"
