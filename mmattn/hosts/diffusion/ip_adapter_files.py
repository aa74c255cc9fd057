"""Files of published IP-Adapters: their tensors by name, read and written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from os import PathLike

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from mmattn.errors import AdapterFileError
from mmattn.storage.files import replacing
from mmattn.storage.safetensors import check_values


def read_file(path: str | PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a checkpoint by dotted name; a `.bin` is unpickled with `weights_only`.

    Args:
        path: the file.

    Raises:
        AdapterFileError: it cannot be read, or is no dictionary of tensors.
    """
    try:
        if not os.fspath(path).endswith((".bin", ".pt", ".pth")):
            return load_file(path)
        given = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torn pickles raise all there is
        raise AdapterFileError(f"{str(path)!r} cannot be read as an IP-Adapter: {error}; fetch it again") from error
    flat = {}
    for part, tensors in given.items() if isinstance(given, dict) else ():
        for name, value in tensors.items() if isinstance(tensors, dict) else ():
            flat[f"{part}.{name}"] = value
    if not flat or not all(isinstance(value, Tensor) for value in flat.values()):
        raise AdapterFileError(f"{str(path)!r} holds no 'image_proj' and 'ip_adapter' with tensors")
    return flat


def check_tensors(path: str | PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are no weights.

    Args:
        path: of the file.
        tensors: by name.

    Raises:
        AdapterFileError: one is not floating point.
        NonFiniteError: one holds NaN or infinity.
    """
    for name, value in tensors.items():
        if not value.is_floating_point():
            raise AdapterFileError(f"{str(path)!r}: the tensor {name!r} is {value.dtype}, not floating point")
        check_values(name, value)


def write_file(path: str | PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as one safetensors file, atomically.

    Args:
        path: the file.
        tensors: by name.

    Raises:
        OSError: the folder is missing or not writable; a file that was there is unchanged.
    """
    for key, value in tensors.items():
        check_values(key, value)
    with replacing(path) as file:
        file.write(save(dict(tensors)))
        file.flush()
        os.fsync(file.fileno())
