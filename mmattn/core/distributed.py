"""Attention over a memory that lies in several processes, all of which have the same queries.

The results of all processes are gathered by all. Gradients as in tensor parallelism (Megatron-LM, arXiv 1909.08053,
section 3): each process has the gradient of the whole output, keeps its own part of it, and the gradients of the
queries are summed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def sum_gradients(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return a tensor that is the same in each process, and sum its gradients over all of them."""
    if group is None:
        return tensor
    return _SumGradients.apply(tensor, group)


def gather(tensor: Tensor, group: ProcessGroup) -> tuple[Tensor, ...]:
    """Return the tensor of each process, of one shape in all of them."""
    return _Gather.apply(tensor, group)


def summed(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over all processes, without gradients."""
    tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(tensor, group=group)
    return tensor


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return summed(grads[0], ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> tuple[Tensor, ...]:
        ctx.rank = dist.get_rank(group)
        tensor = tensor.contiguous()
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, tensor, group=group)
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[ctx.rank], None
