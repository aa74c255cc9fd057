"""Hosts whose weights lie in several processes: sharded by FSDP2, or tensor parallel by a plan of transformers.

Sharded (`torch.distributed.fsdp.fully_shard`), every process runs every forward and backward pass: all processes gather
the weights of a layer together, when it is called and again when gradients pass it. A process that has no row left, or
no memory in its rows and therefore nothing to learn, must do so too: the others would wait for it.

Tensor parallel (`from_pretrained(tp_plan="auto")`), the processes compute each layer together, of the same rows.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def shards(host: nn.Module) -> list[FSDPModule]:
    """Return the modules of a host whose weights are sharded over several processes; none where it is not sharded."""
    if "torch.distributed.fsdp" not in sys.modules:  # nothing is sharded
        return []
    from torch.distributed.fsdp import FSDPModule

    return [part for part in host.modules() if isinstance(part, FSDPModule)]


def tensor_parallel_size(host: nn.Module) -> int:
    """Return the number of processes that compute the layers of a host together; 1 where each has all of it."""
    sizes = (getattr(part, "tp_size", None) for part in host.modules())
    return next((size for size in sizes if isinstance(size, int)), 1)


def reshard(host: nn.Module) -> None:
    """Shard every weight again: a call leaves some unsharded, as parameters that the next call replaces."""
    for part in shards(host):
        part.reshard()
