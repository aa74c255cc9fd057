"""Tensor files: safetensors with a format name, metadata and checksums, written atomically and checked on reading.

A tensor file is an ordinary safetensors file (any safetensors reader opens it) whose header also carries a format name
and version, one JSON object of metadata, a sha256 per tensor and a sha256 of the header itself. So one changed bit is
found wherever it sits, before its value is used. The header is read and checked against the length of the file before
anything is allocated; nothing in a file is imported, followed or run.

Every write is atomic (see `mmattn.storage.atomic`).
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
from mmattn.storage.atomic import Path, replacing
from mmattn.storage.file_kinds import describe_start, open_regular
from mmattn.storage.json_files import dump_json, parse_json

MAX_HEADER = 16 << 20
CHUNK = 8 << 20

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_EMPTY_HASH = "0" * 64
_PREFIX = b'{"__metadata__":{"header_sha256":"'


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
        "header_sha256": _EMPTY_HASH,
        "format": metadata["format"],
        "format_version": str(version),
        "metadata": dump_json("the metadata of a tensor file", dict(metadata), MAX_HEADER).decode(),
        "sha256": dict.fromkeys(order, _EMPTY_HASH),
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
        file.write(_PREFIX + own_hash + raw[len(_PREFIX) + 64 :])


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


def _header(path: Path, file: IO[bytes], size: int, max_header: int) -> tuple[dict[str, Any], int]:
    """The checked header and where the values begin."""
    start = file.read(512)
    if len(start) < 9 or start[8:9] != b"{":
        raise AdapterFileError(f"cannot read {str(path)!r} as tensors: it looks like {describe_start(start, size)}")
    length = int.from_bytes(start[:8], "little")
    if length > size - 8:
        raise AdapterFileError(f"cannot read {str(path)!r}: it looks like {describe_start(start, size)}")
    if length > max_header:
        raise AdapterFileError(
            f"cannot read {str(path)!r}: its header has {length:,} bytes; at most {max_header:,} are read"
        )
    file.seek(8)
    raw = file.read(length)
    if not raw.startswith(_PREFIX):
        raise AdapterFileError(
            f"cannot read {str(path)!r}: it is a safetensors file that mmattn did not write, or its header was changed"
        )
    own_hash = raw[len(_PREFIX) : len(_PREFIX) + 64]
    blank = _PREFIX + _EMPTY_HASH.encode() + raw[len(_PREFIX) + 64 :]
    if hashlib.sha256(blank).hexdigest().encode() != own_hash:
        raise AdapterFileError(
            f"cannot read {str(path)!r}: its header was changed after it was written (wrong checksum)"
        )
    header = parse_json(f"the header of {str(path)!r}", raw, max_header)
    return header, 8 + length


def _entries(path: Path, header: dict[str, Any], room: int) -> dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]:
    """Dtype, shape and place of each tensor, in the order they stand in the file, which they fill exactly."""
    found = {}
    for name, entry in header.items():
        problem = None
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            problem = "not a dtype, a shape and offsets"
        elif not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
            problem = f"of unknown dtype {str(entry['dtype'])[:40]!r}"
        elif not (_are_sizes(entry["shape"]) and _are_sizes(entry["data_offsets"]) and len(entry["data_offsets"]) == 2):
            problem = "given sizes that are no counts"
        if problem:
            raise AdapterFileError(f"cannot read {str(path)!r}: the tensor {name[:200]!r} is {problem}")
        dtype, shape, (start, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        # A huge size beside a zero fills no bytes, and still overflows the strides.
        if math.prod(shape) * dtype.itemsize != end - start or math.prod(max(size, 1) for size in shape) >= 1 << 60:
            raise AdapterFileError(
                f"cannot read {str(path)!r}: the tensor {name[:200]!r} of shape {list(shape)} does not fill its "
                f"{end - start:,} bytes"
            )
        found[name] = (dtype, shape, start, end)
    found = dict(sorted(found.items(), key=lambda item: item[1][2:]))
    place = 0
    for name, (_, _, start, end) in found.items():
        if start != place:
            raise AdapterFileError(
                f"cannot read {str(path)!r}: the tensor {name[:200]!r} overlaps another, or leaves a gap"
            )
        place = end
    if place != room:
        what = "truncated" if place > room else "followed by bytes that belong to nothing"
        raise AdapterFileError(
            f"cannot read {str(path)!r}: it is {what} ({room:,} bytes of values, expected {place:,})"
        )
    return found


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and len(value) <= 32 and all(type(n) is int and 0 <= n < 1 << 60 for n in value)


def _metadata(
    path: Path, info: object, names: set[str], expect: str, limit: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """The metadata object and the checksums by name."""
    fields = ("header_sha256", "format", "format_version", "metadata", "sha256")
    if not isinstance(info, dict) or set(info) != set(fields) or not all(isinstance(info[key], str) for key in fields):
        raise AdapterFileError(f"cannot read {str(path)!r}: its header lacks one of {', '.join(fields)}, or has more")
    if info["format"] != expect:
        raise AdapterFileError(f"{str(path)!r} holds {info['format'][:80]!r}, and {expect!r} was asked for")
    metadata = parse_json(f"the metadata of {str(path)!r}", info["metadata"].encode(), limit)
    hashes = parse_json(f"the checksums of {str(path)!r}", info["sha256"].encode(), limit)
    if not isinstance(metadata, dict) or metadata.get("format") != expect:
        raise AdapterFileError(f"cannot read {str(path)!r}: its metadata and its header name different formats")
    version = metadata.get("format_version", 1)
    if type(version) is not int or str(version) != info["format_version"]:
        raise AdapterFileError(f"cannot read {str(path)!r}: its metadata and its header name different versions")
    if not isinstance(hashes, dict) or set(hashes) != names:
        raise AdapterFileError(f"cannot read {str(path)!r}: its checksums are not those of its tensors")
    return metadata, hashes


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
        header, place = _header(path, file, size, max_header)
        info = header.pop("__metadata__")
        entries = _entries(path, header, size - place)
        metadata, _ = _metadata(path, info, set(entries), expect_format, max_header)
    return {name: (shape, dtype) for name, (dtype, shape, _, _) in entries.items()}, metadata


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
        header, place = _header(path, file, size, max_header)
        info = header.pop("__metadata__")
        entries = _entries(path, header, size - place)
        metadata, hashes = _metadata(path, info, set(entries), expect_format, max_header)
        whole = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if mapped else None
        for name, (dtype, shape, start, end) in entries.items():
            if whole is None or (place + start) % dtype.itemsize or start == end:
                values = torch.empty(end - start, dtype=torch.uint8)
                file.seek(place + start)
                if file.readinto(values.numpy().data) != end - start:  # type: ignore[attr-defined]
                    raise AdapterFileError(f"cannot read {str(path)!r}: it became shorter while it was read")
            else:
                values = torch.frombuffer(whole, dtype=torch.uint8, count=end - start, offset=place + start)
            if hashlib.sha256(values.numpy().data).hexdigest() != hashes[name]:
                raise AdapterFileError(
                    f"cannot read {str(path)!r}: the values of {name!r} were changed after they were written "
                    "(wrong checksum). Fetch the file again"
                )
            if dtype == torch.bool and values.numel() and int(values.max()) > 1:
                raise AdapterFileError(f"cannot read {str(path)!r}: the tensor {name!r} is bool and holds other bytes")
            tensors[name] = values.view(dtype).view(shape)
            if check_finite:
                check_values(name, tensors[name])
    return tensors, metadata


def check_values(name: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity in a tensor.

    Args:
        name: of the tensor, in the message.
        tensor: of any dtype.

    Raises:
        NonFiniteError: the tensor holds NaN or infinity.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    low, high = torch.aminmax(tensor)  # NaN spreads through it: as safe as isfinite, and twenty times as fast
    if not (math.isfinite(low) and math.isfinite(high)):
        wrong = int((~tensor.isfinite()).sum())
        raise NonFiniteError(f"the tensor {name!r} has {wrong} values that are NaN or infinite, of {tensor.numel()}")
