"""Sizes, embeddings, dtype, device and cache argument of a host, also where hooks of diffusers store its weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.errors import AttachError, ShapeError

#: Names of transformers' cache argument: `cache` since 5.24, the others before.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def text_config(lm: nn.Module) -> object:
    """Return the part of a model's config that describes its text decoder, or None."""
    config: Any = getattr(lm, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def depth_of(lm: nn.Module) -> int | None:
    """Return the number of decoder layers by the config, or None."""
    return getattr(text_config(lm), "num_hidden_layers", None)


def width_of(lm: nn.Module) -> int:
    """Return the width d of the hidden states by the config."""
    width = getattr(text_config(lm), "hidden_size", None)
    if not isinstance(width, int):
        raise AttachError(f"the config of {type(lm).__name__} has no hidden_size: is it a language model?")
    return width


def embeddings_of(lm: nn.Module) -> nn.Module:
    """Return the embeddings of a model's tokens, the model itself where it does not say."""
    get_embeddings: Any = getattr(lm, "get_input_embeddings", None)
    try:
        return lm if get_embeddings is None else get_embeddings()
    except NotImplementedError:  # as models of several codebooks say
        return lm


def check_ids(what: str, ids: Sequence[int], lm: nn.Module) -> None:
    """Raise ShapeError for ids that the vocabulary of a model does not have."""
    size = getattr(text_config(lm), "vocab_size", None)
    if size is not None and not 0 <= min(ids) <= max(ids) < size:
        raise ShapeError(
            f"{what} has ids from {min(ids)} to {max(ids)}, and the vocabulary of {type(lm).__name__} has {size}: make "
            "them with the host's own tokenizer"
        )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; from the CPU it is copied out of pinned memory, without a wait."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not torch.compiler.is_compiling():
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def device_of(module: nn.Module) -> torch.device:
    """Return the device that a module computes on, also of an offloaded one."""
    first = next(module.parameters(), None)
    if first is not None and first.device.type != "meta":
        return first.device
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((device for device in devices if device is not None), "cpu"))


def given_cache(values: Mapping[str, object]) -> object:
    """Return the cache among the arguments of a call, or in an output; None if there is none.

    >>> given_cache({"input_ids": [1, 2], "cache": "of the text so far"})
    'of the text so far'
    """
    # Asked for by the names that are there: outputs of transformers log that a name is deprecated when they are asked.
    return next((values[name] for name in values if name in CACHE_NAMES and values[name] is not None), None)


def call_by_name(model: Callable[..., Any], **kwargs: object) -> Any:
    """Call a model and return its outputs by name, also where its config says return_dict=False."""
    by_name = getattr(getattr(model, "config", None), "return_dict", True)
    return model(**kwargs) if by_name else model(**kwargs, return_dict=True)


def cache_name(model: nn.Module) -> str:
    """Return the name under which a model takes its cache."""
    names = inspect.signature(model.forward).parameters
    return next((name for name in ("past_key_values", "cache_params", "cache") if name in names), "past_key_values")


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
