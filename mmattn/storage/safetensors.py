"""Tensor files: safetensors with a format name, metadata and checksums, written atomically and checked on reading.

A tensor file is an ordinary safetensors file (any safetensors reader opens it) whose header also carries a format name
and version, one JSON object of metadata, a sha256 per tensor and a sha256 of the header itself. So one changed bit is
found wherever it sits, before its value is used. The header is read and checked against the length of the file before
anything is allocated; nothing in a file is imported, followed or run.

Every write is atomic (see `mmattn.storage.files`).
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Mapping
from typing import IO, Any

import torch
from torch import Tensor

from mmattn.errors import AdapterFileError, ConfigError, NonFiniteError, check_int
from mmattn.storage.file_kinds import open_regular
from mmattn.storage.files import Path, replacing
from mmattn.storage.json_files import dump_json
from mmattn.storage.tensor_layout import (
    DTYPES,
    EMPTY_HASH,
    MAX_HEADER,
    NAMES,
    PREFIX,
    ReadRange,
    TensorPlace,
    read_layout,
)

CHUNK = 8 << 20


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors and one JSON object of metadata to one safetensors file, atomically.

    Views and tensors that share storage are written as independent copies.

    Args:
        path: the file to be written.
        tensors: by name, dense, on any device.
        metadata: plain JSON with a text `format`; it may have an int `format_version` (1 otherwise).

    Raises:
        ConfigError: metadata that is not plain JSON, or a tensor that is not dense, has no values or an unknown dtype.
        OSError: the disk is full, the folder is missing or not writable; what was at `path` is unchanged.

    >>> import os, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "gate.safetensors")
    ...     write_tensors(path, {"gate": torch.tensor([0.5])}, {"format": "example", "layer": 3})
    ...     tensors, metadata = read_tensors(path, "example")
    >>> tensors["gate"], metadata["layer"]
    (tensor([0.5000]), 3)
    """
    for name, tensor in tensors.items():
        _check_writable(name, tensor)
    if not isinstance(metadata.get("format"), str):
        raise ConfigError(f"the metadata of a tensor file must name its format, got {metadata.get('format')!r}")
    version = check_int("format_version", metadata.get("format_version", 1))
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    info = {
        "header_sha256": EMPTY_HASH,
        "format": metadata["format"],
        "format_version": str(version),
        "metadata": dump_json("the metadata of a tensor file", dict(metadata), MAX_HEADER).decode(),
        "sha256": dict.fromkeys(order, EMPTY_HASH),
    }
    header: dict[str, Any] = {"__metadata__": info}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].numel() * tensors[name].dtype.itemsize
        header[name] = {
            "dtype": NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }

    def encode() -> bytes:
        shown = {**header, "__metadata__": {**info, "sha256": json.dumps(info["sha256"], ensure_ascii=False)}}
        raw = dump_json("the header of a tensor file", shown, MAX_HEADER)
        return raw + b" " * (-len(raw) % 8)

    # Hashed from the very bytes that are written: a training thread may change the tensors meanwhile.
    length = len(encode())
    with replacing(path) as file:
        file.write(length.to_bytes(8, "little") + bytes(length))
        for name in order:
            digest = hashlib.sha256()
            values = _bytes_of(tensors[name].detach().cpu())
            for i in range(0, values.numel(), CHUNK):
                piece = values[i : i + CHUNK].numpy().tobytes()
                digest.update(piece)
                file.write(piece)
            info["sha256"][name] = digest.hexdigest()
        raw = encode()
        own_hash = hashlib.sha256(raw).hexdigest().encode()
        file.seek(8)
        file.write(PREFIX + own_hash + raw[len(PREFIX) + 64 :])


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _check_writable(name: object, tensor: object) -> None:
    if not isinstance(name, str) or not name or name == "__metadata__":
        raise ConfigError(f"a tensor's name must be text, and not '__metadata__'; got {name!r}")
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name!r} must be a tensor to be saved, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise ConfigError(
            f"{name!r} must be a dense tensor with values to be saved, got {tensor.layout} on {tensor.device}"
        )
    if tensor.dtype not in NAMES:
        raise ConfigError(f"{name!r} has dtype {tensor.dtype}, which cannot be saved; convert it to one of {[*DTYPES]}")


def read_header(
    path: Path, expect_format: str, max_header: int = MAX_HEADER
) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], dict[str, Any]]:
    """Read the shape and dtype of each tensor, and the metadata, without the values.

    Args:
        path: of the file.
        expect_format: the format name that the file must have.
        max_header: bytes of the header at most.

    Raises:
        AdapterFileError: the file is torn, of another format or something else, or its header was changed.
    """
    with open_regular(path) as (file, size):
        layout = read_layout(path, _ranges(file), size, expect_format, max_header)
    return {name: (place.shape, place.dtype) for name, place in layout.places.items()}, layout.metadata


def read_tensors(
    path: Path, expect_format: str, *, check_finite: bool = True, mapped: bool = False, max_header: int = MAX_HEADER
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_tensors` wrote: the tensors, on the CPU, and the metadata.

    Args:
        path: of the file.
        expect_format: the format name that the file must have.
        check_finite: refuse NaN and infinity.
        mapped: map the values from the file into memory, so that the system reads what is used; they are read once for
            their checksums. Writing to such a tensor does not change the file.
        max_header: bytes of the header at most.

    Raises:
        AdapterFileError: the file is torn, changed, of another format or something else; the message says what it is.
        NonFiniteError: a tensor holds NaN or infinity, and `check_finite` is True.
    """
    tensors = {}
    with open_regular(path) as (file, size):
        layout = read_layout(path, _ranges(file), size, expect_format, max_header)
        whole = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if mapped else None
        for name, place in layout.places.items():
            count = place.end - place.start
            if whole is None or place.start % place.dtype.itemsize or not count:
                values = torch.empty(count, dtype=torch.uint8)
                file.seek(place.start)
                if file.readinto(values.numpy().data) != count:  # type: ignore[attr-defined]
                    raise AdapterFileError(f"cannot read {str(path)!r}: it became shorter while it was read")
            else:
                values = torch.frombuffer(whole, dtype=torch.uint8, count=count, offset=place.start)
            tensors[name] = as_tensor(path, name, place, values, check_finite=check_finite)
    return tensors, layout.metadata


def as_tensor(
    path: Path, name: str, place: TensorPlace, values: Tensor, *, check_sha256: bool = True, check_finite: bool = False
) -> Tensor:
    """A tensor from its bytes, checked; they are gone through once, however much is checked.

    Args:
        path: of the file, in messages.
        name: of the tensor.
        place: of the tensor in the file.
        values: (n,) uint8, its bytes.
        check_sha256: compare their checksum.
        check_finite: refuse NaN and infinity.

    Raises:
        AdapterFileError: the bytes are not those that were written.
        NonFiniteError: the tensor holds NaN or infinity, and `check_finite` is True.
    """
    digest, finite = hashlib.sha256(), True
    if check_sha256 or check_finite:
        for start in range(0, values.numel(), CHUNK):
            piece = values[start : start + CHUNK]
            if check_sha256:
                digest.update(piece.numpy().data)
            finite = finite and (not check_finite or _is_finite(piece.view(place.dtype)))
    if check_sha256 and digest.hexdigest() != place.sha256:
        raise AdapterFileError(
            f"cannot read {str(path)!r}: the values of {name!r} were changed after they were written "
            "(wrong checksum). Fetch the file again"
        )
    if place.dtype == torch.bool and values.numel() and int(values.max()) > 1:
        raise AdapterFileError(f"cannot read {str(path)!r}: the tensor {name!r} is bool and holds other bytes")
    tensor = values.view(place.dtype).view(place.shape)
    if not finite:
        check_values(name, tensor)
    return tensor


def _ranges(file: IO[bytes]) -> ReadRange:
    def read(start: int, end: int) -> bytes:
        file.seek(start)
        return file.read(end - start)

    return read


def check_values(name: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity in a tensor.

    Args:
        name: of the tensor, in the message.
        tensor: of any dtype.

    Raises:
        NonFiniteError: the tensor holds NaN or infinity.
    """
    if not _is_finite(tensor):
        wrong = int((~(tensor.float() if tensor.dtype.itemsize == 1 else tensor).isfinite()).sum())
        raise NonFiniteError(f"the tensor {name!r} has {wrong} values that are NaN or infinite, of {tensor.numel()}")


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor.float() if tensor.dtype.itemsize == 1 else tensor)
    return math.isfinite(low) and math.isfinite(high)  # NaN spreads through aminmax, which is faster than isfinite
