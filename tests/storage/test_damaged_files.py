"""Tensor and JSON files that are something else, cut, changed or not sound: refused, saying what they are."""

from __future__ import annotations

import io
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from mmattn.errors import AdapterFileError, NonFiniteError
from mmattn.storage.json_files import read_json
from mmattn.storage.safetensors import read_header, read_tensors, write_tensors
from tests.storage.tensor_files import META, example, same_bits


def _zip(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, b"data")
    return buffer.getvalue()


def _torch_save() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(3)}, buffer)
    return buffer.getvalue()


class Boom:
    """Says so when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os._exit, (99,)


# Content (from a good file), and what the message must say.
BAD: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda good: b"", "an empty file"),
    "three bytes": (lambda good: good[:3], "no format known"),
    "eight bytes": (lambda good: good[:8], "no format known|text file"),
    "cut in the header": (lambda good: good[:200], "truncated safetensors file"),
    "cut after the header": (lambda good: good[: 8 + int.from_bytes(good[:8], "little")], "truncated"),
    "cut in the values": (lambda good: good[:-1], "truncated"),
    "bytes added": (lambda good: good + b"\0", "belong to nothing"),
    "LFS pointer": (
        lambda good: b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n",
        "git lfs pull",
    ),
    "HTML": (lambda good: b"\n<!DOCTYPE html><html><body>404</body></html>", "a page of HTML"),
    "XML": (lambda good: b"<?xml version='1.0'?><Error>AccessDenied</Error>", "HTML or XML"),
    "JSON": (lambda good: b'{"error": "Repository not found"}', "JSON text"),
    "text": (lambda good: b"Entry not found, alas\n", "a text file"),
    "pickle": (lambda good: pickle.dumps(Boom()), "a pickle, which can run code"),
    "torch.save": (lambda good: _torch_save(), "torch.save"),
    "zip": (lambda good: _zip("model.safetensors"), "a zip archive"),
    "zeros": (lambda good: bytes(len(good)), "nothing but zeros"),
    "noise": (lambda good: random.Random(3).randbytes(len(good)), "no format known"),
    "plain safetensors": (lambda good: safetensors.torch.save({"a": torch.zeros(3)}), "mmattn did not write"),
}


class TestBadFiles:
    @pytest.mark.parametrize("kind", BAD)
    def test_the_message_says_what_it_looks_like(self, tmp_path: Path, kind: str) -> None:
        """Invariant 62."""
        write_tensors(tmp_path / "a", example(), META)
        make, words = BAD[kind]
        (tmp_path / "a").write_bytes(make((tmp_path / "a").read_bytes()))
        for read in (read_tensors, read_header):
            with pytest.raises(AdapterFileError, match=words) as caught:
                read(tmp_path / "a", "example")
            assert str(tmp_path / "a") in str(caught.value)

    @pytest.mark.parametrize("read", [lambda path: read_tensors(path, "example"), read_json])
    def test_what_is_no_file(self, tmp_path: Path, read: Callable[[Path], object]) -> None:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "loop").symlink_to("loop")
        for name, words in {
            "none": "no such file",
            ".": "a folder",
            "pipe": "a pipe or a device",
            "loop": "symbolic links",
            "a\0b": "null",
        }.items():
            with pytest.raises(AdapterFileError, match=words):
                read(tmp_path / name)

    def test_every_flipped_bit_of_the_header_and_64_of_the_values(self, tmp_path: Path) -> None:
        """Invariant 63."""
        path = tmp_path / "a"
        write_tensors(path, {"x": torch.randn(31), "y": torch.randn(3, 5).half()}, {"format": "example"})
        good = path.read_bytes()
        length = 8 + int.from_bytes(good[:8], "little")
        rng = random.Random(5)
        places = [*range(length), *(rng.randrange(length, len(good)) for _ in range(64))]
        for place in places:
            changed = bytearray(good)
            changed[place] ^= 1 << rng.randrange(8)
            path.write_bytes(changed)
            with pytest.raises(AdapterFileError):
                read_tensors(path, "example")
        path.write_bytes(good)
        read_tensors(path, "example")

    def test_every_truncation(self, tmp_path: Path) -> None:
        """Invariant 62."""
        path = tmp_path / "a"
        write_tensors(path, {"x": torch.randn(7)}, {"format": "example"})
        good = path.read_bytes()
        for size in range(len(good)):
            path.write_bytes(good[:size])
            with pytest.raises(AdapterFileError):
                read_tensors(path, "example")

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2])
    def test_not_finite(self, tmp_path: Path, value: float, dtype: torch.dtype) -> None:
        """Invariant 64."""
        tensors = {"good": torch.randn(5), "bad.weight": torch.randn(31)}
        tensors["bad.weight"][17] = value
        tensors["bad.weight"] = tensors["bad.weight"].to(dtype)
        write_tensors(tmp_path / "a", tensors, META)
        with pytest.raises(NonFiniteError, match=r"'bad\.weight' has 1 values.* of 31"):
            read_tensors(tmp_path / "a", "example")
        after, _ = read_tensors(tmp_path / "a", "example", check_finite=False)
        assert same_bits(after["bad.weight"], tensors["bad.weight"])


class TestBadJson:
    @pytest.mark.parametrize(
        ("raw", "words"),
        [
            (b'{"a": NaN}', "NaN"),
            (b'{"a": -Infinity}', "not a finite number"),
            (b'{"a": 1e999}', "not a finite number"),
            (b'{"a": 1, "a": 1}', "'a' stands twice"),
            (b'{"a": {"b": 1, "c": 2, "b": 3}}', "'b' stands twice"),
            (b"[" * 100_000, "not sound JSON"),
            (b'{"a": ' + b"1" * 5000 + b"}", "not sound JSON"),
            (b'{"a": 1} x', "not sound JSON"),
            (b'{"a": "\\ud800"}', "not sound JSON"),
            (b'{"a": 1,\r\n "b": "\xff"}', "not text in UTF-8 .*in line 2.; save it as UTF-8"),
            (b'{"a": 1,\n "b": "\0"}', "not sound JSON.*line 2"),
            ('{"a": 1}'.encode("utf-16"), "text in UTF-16; save it as UTF-8"),
            (b'{"a": 1', "not sound JSON"),
            (b"", "an empty file"),
            (b"<html>", "a page of HTML"),
            (b'"' + b"x" * (1 << 20) + b'"', "at most 1,048,576"),
        ],
    )
    def test_refused(self, tmp_path: Path, raw: bytes, words: str) -> None:
        (tmp_path / "a.json").write_bytes(raw)
        with pytest.raises(AdapterFileError, match=words):
            read_json(tmp_path / "a.json")

    def test_a_byte_order_mark_and_line_ends_of_another_system(self, tmp_path: Path) -> None:
        """Invariant 75."""
        (tmp_path / "a").write_bytes(b'\xef\xbb\xbf{"a": 1,\r\n "b": "\xc3\xa9"}\r\n')
        assert read_json(tmp_path / "a") == {"a": 1, "b": "é"}
