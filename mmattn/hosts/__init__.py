"""Frozen models that gain a memory: `attach` joins, `load` and `load_published` join with weights from files."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import overload

from torch import Tensor, nn

from mmattn.adapters.chunked import ChunkedAdapter
from mmattn.adapters.composed import ComposedAdapter
from mmattn.adapters.decoupled import DecoupledAdapter
from mmattn.adapters.gated import GatedAdapter
from mmattn.hosts.adapted import AdaptedModel, find_adapted
from mmattn.hosts.causal_lm.model import AdaptedCausalLM
from mmattn.hosts.interop.quantised import stored
from mmattn.hosts.unet.model import AdaptedUNet


@overload
def attach(
    host: nn.Module,
    adapter: GatedAdapter | ChunkedAdapter | ComposedAdapter,
    name: str = ...,
    *,
    path: str | None = ...,
    require_memory: bool = ...,
) -> AdaptedCausalLM: ...


@overload
def attach(
    host: nn.Module, adapter: DecoupledAdapter | None = ..., name: str = ..., *, require_memory: bool = ...
) -> AdaptedUNet: ...


def attach(
    host: nn.Module,
    adapter: GatedAdapter | ChunkedAdapter | ComposedAdapter | DecoupledAdapter | None = None,
    name: str = "default",
    *,
    path: str | None = None,
    require_memory: bool = False,
) -> AdaptedCausalLM | AdaptedUNet:
    """Put an adapter on a frozen host; the host's answers stay bit for bit what they were until it is trained.

    Args:
        host: any causal language model of transformers, any UNet of diffusers with cross-attention, or what `attach`
            returned for it.
        adapter: its settings: a `GatedAdapter`, `ChunkedAdapter` or `ComposedAdapter` for a language model, a
            `DecoupledAdapter` for a UNet. A UNet may go without: its own text can go through the core, see
            `AdaptedUNet.use_core`.
        name: to switch, combine and save it by.
        path: where the list of decoder layers is, if it cannot be found.
        require_memory: calls without a memory raise instead of giving the host's own answer.

    Raises:
        AttachError: the name is taken, the layers do not exist, or the adapter is for another kind of host.
            ConditionError: the host is compiled, has no weights, its 4-bit weights were laid out anew by an earlier
            call, or memory would not reach a layer. Nothing is changed then.
    """
    if isinstance(host, AdaptedModel):
        host = host.host
    handle = find_adapted(host) if isinstance(host, nn.Module) else None
    fresh = handle is None
    if handle is None:
        unet = isinstance(adapter, DecoupledAdapter) or (adapter is None and hasattr(host, "attn_processors"))
        handle = AdaptedUNet(host, require_memory) if unet else AdaptedCausalLM(host, path, require_memory)
    assert isinstance(handle, (AdaptedCausalLM, AdaptedUNet))
    if adapter is not None or isinstance(handle, AdaptedCausalLM):
        with stored(handle.host):
            handle.add_adapter(name, adapter)  # type: ignore[arg-type]
    if fresh:
        handle._join()
    return handle


def load(
    host: nn.Module,
    folder: str | PathLike[str],
    name: str = "default",
    *,
    path: str | None = None,
    revision: str | None = None,
) -> AdaptedCausalLM | AdaptedUNet:
    """Put a saved adapter on a host; on a UNet also the single file of a published IP-Adapter.

    Args:
        folder: as `save_adapter` wrote it, or the name of a repository on the Hugging Face hub, "org/name".
        name, path: as in `attach`.
        revision: branch, tag or commit of that repository.

    Raises:
        AdapterFileError: the folder does not hold an adapter for this host; nothing is changed.
    """
    from mmattn.hosts.adapter_files import load as load_folder
    from mmattn.hosts.interop.hub import local_folder

    return load_folder(host, local_folder(folder, revision), name, path)


def load_published(
    host: nn.Module,
    family: str,
    weights: Mapping[str, Tensor] | str | PathLike[str],
    name: str = "default",
    *,
    look: str = "latest",
    media_token: int | None = None,
    num_heads: int | None = None,
    path: str | None = None,
) -> AdaptedCausalLM:
    """Put the gated cross-attention of a published model on a host that holds the rest of its text part.

    The memory is what the published blocks attend to: for Idefics the states of its vision model, resampled where it
    has a resampler, for Mllama those behind `multi_modal_projector`, for OpenFlamingo those behind its perceiver; with
    segments that number the images of each row.

    Args:
        host: for Idefics the Llama with its `layers`; for Mllama the Llama made of the layers that are not
            cross-attention, in their order; for OpenFlamingo its language model.
        family: "idefics", "mllama" or "openflamingo".
        weights: a state dict, a `.safetensors` or `.bin` file, or a folder of safetensors files; other tensors than
            those of the blocks are left alone.
        name, path: as in `attach`.
        look: what a token sees: the "latest" image, all "previous" ones, or "all".
        media_token: id of the token that stands for an image; or give `images` at each call.
        num_heads: where it cannot be read off: OpenFlamingo with heads of another width than 64.

    Raises:
        AdapterFileError: tensors are missing, unknown or of another shape, the host is not the one they were made
            for, or its feed-forward is no SwiGLU (Idefics, Mllama). AttachError: the name is taken. Nothing is changed.
    """
    from mmattn.hosts.published import load_published as load_weights

    model = load_weights(
        host, family, weights, name, look=look, media_token=media_token, num_heads=num_heads, path=path
    )
    assert isinstance(model, AdaptedCausalLM)
    return model
