"""Tensor files: safetensors with a format name, metadata and checksums, written atomically and checked on reading.

A tensor file is an ordinary safetensors file (any safetensors reader opens it) whose header also carries a format name
and version, one JSON object of metadata, a sha256 per tensor and a sha256 of the header itself. So one changed bit is
found wherever it sits, before its value is used. The header is read and checked against the length of the file before
anything is allocated; nothing in a file is imported, followed or run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmattn.errors import AdapterFileError, ConfigError, NonFiniteError
from mmattn.storage.files import Path, guess_file_type, open_regular, replacing
from mmattn.storage.json_files import dump_json, parse_json, validated

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
#: Words of 8 bytes in a row of the table that a fingerprint sums.
_WORDS = 1024
_PREFIX = b'{"__metadata__":{"header_sha256":"'
_INFO = ("header_sha256", "format", "format_version", "metadata", "sha256")


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
    with _opened(path, expect_format) as (file, metadata, hashes):
        places = {name: file.get_slice(name) for name in hashes}
        shapes = {name: (tuple(place.get_shape()), DTYPES[place.get_dtype()]) for name, place in places.items()}
    return shapes, metadata


def read_tensors(
    path: Path, expect_format: str, *, check_finite: bool = True, mapped: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors, on the CPU, and the metadata that `write_tensors` wrote."""
    tensors = {}
    with _opened(path, expect_format) as (file, metadata, hashes):
        for name, expected in hashes.items():
            tensor = file.get_tensor(name)
            if not mapped:  # as bytes: a copy of bools would make a changed byte 1
                tensor = tensor.view(-1).view(torch.uint8).clone().view(tensor.dtype).view(tensor.shape)
            tensors[name] = tensor
            _check_tensor(path, name, tensors[name], expected, check_finite)
    return tensors, metadata


@contextlib.contextmanager
def _opened(path: Path, expect_format: str) -> Iterator[tuple[Any, dict[str, Any], dict[str, str]]]:
    """Yield the open file, its metadata, and the sha256 of each tensor; AdapterFileError if anything is wrong."""
    _check_header(path)
    try:
        with safe_open(path, "pt") as file:
            metadata, hashes = _read_metadata(path, file.metadata(), expect_format)
            if set(hashes) != set(file.keys()):
                raise AdapterFileError(f"cannot read {str(path)!r}: its checksums are not those of its tensors")
            strange = [name for name in hashes if file.get_slice(name).get_dtype() not in DTYPES]
            if strange:
                raise AdapterFileError(f"cannot read {str(path)!r}: the tensor {strange[0]!r} is of unknown dtype")
            yield file, metadata, hashes
    except (SafetensorError, OverflowError) as error:
        raise AdapterFileError(
            f"cannot read {str(path)!r}: it is truncated, bytes belong to nothing, or its header is wrong ({error})"
        ) from error


def _check_header(path: Path) -> None:
    """Compare the checksum of the header, before anything else is made of it."""
    with open_regular(path) as (file, size):
        start = file.read(512)
        if len(start) < 9 or start[8:9] != b"{":
            raise AdapterFileError(
                f"cannot read {str(path)!r} as tensors: it looks like {guess_file_type(start, size)}"
            )
        length = int.from_bytes(start[:8], "little")
        if length > size - 8:
            raise AdapterFileError(f"cannot read {str(path)!r}: it looks like {guess_file_type(start, size)}")
        if length > MAX_HEADER:
            raise AdapterFileError(
                f"cannot read {str(path)!r}: its header has {length:,} bytes; at most {MAX_HEADER:,} are read"
            )
        file.seek(8)
        raw = file.read(length)
    if not raw.startswith(_PREFIX):
        raise AdapterFileError(
            f"cannot read {str(path)!r}: it is a safetensors file that mmattn did not write, or its header was changed"
        )
    expected, rest = raw[len(_PREFIX) : len(_PREFIX) + 64], raw[len(_PREFIX) + 64 :]
    if hashlib.sha256(_PREFIX + _EMPTY_HASH.encode() + rest).hexdigest().encode() != expected:
        raise AdapterFileError(
            f"cannot read {str(path)!r}: its header was changed after it was written (wrong checksum)"
        )


def _read_metadata(path: Path, info: Mapping[str, str], expect: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the metadata object, and the checksums by name."""
    if set(info) != set(_INFO):
        raise AdapterFileError(f"cannot read {str(path)!r}: its header lacks one of {', '.join(_INFO)}, or has more")
    if info["format"] != expect:
        raise AdapterFileError(f"{str(path)!r} holds {info['format'][:80]!r}, and {expect!r} was asked for")
    metadata = parse_json(f"the metadata of {str(path)!r}", info["metadata"].encode(), MAX_HEADER)
    what = f"the checksums of {str(path)!r}"
    hashes = validated(what, dict[str, str], parse_json(what, info["sha256"].encode(), MAX_HEADER))
    if not isinstance(metadata, dict) or metadata.get("format") != expect:
        raise AdapterFileError(f"cannot read {str(path)!r}: its metadata and its header name different formats")
    version = metadata.get("format_version", FORMAT_VERSION)
    if info["format_version"] != str(version) or type(version) is not int:
        raise AdapterFileError(f"cannot read {str(path)!r}: its metadata and its header name different versions")
    if version != FORMAT_VERSION:
        raise AdapterFileError(
            f"{str(path)!r} has format version {info['format_version'][:20]}, and this mmattn reads {FORMAT_VERSION}; "
            "update it with: pip install --upgrade mmattn"
        )
    return metadata, hashes


def _check_tensor(path: Path, name: str, tensor: Tensor, expected: str, check_finite: bool) -> None:
    """Compare the checksum of a tensor, piece by piece, and refuse values that its dtype cannot have."""
    digest, finite, values = hashlib.sha256(), True, tensor.view(-1).view(torch.uint8)
    for start in range(0, values.numel(), CHUNK):
        piece = values[start : start + CHUNK]
        digest.update(piece.numpy().data)
        finite = finite and (not check_finite or _is_finite(piece.view(tensor.dtype)))
    if digest.hexdigest() != expected:
        raise AdapterFileError(
            f"cannot read {str(path)!r}: the values of {name!r} were changed after they were written "
            "(wrong checksum). Fetch the file again"
        )
    if tensor.dtype == torch.bool and values.numel() and int(values.max()) > 1:
        raise AdapterFileError(f"cannot read {str(path)!r}: the tensor {name!r} is bool and holds other bytes")
    if not finite:
        check_values(name, tensor)


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


# Fingerprints ----------------------------------------------------------------------------------------------------


def fingerprint(state: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """A sha256 of the names, shapes, dtypes and values of tensors, which changes with any one value.

    Every tensor enters as the sums of its rows and of its columns, taken as a table of 1,024 words of 8 bytes, modulo
    2**64: exact, so the same on every device, and near the speed of the memory. It tells one checkpoint from another;
    it is no defence against someone who constructs two that are equal.

    >>> a = {"weight": torch.zeros(3, 5)}
    >>> fingerprint(a) == fingerprint({"weight": torch.zeros(3, 5)})
    True
    >>> a["weight"][2, 3] = 1e-9
    >>> fingerprint(a) == fingerprint({"weight": torch.zeros(3, 5)})
    False
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        for part in plain_parts(state[name].detach()):
            if part.device.type == "meta":
                raise ConfigError(f"{name!r} has no values (it is on the meta device), so it has no fingerprint")
            with torch.no_grad():
                part = part.to(dtype) if dtype is not None and part.is_floating_point() else part
                digest.update(f"{name!r} {part.dtype} {list(part.shape)}\n".encode())
                digest.update(_sums(part))
    return digest.hexdigest()


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors inside a quantised one; a plain one yields itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_parts(getattr(tensor, name))
    else:
        yield tensor


def _sums(tensor: Tensor) -> bytes:
    values = tensor.contiguous().view(-1).view(torch.uint8)
    if values.storage_offset() % 8:
        values = values.clone()
    whole = values.numel() // (8 * _WORDS) * (8 * _WORDS)
    parts: list[Any] = [values[whole:].cpu().numpy()]
    if whole and values.device.type == "cpu":
        # In numpy: a thousand short sums on threads that wait for each other take seconds on a busy machine.
        table = values[:whole].numpy().view("int64").reshape(-1, _WORDS)
        columns = table[0] * 0
        for i in range(0, len(table), 128):  # a megabyte at a time stays in the processor's cache for the second sum
            columns += table[i : i + 128].sum(0)
            parts.append(table[i : i + 128].sum(1))
        parts.append(columns)
    elif whole:
        words = values[:whole].view(torch.int64).view(-1, _WORDS)
        parts += [words.sum(1).cpu().numpy(), words.sum(0).cpu().numpy()]
    return b"".join(part.tobytes() for part in parts)
