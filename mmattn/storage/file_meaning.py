"""Whether a file means something: its JSON by declared types, and all that cannot be made of it as one error.

Checksums say that a file is as it was written, and anybody can write one. What it says is checked once, where it is
read, and whatever is wrong with it is an AdapterFileError.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mmattn.errors import AdapterFileError, MmattnError
from mmattn.storage.files import Path


def validated(what: str, kind: Any, value: Any) -> Any:
    """A value of JSON as the type that it must have; a number is no text, and true is no number.

    Args:
        what: what says it, in messages.
        kind: a pydantic model or any other type.
        value: as parsed; or the JSON as bytes, of which lists may stand for tuples.

    Raises:
        AdapterFileError: it is something else.

    >>> validated("a file", list[int], [3, 5])
    [3, 5]
    """
    adapter = _adapter(kind)
    try:
        read = adapter.validate_json if isinstance(value, bytes) else adapter.validate_python
        return read(value, strict=True)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3])
        raise AdapterFileError(f"{what} is not what this version reads: {wrong:.500}") from error


@contextmanager
def making_sense(path: Path, what: str) -> Iterator[None]:
    """A context in which something is made of what a file says: where that fails, the file is to blame.

    Args:
        path: of the file.
        what: the file should hold, in messages.

    Raises:
        AdapterFileError: for whatever is raised in it but the errors of the operating system and of too little memory.
    """
    try:
        yield
    except (AdapterFileError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # pyarrow raises some without one, of what it reads
            raise
        named = str(error) if isinstance(error, MmattnError) else f"{type(error).__name__}: {error}"
        reason = " ".join(named.split())
        raise AdapterFileError(
            f"{str(path)!r} holds no sound {what}: {reason:.300}. Fetch or write it again"
        ) from error


@lru_cache(maxsize=64)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
