"""Paths, bytes and open files of pictures, sounds and videos as open binary files, and collections of them as lists."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, TypeGuard

from torch import Tensor

from mmattn.errors import MmattnError

if TYPE_CHECKING:
    from numpy import ndarray

#: Methods of the decoders of torchcodec, as which `datasets` hands out sounds and videos.
DECODERS = ("get_all_samples", "get_frame_at")
_ADDRESSES = ("http://", "https://", "data:", "s3://", "gs://", "rtsp://", "rtmp://")


@contextmanager
def open_binary(source: object, kind: str, error: type[MmattnError]) -> Iterator[tuple[BinaryIO, str]]:
    """Yield the open file of a path, bytes or binary file, at its beginning, and its name in messages."""
    source = undecoded(source)
    if isinstance(source, (str, os.PathLike)):
        path = os.fsdecode(source)
        if path.lower().startswith(_ADDRESSES):
            raise error(f"{path[:80]!r} is an address, and nothing is downloaded here; give the path of a file")
        name = repr(path if len(path) <= 200 else path[:200] + "…")
        try:
            file: BinaryIO = open(path, "rb")  # noqa: SIM115 (closed below)
        except FileNotFoundError:
            raise error(f"there is no file {name}") from None
        except IsADirectoryError:
            raise error(f"{name} is a folder; give the paths of the files in it") from None
        except (OSError, ValueError) as cause:
            raise error(f"{name} cannot be read: {cause}") from cause
        with file:
            yield _not_empty(file, name, kind, error), name
    elif isinstance(source, (bytes, bytearray, memoryview)):
        yield _not_empty(io.BytesIO(source), "the bytes", kind, error), "the bytes"
    elif isinstance(source, io.TextIOBase):
        raise error(f"{type(source).__name__} reads as text; open it with mode 'rb'")
    elif hasattr(source, "read"):
        try:
            file = source if source.seekable() else io.BytesIO(source.read())  # type: ignore[assignment, attr-defined]
        except (OSError, ValueError, AttributeError) as cause:
            raise error(f"the file cannot be read: {cause}") from cause
        yield _not_empty(file, "the file", kind, error), "the file"
    else:
        raise error(f"a {kind} was expected, got {type(source).__name__}; give a path, bytes or an open binary file")


def _not_empty(file: BinaryIO, name: str, kind: str, error: type[MmattnError]) -> BinaryIO:
    file.seek(0)
    if not file.read(1):
        raise error(f"{name} is empty (0 bytes), no {kind}")
    file.seek(0)
    return file


def undecoded(source: object) -> object:
    """Return the bytes or path of {"bytes": …, "path": …}, as `datasets` has undecoded files; others as they are."""
    if not (isinstance(source, Mapping) and set(source) == {"bytes", "path"}):
        return source
    return source["path"] if source["bytes"] is None else source["bytes"]


def is_array(source: object) -> TypeGuard[Tensor | ndarray]:
    """Tell tensors and numpy arrays from other objects."""
    return isinstance(source, Tensor) or hasattr(source, "__array_interface__")


def as_list(
    values: object, kind: str, error: type[MmattnError], *, batch_dims: int, single: tuple[type, ...] = ()
) -> list[object]:
    """Return one medium, an iterable of several, or an array of `batch_dims` dimensions of them, as a list."""
    values = undecoded(values)
    if isinstance(values, (str, bytes, bytearray, memoryview, os.PathLike, *single)):
        return [values]
    if any(hasattr(values, name) for name in ("read", *DECODERS)):
        return [values]
    if is_array(values):
        return list(values) if len(values.shape) == batch_dims else [values]
    if isinstance(values, Iterable) and not isinstance(values, (Mapping, set, frozenset)):
        return list(values)
    raise error(f"one {kind} or several were expected, got {type(values).__name__}; give one, or a list")
