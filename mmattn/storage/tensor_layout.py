"""The header of a tensor file, checked: where each tensor lies, of which dtype and shape, and with which checksum.

The header is read and checked against the length of the file before anything is allocated; nothing in a file is
imported, followed or run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mmattn.errors import AdapterFileError
from mmattn.storage.file_kinds import describe_start
from mmattn.storage.files import Path
from mmattn.storage.json_files import parse_json

MAX_HEADER = 16 << 20
#: Of every tensor file; all begin at 1 with mmattn 1.0.
FORMAT_VERSION = 1

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

EMPTY_HASH = "0" * 64
PREFIX = b'{"__metadata__":{"header_sha256":"'

ReadRange = Callable[[int, int], bytes]
"""The bytes of a file from one place up to another; fewer where it ends."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies in its file.

    Args:
        dtype: of the tensor.
        shape: of the tensor.
        start: the first of its bytes, counted from the beginning of the file.
        end: the first byte after them.
        sha256: of these bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    sha256: str


@dataclass(frozen=True)
class TensorLayout:
    """What the header of a tensor file says.

    Args:
        places: of each tensor, in the order they stand in the file.
        metadata: the JSON object that was written with them.
        sha256: of the header, which holds the checksums of all tensors: it stands for the content of the whole file.
    """

    places: dict[str, TensorPlace]
    metadata: dict[str, Any]
    sha256: str


def read_layout(
    path: Path, read: ReadRange, size: int, expect_format: str, max_header: int = MAX_HEADER
) -> TensorLayout:
    """Read and check the header of a tensor file.

    Args:
        path: of the file, in messages.
        read: gives its bytes.
        size: of the file in bytes.
        expect_format: the format name that the file must have.
        max_header: bytes of the header at most.

    Raises:
        AdapterFileError: the file is torn, of another format or something else, or its header was changed.
    """
    header, place, sha256 = _header(path, read, size, max_header)
    info = header.pop("__metadata__")
    entries = _entries(path, header, size - place)
    metadata, hashes = _metadata(path, info, set(entries), expect_format, max_header)
    places = {
        name: TensorPlace(dtype, shape, place + start, place + end, hashes[name])
        for name, (dtype, shape, start, end) in entries.items()
    }
    return TensorLayout(places, metadata, sha256)


def _header(path: Path, read: ReadRange, size: int, max_header: int) -> tuple[dict[str, Any], int, str]:
    """The checked header, where the values begin, and the sha256 of the header."""
    start = read(0, 512)
    if len(start) < 9 or start[8:9] != b"{":
        raise AdapterFileError(f"cannot read {str(path)!r} as tensors: it looks like {describe_start(start, size)}")
    length = int.from_bytes(start[:8], "little")
    if length > size - 8:
        raise AdapterFileError(f"cannot read {str(path)!r}: it looks like {describe_start(start, size)}")
    if length > max_header:
        raise AdapterFileError(
            f"cannot read {str(path)!r}: its header has {length:,} bytes; at most {max_header:,} are read"
        )
    raw = read(8, 8 + length)
    if not raw.startswith(PREFIX):
        raise AdapterFileError(
            f"cannot read {str(path)!r}: it is a safetensors file that mmattn did not write, or its header was changed"
        )
    own_hash = raw[len(PREFIX) : len(PREFIX) + 64]
    blank = PREFIX + EMPTY_HASH.encode() + raw[len(PREFIX) + 64 :]
    if hashlib.sha256(blank).hexdigest().encode() != own_hash:
        raise AdapterFileError(
            f"cannot read {str(path)!r}: its header was changed after it was written (wrong checksum)"
        )
    header = parse_json(f"the header of {str(path)!r}", raw, max_header)
    return header, 8 + length, own_hash.decode()


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
    version = metadata.get("format_version", FORMAT_VERSION)
    if type(version) is not int or str(version) != info["format_version"]:
        raise AdapterFileError(f"cannot read {str(path)!r}: its metadata and its header name different versions")
    if version != FORMAT_VERSION:
        raise AdapterFileError(
            f"{str(path)!r} has format version {version:.3g}, and this mmattn reads {FORMAT_VERSION}; update it with: "
            "pip install --upgrade mmattn"
        )
    if not isinstance(hashes, dict) or set(hashes) != names:
        raise AdapterFileError(f"cannot read {str(path)!r}: its checksums are not those of its tensors")
    return metadata, hashes
