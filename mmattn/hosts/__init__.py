"""Frozen models that gain a memory: `attach` joins, `load` joins with weights from a folder."""

from __future__ import annotations

from os import PathLike
from typing import overload

from torch import nn

from mmattn.adapters.chunked import ChunkedAdapter
from mmattn.adapters.decoupled import DecoupledAdapter
from mmattn.adapters.gated import GatedAdapter
from mmattn.hosts.handle import Handle, find_handle
from mmattn.hosts.language import LanguageModel
from mmattn.hosts.unet import UNet


@overload
def attach(
    host: nn.Module,
    adapter: GatedAdapter | ChunkedAdapter,
    name: str = ...,
    *,
    path: str | None = ...,
    require_memory: bool = ...,
) -> LanguageModel: ...


@overload
def attach(
    host: nn.Module, adapter: DecoupledAdapter | None = ..., name: str = ..., *, require_memory: bool = ...
) -> UNet: ...


def attach(
    host: nn.Module,
    adapter: GatedAdapter | ChunkedAdapter | DecoupledAdapter | None = None,
    name: str = "default",
    *,
    path: str | None = None,
    require_memory: bool = False,
) -> LanguageModel | UNet:
    """Put an adapter on a frozen host; the host's answers stay bit for bit what they were until it is trained.

    Args:
        host: any causal language model of transformers, any UNet of diffusers with cross-attention, or what `attach`
            returned for it.
        adapter: its settings: a `GatedAdapter` or a `ChunkedAdapter` for a language model, a `DecoupledAdapter` for a
            UNet. A UNet may go without: its own text can go through the core, see `UNet.use_core`.
        name: to switch, combine and save it by.
        path: where the list of decoder layers is, if it cannot be found.
        require_memory: calls without a memory raise instead of giving the host's own answer.

    Raises:
        AttachError: the name is taken, the layers do not exist, or the adapter is for another kind of host.
            ConditionError: the host is compiled, has no weights, or memory would not reach a layer. Nothing is changed
            then.
    """
    if isinstance(host, Handle):
        host = host.host
    handle = find_handle(host) if isinstance(host, nn.Module) else None
    fresh = handle is None
    if handle is None:
        unet = isinstance(adapter, DecoupledAdapter) or (adapter is None and hasattr(host, "attn_processors"))
        handle = UNet(host, require_memory) if unet else LanguageModel(host, path, require_memory)
    assert isinstance(handle, (LanguageModel, UNet))
    if adapter is not None or isinstance(handle, LanguageModel):
        handle.add_adapter(name, adapter)  # type: ignore[arg-type]
    if fresh:
        handle._join()
    return handle


def load(
    host: nn.Module, folder: str | PathLike[str], name: str = "default", *, path: str | None = None
) -> LanguageModel | UNet:
    """Put a saved adapter on a host; on a UNet also the single file of a published IP-Adapter.

    Raises:
        AdapterFileError: the folder does not hold an adapter for this host; nothing is changed.
    """
    from mmattn.hosts.adapter_files import load as load_folder

    return load_folder(host, folder, name, path)
