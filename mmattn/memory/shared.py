"""Memories in parts: one part shared by all rows of text, or slots that lie in several processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from mmattn.errors import ShapeError
from mmattn.memory.memory import Memory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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

    group: ProcessGroup | None = None

    def __init__(self, shared: object, own: object) -> None:
        self.shared, self.own = (Memory(one) if isinstance(one, Tensor) else one for one in (shared, own))
        rows = getattr(self.shared, "batch", 1)
        if rows != 1:
            raise ShapeError(f"the shared part has one row, got {rows}: give a row for each row of text as own=")

    @property
    def parts(self) -> tuple[object, ...]:
        """The shared part, and the rows."""
        return self.shared, self.own

    def __repr__(self) -> str:
        return f"SharedMemory(shared={self.shared!r}, own={self.own!r})"


class ShardedMemory:
    """A memory whose slots lie in several processes: each attends to its own, and all get the answer of the whole.

    Every process gives the same text and the rows of its own slots, in equal calls. The results are merged exactly by
    their log-sum-exps; only outputs and log-sum-exps are sent.

    Training: the gradients of the queries are those of the whole memory in each process, those of what projects the
    memory (its norm, `k_proj`, `v_proj`) are of the slots of this process; sum these over the group before a step.

    Args:
        own: (b, m, e), the slots of this process: a `Memory`, a tensor, or what `model.prepare` made of it; m may
            differ.
        group: of `torch.distributed`; by default all processes.
    """

    def __init__(self, own: object, group: ProcessGroup | None = None) -> None:
        import torch.distributed as dist

        self.own = Memory(own) if isinstance(own, Tensor) else own
        self.group = dist.group.WORLD if group is None else group

    @property
    def parts(self) -> tuple[object, ...]:
        """The slots of this process."""
        return (self.own,)
