"""Tensor files: safetensors with a format name, metadata and checksums, written atomically and checked on reading.

A tensor file is an ordinary safetensors file (any safetensors reader opens it) whose header also carries a format name
and version, one JSON object of metadata, a sha256 per tensor and a sha256 of the header itself. So one changed bit is
found wherever it sits, before its value is used. The header is read and checked against the length of the file before
anything is allocated; nothing in a file is imported, followed or run.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

from mmattn.errors import AdapterFileError, ConfigError, NonFiniteError
from mmattn.storage.files import Path, describe_start, open_regular, replacing
from mmattn.storage.json_files import dump_json, parse_json

#: Of every tensor file; all begin at 1 with mmattn 1.0.
FORMAT_VERSION = 1
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
_INFO = ("header_sha256", "format", "format_version", "metadata", "sha256")

#: The bytes of a file from one place up to another; fewer where it ends.
ReadRange = Callable[[int, int], bytes]


@dataclass(frozen=True)
class TensorPlace:
    """Dtype, shape and sha256 of a tensor, and its bytes `start` to `end` of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    sha256: str


@dataclass(frozen=True)
class TensorLayout:
    """The checked header of a tensor file; its sha256 stands for the content of the whole file."""

    places: dict[str, TensorPlace]
    metadata: dict[str, Any]
    sha256: str


# Writing ---------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors and one JSON object of metadata to one safetensors file, atomically.

    Views and tensors that share storage are written as independent copies.

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
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    info = {
        "header_sha256": _EMPTY_HASH,
        "format": metadata["format"],
        "format_version": str(metadata.get("format_version", FORMAT_VERSION)),
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
        text = {**header, "__metadata__": {**info, "sha256": json.dumps(info["sha256"], ensure_ascii=False)}}
        raw = dump_json("the header of a tensor file", text, MAX_HEADER)
        return raw + b" " * (-len(raw) % 8)

    # Hashed from the very bytes that are written: a training thread may change the tensors meanwhile.
    length = len(encode())
    with replacing(path) as file:
        file.write(length.to_bytes(8, "little") + bytes(length))
        for name in order:
            info["sha256"][name] = _write_values(file, tensors[name].detach().cpu())
        raw = encode()
        header_hash = hashlib.sha256(raw).hexdigest().encode()
        file.seek(8)
        file.write(_PREFIX + header_hash + raw[len(_PREFIX) + 64 :])


def _write_values(file: IO[bytes], tensor: Tensor) -> str:
    digest, values = hashlib.sha256(), tensor.contiguous().view(-1).view(torch.uint8)
    for start in range(0, values.numel(), CHUNK):
        piece = values[start : start + CHUNK].numpy().tobytes()
        digest.update(piece)
        file.write(piece)
    return digest.hexdigest()


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


# Reading ---------------------------------------------------------------------------------------------------------


def read_header(
    path: Path, expect_format: str
) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], dict[str, Any]]:
    """Return the shape and dtype of each tensor, and the metadata, without reading values; errors as `read_tensors`."""
    with open_regular(path) as (file, size):
        layout = read_layout(path, _ranges(file), size, expect_format)
    return {name: (place.shape, place.dtype) for name, place in layout.places.items()}, layout.metadata


def read_tensors(
    path: Path, expect_format: str, *, check_finite: bool = True, mapped: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors, on the CPU, and the metadata that `write_tensors` wrote."""
    tensors = {}
    with open_regular(path) as (file, size):
        layout = read_layout(path, _ranges(file), size, expect_format)
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
    """Return the tensor of these bytes (n,) uint8, checked in one pass."""
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


def check_values(name: str, tensor: Tensor) -> None:
    """Raise NonFiniteError for NaN and infinity in a tensor of any dtype; `name` is for the message."""
    if not _is_finite(tensor):
        wrong = int((~(tensor.float() if tensor.dtype.itemsize == 1 else tensor).isfinite()).sum())
        raise NonFiniteError(f"the tensor {name!r} has {wrong} values that are NaN or infinite, of {tensor.numel()}")


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor.float() if tensor.dtype.itemsize == 1 else tensor)
    return math.isfinite(low) and math.isfinite(high)  # NaN spreads through aminmax, which is faster than isfinite


def _ranges(file: IO[bytes]) -> ReadRange:
    def read(start: int, end: int) -> bytes:
        file.seek(start)
        return file.read(end - start)

    return read


# The header ------------------------------------------------------------------------------------------------------


def read_layout(path: Path, read: ReadRange, size: int, expect_format: str) -> TensorLayout:
    """Read and check the header of a tensor file of `size` bytes; `path` is for messages, errors as `read_tensors`."""
    header, begin, sha256 = _read_header(path, read, size)
    info = header.pop("__metadata__")
    places = _tensor_places(path, header, size - begin)
    metadata, hashes = _read_metadata(path, info, set(places), expect_format)
    return TensorLayout(
        {
            name: TensorPlace(dtype, shape, begin + start, begin + end, hashes[name])
            for name, (dtype, shape, start, end) in places.items()
        },
        metadata,
        sha256,
    )


def _read_header(path: Path, read: ReadRange, size: int) -> tuple[dict[str, Any], int, str]:
    """Return the header, the place where values begin, and the sha256 of the header."""
    start = read(0, 512)
    if len(start) < 9 or start[8:9] != b"{":
        raise AdapterFileError(f"cannot read {str(path)!r} as tensors: it looks like {describe_start(start, size)}")
    length = int.from_bytes(start[:8], "little")
    if length > size - 8:
        raise AdapterFileError(f"cannot read {str(path)!r}: it looks like {describe_start(start, size)}")
    if length > MAX_HEADER:
        raise AdapterFileError(
            f"cannot read {str(path)!r}: its header has {length:,} bytes; at most {MAX_HEADER:,} are read"
        )
    raw = read(8, 8 + length)
    if not raw.startswith(_PREFIX):
        raise AdapterFileError(
            f"cannot read {str(path)!r}: it is a safetensors file that mmattn did not write, or its header was changed"
        )
    header_hash = raw[len(_PREFIX) : len(_PREFIX) + 64]
    blank = _PREFIX + _EMPTY_HASH.encode() + raw[len(_PREFIX) + 64 :]
    if hashlib.sha256(blank).hexdigest().encode() != header_hash:
        raise AdapterFileError(
            f"cannot read {str(path)!r}: its header was changed after it was written (wrong checksum)"
        )
    return parse_json(f"the header of {str(path)!r}", raw, MAX_HEADER), 8 + length, header_hash.decode()


def _tensor_places(
    path: Path, header: dict[str, Any], room: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]:
    """Return dtype, shape and place of each tensor in file order; they must fill `room` bytes exactly."""
    places = {}
    for name, entry in header.items():
        fault = _fault(entry)
        if fault:
            raise AdapterFileError(f"cannot read {str(path)!r}: the tensor {name[:200]!r} {fault}")
        places[name] = (DTYPES[entry["dtype"]], tuple(entry["shape"]), *entry["data_offsets"])
    places = dict(sorted(places.items(), key=lambda item: item[1][2:]))
    end = 0
    for name, (_, _, start, stop) in places.items():
        if start != end:
            raise AdapterFileError(
                f"cannot read {str(path)!r}: the tensor {name[:200]!r} overlaps another, or leaves a gap"
            )
        end = stop
    if end != room:
        what = "truncated" if end > room else "followed by bytes that belong to nothing"
        raise AdapterFileError(f"cannot read {str(path)!r}: it is {what} ({room:,} bytes of values, expected {end:,})")
    return places


def _fault(entry: Any) -> str | None:
    """Return the fault of one tensor's entry in the header, or None."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return "is not a dtype, a shape and offsets"
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        return f"is of unknown dtype {str(entry['dtype'])[:40]!r}"
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        return "is given sizes that are no counts"
    size = offsets[1] - offsets[0]
    # A huge size beside a zero fills no bytes, and still overflows the strides.
    if math.prod(shape) * DTYPES[entry["dtype"]].itemsize != size or math.prod(max(n, 1) for n in shape) >= 1 << 60:
        return f"of shape {shape} does not fill its {size:,} bytes"
    return None


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and len(value) <= 32 and all(type(n) is int and 0 <= n < 1 << 60 for n in value)


def _read_metadata(path: Path, info: object, names: set[str], expect: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the metadata object, and the checksums by name."""
    if not isinstance(info, dict) or set(info) != set(_INFO) or not all(isinstance(info[key], str) for key in _INFO):
        raise AdapterFileError(f"cannot read {str(path)!r}: its header lacks one of {', '.join(_INFO)}, or has more")
    if info["format"] != expect:
        raise AdapterFileError(f"{str(path)!r} holds {info['format'][:80]!r}, and {expect!r} was asked for")
    metadata = parse_json(f"the metadata of {str(path)!r}", info["metadata"].encode(), MAX_HEADER)
    hashes = parse_json(f"the checksums of {str(path)!r}", info["sha256"].encode(), MAX_HEADER)
    if not isinstance(metadata, dict) or metadata.get("format") != expect:
        raise AdapterFileError(f"cannot read {str(path)!r}: its metadata and its header name different formats")
    version = metadata.get("format_version", FORMAT_VERSION)
    if type(version) is not int or str(version) != info["format_version"]:
        raise AdapterFileError(f"cannot read {str(path)!r}: its metadata and its header name different versions")
    if version != FORMAT_VERSION:
        raise AdapterFileError(
            f"{str(path)!r} has format version {info['format_version'][:20]}, and this mmattn reads {FORMAT_VERSION}; "
            "update it with: pip install --upgrade mmattn"
        )
    if not isinstance(hashes, dict) or set(hashes) != names:
        raise AdapterFileError(f"cannot read {str(path)!r}: its checksums are not those of its tensors")
    return metadata, hashes
