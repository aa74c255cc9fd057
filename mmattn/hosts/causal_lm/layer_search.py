"""Where the decoder layers of a causal language model are: found by looking, with a table for exceptions only."""

from __future__ import annotations

from torch import nn

from mmattn.adapters.language_models import depth_of
from mmattn.errors import AttachError

# model_type -> path of the list of decoder layers, for hosts whose layers are not the one list of that length.
EXCEPTIONS: dict[str, str] = {}


def find_layers(host: nn.Module, path: str | None = None) -> tuple[str, nn.ModuleList]:
    """The path and list of decoder layers of a host.

    Args:
        host: the language model.
        path: where the list is; by default the outermost `nn.ModuleList` that is as long as the config says.

    Raises:
        AttachError: none or several fit; the message lists what was found.
    """
    lists = {name: module for name, module in host.named_modules() if isinstance(module, nn.ModuleList) and len(module)}
    named = [f"{name} ({len(module)} × {type(module[0]).__name__})" for name, module in lists.items()]
    found = ", ".join(named) or "none"
    if path is None:
        path = EXCEPTIONS.get(getattr(getattr(host, "config", None), "model_type", ""))
    if path is not None:
        if path not in lists:
            raise AttachError(f"no list of layers at {path!r} in {type(host).__name__}; lists found: {found}")
        return path, lists[path]
    depth = depth_of(host)
    fitting = [name for name, module in lists.items() if depth is None or len(module) == depth]
    outer = [name for name in fitting if not any(name.startswith(other + ".") for other in fitting if other != name)]
    if depth is None or len(outer) != 1:
        raise AttachError(
            f"cannot tell which list holds the decoder layers of {type(host).__name__} (num_hidden_layers = {depth}); "
            f"lists found: {found}; name one with path="
        )
    return outer[0], lists[outer[0]]
