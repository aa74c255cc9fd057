"""One attention over a memory that lies in several processes, all of which have the same queries.

What each process found is gathered by all. Gradients as in tensor parallelism (Megatron-LM, arXiv 1909.08053, section
3): each process has the gradient of the whole output, keeps its own part of it, and the gradients of the queries are
summed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return summed(grads[0], ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> tuple[Tensor, ...]:
        ctx.rank = dist.get_rank(group)
        tensor = tensor.contiguous()
        found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, tensor, group=group)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[ctx.rank], None


def sum_gradients(tensor: Tensor, group: Any) -> Tensor:
    """The tensor, whose gradient is the sum of those of all processes.

    Args:
        tensor: the same in each.
        group: of `torch.distributed`.
    """
    found: Tensor = _SumGradients.apply(tensor, group)
    return found


def gather(tensor: Tensor, group: Any) -> tuple[Tensor, ...]:
    """The tensor of each process.

    Args:
        tensor: of one shape in all of them.
        group: of `torch.distributed`.
    """
    found: tuple[Tensor, ...] = _Gather.apply(tensor, group)
    return found


def summed(tensor: Tensor, group: Any) -> Tensor:
    """The sum over all processes, without gradients.

    Args:
        tensor: of one shape in all of them.
        group: of `torch.distributed`.
    """
    tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(tensor, group=group)
    return tensor
