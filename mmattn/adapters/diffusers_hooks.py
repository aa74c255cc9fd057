"""Hooks of diffusers that store a host's weights on the disk, or in 8 bits, while no layer runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def is_on_disk(host: nn.Module) -> bool:
    """Return whether group offloading keeps weights on the disk: between calls, the parameters have no values."""
    return any(getattr(hook.group, "offload_to_disk_path", None) for hook in _hooks(host, "group_offloading"))


def dtype_of(host: nn.Module) -> torch.dtype:
    """Return the dtype of a host's inputs: not that of weights that are kept in float32, or stored in 8 bits."""
    for hook in _hooks(host, "layerwise_casting"):
        return hook.compute_dtype
    dtype = getattr(host, "dtype", None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    return next((one.dtype for one in host.parameters() if one.is_floating_point()), torch.float32)


def _hooks(host: nn.Module, name: str) -> Iterator[Any]:
    for part in host.modules():
        registry: Any = getattr(part, "_diffusers_hook", None)
        if registry is not None and registry.get_hook(name) is not None:
            yield registry.get_hook(name)
