"""Weights of a network from a safetensors file of another library: complete, finite, and of this network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mmattn.errors import AdapterFileError, ConfigError


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file.

    Args:
        path: of the file.

    Raises:
        AdapterFileError: the file is missing, a pickle, damaged, empty, or holds NaN or infinity.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(path)
    if file.suffix.lower() != ".safetensors":
        raise AdapterFileError(
            f"weights are read from .safetensors files, got {str(path)!r}: a pickle (.pt, .pth, .bin) can run code. "
            "Convert it once, where you trust it: safetensors.torch.save_file(torch.load(path, weights_only=True), new)"
        )
    if not file.is_file():
        raise AdapterFileError(f"there is no weights file {str(path)!r}")
    try:
        weights = load_file(file)
    except (SafetensorError, OSError) as error:
        raise AdapterFileError(f"{str(path)!r} is not a readable safetensors file: {error}") from error
    if not weights:
        raise AdapterFileError(f"{str(path)!r} holds no tensors; get the file again")
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise AdapterFileError(f"{name} in {str(path)!r} has NaN or infinite values; get the file again")
    return weights


def is_weights_path(weights: object) -> bool:
    """Whether `weights` is a path rather than the name of released weights.

    Args:
        weights: as the user gave them.

    Raises:
        ConfigError: neither text nor a path.
    """
    if isinstance(weights, os.PathLike):
        return True
    if not isinstance(weights, str):
        raise ConfigError(f"weights must be a name or a path, got {type(weights).__name__}")
    return os.sep in weights or "/" in weights or Path(weights).suffix in (".safetensors", ".pt", ".pth", ".bin")


def refuse_keys(path: str | os.PathLike[str], name: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Refuse a weights file whose tensors are not those of a network.

    Args:
        path: of the file, in the message.
        name: of the network, in the message.
        missing: names of tensors that the network needs and the file lacks.
        unexpected: names of tensors that the file holds and the network lacks.

    Raises:
        AdapterFileError: either list has an entry; the message has up to five of each.
    """
    faults = [
        f"{len(keys)} {what}: {', '.join(keys[:5])}{', …' if len(keys) > 5 else ''}"
        for what, keys in (("missing", missing), ("unexpected", unexpected))
        if keys
    ]
    if faults:
        raise AdapterFileError(
            f"{os.fspath(path)!r} does not hold the weights of {name} ({'; '.join(faults)}); give the name of the "
            "network the file was made for, or rename its tensors"
        )
