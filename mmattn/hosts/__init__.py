"""Frozen models that gain a memory: `attach` joins, `load` joins with weights from a folder."""

from __future__ import annotations

from os import PathLike

from torch import nn

from mmattn.adapters.gated import GatedAdapter
from mmattn.hosts.handle import Handle, find_handle
from mmattn.hosts.language import LanguageModel


def attach(
    host: nn.Module,
    adapter: GatedAdapter,
    name: str = "default",
    *,
    path: str | None = None,
    require_memory: bool = False,
) -> LanguageModel:
    """Put an adapter on a frozen host; the host's answers stay bit for bit what they were until it is trained.

    Args:
        host: any causal language model of transformers, or what `attach` returned for it.
        adapter: its settings. name: to switch, combine and save it by.
        path: where the list of decoder layers is, if it cannot be found.
        require_memory: calls without a memory raise instead of giving the host's own answer.

    Raises:
        AttachError: the name is taken or the layers do not exist. ConditionError: the host is compiled, has no weights,
            or memory would not reach a layer. Nothing is changed then.
    """
    if isinstance(host, Handle):
        host = host.host
    handle = find_handle(host) if isinstance(host, nn.Module) else None
    if isinstance(handle, LanguageModel):
        handle.add_adapter(name, adapter)
        return handle
    handle = LanguageModel(host, path, require_memory)
    handle.add_adapter(name, adapter)
    handle._join()
    return handle


def load(
    host: nn.Module, folder: str | PathLike[str], name: str = "default", *, path: str | None = None
) -> LanguageModel:
    """Put a saved adapter on a host.

    Raises:
        AdapterFileError: the folder does not hold an adapter for this host; nothing is changed.
    """
    from mmattn.hosts.adapter_files import load as load_folder

    return load_folder(host, folder, name, path)
