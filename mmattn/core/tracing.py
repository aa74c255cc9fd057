"""Checks of a tensor under tracing: readable values, finite values, the dtype of autocast."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The innermost transform of `torch.func` (vmap, grad, jvp, …) that is under way, or None; a compiler cannot trace it.
transform_under_way = torch._C._functorch.peek_interpreter_stack


def readable(tensor: Tensor) -> bool:
    """Return whether a tensor has values that Python may branch on.

    It has none on the meta device, as a fake tensor, while a graph is traced or a CUDA graph captured, or inside a
    transform of `torch.func`.
    """
    return (
        not torch.compiler.is_compiling()
        # Fake tensors and those of other tracers are subclasses.
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type != "meta"
        and transform_under_way() is None
        and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def may_read(tensor: Tensor) -> bool:
    """Return whether a tensor is readable without waiting: on the CPU, where no queue of kernels must be finished."""
    return tensor.device.type == "cpu" and readable(tensor)


def autocast(tensor: Tensor) -> bool:
    """Return whether autocast is on for the device of a tensor."""
    # torch knows no autocast on the meta device, and raises when asked.
    return tensor.device.type != "meta" and torch.is_autocast_enabled(tensor.device.type)


def all_finite(first: Tensor, *more: Tensor) -> bool:
    """Return whether no value of some tensors is NaN or infinite; values whose sum overflows count as infinite, too."""
    # A sum is finite only if every term is, and reads the tensor once without an intermediate.
    wide = torch.float64 if first.dtype is torch.float64 else torch.float32
    total = first.detach().sum(dtype=wide)
    for one in more:
        if one is not first:
            total += one.detach().sum(dtype=wide)
    return math.isfinite(total)
