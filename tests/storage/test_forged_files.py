"""Tensor files made on purpose, with checksums that are right: refused, and soon."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import psutil
import pytest

from mmattn.errors import AdapterFileError
from mmattn.storage.safetensors import read_tensors


def forge(path: Path, header: dict[str, object] | bytes, body: bytes = b"") -> None:
    """A file with a right checksum of its header, as someone would make it on purpose."""
    raw = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    blank = raw.replace(b"HASH", b"0" * 64, 1)
    raw = raw.replace(b"HASH", hashlib.sha256(blank).hexdigest().encode(), 1)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + body)


def info(names: dict[str, bytes], **changes: object) -> dict[str, object]:
    sums = {name: hashlib.sha256(body).hexdigest() for name, body in names.items()}
    metadata = json.dumps({"format": "example"})
    found = {"header_sha256": "HASH", "format": "example", "format_version": "1"}
    return {**found, "metadata": metadata, "sha256": json.dumps(sums), **changes}


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BODY = np.float32([1, 2]).tobytes()

FORGED: dict[str, tuple[dict[str, object], bytes]] = {
    "shape of 10**9": ({"x": entry(shape=[10**9])}, BODY),
    "shape that overflows": ({"x": entry(shape=[2**59, 2**59, 0], offsets=[0, 0])}, b""),
    "offsets of 10**12": ({"x": entry(shape=[10**12 // 4], offsets=[0, 10**12])}, BODY),
    "negative": ({"x": entry(shape=[-2])}, BODY),
    "bool as a size": ({"x": entry(shape=[True, 2])}, BODY),
    "float as a size": ({"x": entry(shape=[2.0])}, BODY),
    "text as a size": ({"x": entry(shape="2")}, BODY),
    "no list": ({"x": entry(shape=2)}, BODY),
    "three offsets": ({"x": entry(offsets=[0, 8, 8])}, BODY),
    "end before start": ({"x": entry(shape=[0], offsets=[8, 0])}, BODY),
    "a gap": ({"x": entry(shape=[1], offsets=[4, 8])}, BODY),
    "an overlap": ({"x": entry(), "y": entry(shape=[1], offsets=[4, 8])}, BODY),
    "unknown dtype": ({"x": entry(dtype="F31")}, BODY),
    "no dtype": ({"x": entry(dtype=["F32"])}, BODY),
    "no object": ({"x": [1, 2]}, BODY),
    "a bool of 2": ({"x": entry("BOOL", [8])}, b"\2" * 8),
    "wrong bits": ({"x": entry(), "__metadata__": info({"x": BODY[:7] + b"\1"})}, BODY),
    "a checksum too many": ({"x": entry(), "__metadata__": info({"x": BODY, "y": BODY})}, BODY),
    "a checksum too few": ({"x": entry(), "__metadata__": info({})}, BODY),
    "other metadata": ({"x": entry(), "__metadata__": info({"x": BODY}, metadata='{"format":"b"}')}, BODY),
    "metadata a list": ({"x": entry(), "__metadata__": info({"x": BODY}, metadata="[]")}, BODY),
    "metadata with a key twice": (
        {"x": entry(), "__metadata__": info({"x": BODY}, metadata='{"format":"example","format":"example"}')},
        BODY,
    ),
    "another version": ({"x": entry(), "__metadata__": info({"x": BODY}, format_version="2")}, BODY),
    "more in the header": ({"x": entry(), "__metadata__": info({"x": BODY}, path="/etc/passwd")}, BODY),
    "no text in the header": ({"x": entry(), "__metadata__": info({"x": BODY}, metadata={})}, BODY),
}


class TestForgedFiles:
    """Headers whose checksum is right and which are wrong all the same."""

    def test_the_forger_can_make_a_good_file(self, tmp_path: Path) -> None:
        forge(tmp_path / "a", {"__metadata__": info({"x": BODY}), "x": entry()}, BODY)
        tensors, _ = read_tensors(tmp_path / "a", "example")
        assert tensors["x"].tolist() == [1.0, 2.0]

    @pytest.mark.parametrize("kind", FORGED)
    def test_refused(self, tmp_path: Path, kind: str) -> None:
        changes, body = FORGED[kind]
        names = {name: body for name in changes if name != "__metadata__"}
        forge(tmp_path / "a", {"__metadata__": info(names), **changes}, body)
        with pytest.raises(AdapterFileError):
            read_tensors(tmp_path / "a", "example")

    def test_nothing_is_allocated_for_what_is_not_there(self, tmp_path: Path) -> None:
        """Invariant 65: deep, long and large headers end in an error, soon and without much memory."""
        start = b'{"__metadata__":{"header_sha256":"HASH"},"x":'
        process = psutil.Process()
        for body in (
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b"[" * 100_000 + b"]" * 100_000 + b"}",
            b"[" + b"[]," * 1_000_000 + b"[]]}",
            b"[" + b'"a",' * 1_000_000 + b'"a"]}',
            b"9" * 100_000 + b"}",
            b"1e999}",
            b"NaN}",
            b'"\\ud800"}',
            b'"\xff"}',
        ):
            forge(tmp_path / "a", start + body)
            before = process.memory_info().rss
            with pytest.raises(AdapterFileError):
                read_tensors(tmp_path / "a", "example")
            assert process.memory_info().rss - before < 200 << 20
        for length in (2**63, 2**64 - 1, 2**40):
            (tmp_path / "a").write_bytes(length.to_bytes(8, "little") + b"{}" + bytes(100))
            with pytest.raises(AdapterFileError):
                read_tensors(tmp_path / "a", "example")
        with open(tmp_path / "a", "wb") as file:  # a hole of 1 GB that says it is a header
            file.write((1 << 30).to_bytes(8, "little") + b"{")
            file.truncate((1 << 30) + 8)
        before = process.memory_info().rss
        with pytest.raises(AdapterFileError, match="1,073,741,824 bytes"):
            read_tensors(tmp_path / "a", "example")
        assert process.memory_info().rss - before < 50 << 20
