"""Fingerprints: sha256 of the tensors of a network and of the bytes of a file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError

_WORDS = 1024


def file_fingerprint(path: str | os.PathLike[str]) -> str:
    """Return the sha256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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
