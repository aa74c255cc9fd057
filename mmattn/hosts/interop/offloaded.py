"""Hosts whose weights lie on the disk between calls: `diffusers.hooks.apply_group_offloading`."""

from __future__ import annotations

from torch import nn


def is_on_disk(host: nn.Module) -> bool:
    """Return whether diffusers keeps weights of a host on the disk: between calls, its parameters have no values."""
    registries = (getattr(part, "_diffusers_hook", None) for part in host.modules())
    hooks = [registry.get_hook("group_offloading") for registry in registries if registry is not None]
    return any(getattr(hook.group, "offload_to_disk_path", None) for hook in hooks if hook is not None)
