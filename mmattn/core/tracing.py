"""What may be done with a tensor here: whether its values can be read, and whether autocast chooses its dtype."""

from __future__ import annotations

import torch
from torch import Tensor

# The innermost transform of `torch.func` (vmap, grad, jvp, …) that is under way, or None; a compiler cannot trace it.
transform_under_way = torch._C._functorch.peek_interpreter_stack


def readable(tensor: Tensor) -> bool:
    """Whether a tensor has values that Python may branch on.

    It has none on the meta device, as a fake tensor, while a graph is traced, or inside a transform of `torch.func`.
    """
    return (
        not torch.compiler.is_compiling()
        # Fake tensors and those of other tracers are subclasses.
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type != "meta"
        and transform_under_way() is None
    )


def may_read(tensor: Tensor) -> bool:
    """Whether a tensor is readable and nothing waits for it: on the CPU, where no queue of kernels must be finished."""
    return tensor.device.type == "cpu" and readable(tensor)


def autocast(tensor: Tensor) -> bool:
    """Whether autocast is on for the device of a tensor."""
    # torch knows no autocast on the meta device, and raises when asked.
    return tensor.device.type != "meta" and torch.is_autocast_enabled(tensor.device.type)
