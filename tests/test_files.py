"""Tensor and JSON files: what is written comes back, what was changed is refused, what fails leaves nothing behind."""

from __future__ import annotations

import doctest
import gzip
import hashlib
import io
import json
import os
import pickle
import random
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import safetensors.torch
import torch

import mmattn.files
import mmattn.fingerprints
from mmattn.errors import AdapterFileError, ConfigError, NonFiniteError
from mmattn.files import describe, fingerprint, read_header, read_json, read_tensors, write_json, write_tensors

META = {"format": "example", "format_version": 3, "note": 'grüße "\\ 🌷', "list": [1, 2.5, None, True, {"a": []}]}


def example() -> dict[str, torch.Tensor]:
    return {
        "gate": torch.tensor(0.25),
        "heads.weight": torch.randn(7, 11),
        "half": torch.randn(3, 5).half(),
        "brain": torch.randn(13).bfloat16(),
        "tiny": torch.randn(17).to(torch.float8_e4m3fn),
        "double": torch.randn(2, 3, 5, dtype=torch.float64),
        "ids": torch.arange(19),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 23),
    }


def litter(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if "tmp" in name or name.startswith(".")]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
    )


def test_docstring_examples_run() -> None:
    for module in (mmattn.files, mmattn.fingerprints):
        result = doctest.testmod(module, extraglobs={"torch": torch})
        assert result.attempted >= 3
        assert result.failed == 0


class TestRoundTrip:
    def test_every_dtype_bit_for_bit(self, tmp_path: Path) -> None:
        before = example()
        write_tensors(tmp_path / "a", before, META)
        after, metadata = read_tensors(tmp_path / "a", "example")
        assert metadata == META
        assert after.keys() == before.keys()
        assert all(same_bits(after[name], before[name]) for name in before)
        shapes, same = read_header(tmp_path / "a", "example")
        assert same == META
        assert shapes == {name: (tuple(x.shape), x.dtype) for name, x in before.items()}

    def test_other_readers_open_it(self, tmp_path: Path) -> None:
        before = example()
        write_tensors(tmp_path / "a", before, META)
        after = safetensors.torch.load_file(tmp_path / "a")
        assert after.keys() == before.keys()
        assert all(same_bits(after[name], before[name]) for name in before)
        with safetensors.safe_open(tmp_path / "a", "pt") as file:
            assert file.metadata()["format"] == "example"
            assert json.loads(file.metadata()["metadata"]) == META

    def test_the_same_tensors_make_the_same_bytes(self, tmp_path: Path) -> None:
        before = example()
        write_tensors(tmp_path / "a", before, META)
        write_tensors(tmp_path / "b", dict(reversed(before.items())), META)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    def test_views_and_shared_storage_become_independent_copies(self, tmp_path: Path) -> None:
        whole = torch.randn(23, 29)
        before = {"whole": whole, "tied": whole, "row": whole[3], "slice": whole[::2, 1:5], "turned": whole.T}
        before["wide"] = torch.randn(5, 1).expand(5, 7)
        before["grad"] = torch.nn.Parameter(whole[1:3])
        write_tensors(tmp_path / "a", before, META)
        after, _ = read_tensors(tmp_path / "a", "example")
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert all(after[name].is_contiguous() for name in before)
        after["whole"].zero_()
        assert torch.equal(after["tied"], whole)
        size = sum(x.numel() * 4 for x in before.values())
        assert size < (tmp_path / "a").stat().st_size < size + 4096

    def test_saving_to_the_path_loaded_from(self, tmp_path: Path) -> None:
        write_tensors(tmp_path / "a", example(), META)
        first = (tmp_path / "a").read_bytes()
        tensors, metadata = read_tensors(tmp_path / "a", "example")
        write_tensors(tmp_path / "a", tensors, metadata)
        assert (tmp_path / "a").read_bytes() == first

    def test_no_tensors_at_all(self, tmp_path: Path) -> None:
        write_tensors(tmp_path / "a", {}, {"format": "example"})
        assert read_tensors(tmp_path / "a", "example") == ({}, {"format": "example"})

    def test_json(self, tmp_path: Path) -> None:
        write_json(tmp_path / "a.json", META)
        assert read_json(tmp_path / "a.json") == META
        assert (tmp_path / "a.json").read_text(encoding="utf-8").endswith("}\n")

    @pytest.mark.parametrize(
        "value",
        [{"a": float("nan")}, {"a": float("inf")}, {"a": object()}, {1: "a", "1": "b"}, {"a": "\ud800"}, {"a": b"x"}],
    )
    def test_what_is_not_json_is_refused_and_the_old_file_stays(self, tmp_path: Path, value: dict[str, object]) -> None:
        write_json(tmp_path / "a.json", META)
        write_tensors(tmp_path / "a", example(), META)
        old = (tmp_path / "a").read_bytes()
        with pytest.raises(ConfigError, match="plain JSON"):
            write_json(tmp_path / "a.json", value)
        with pytest.raises(ConfigError, match="plain JSON"):
            write_tensors(tmp_path / "a", {}, {"format": "example", "value": value})
        assert read_json(tmp_path / "a.json") == META
        assert (tmp_path / "a").read_bytes() == old
        assert litter(tmp_path) == []

    def test_what_is_no_dense_tensor_is_refused_by_name(self, tmp_path: Path) -> None:
        for value in (
            torch.zeros(3, device="meta"),
            torch.eye(3).to_sparse(),
            torch.zeros(3, dtype=torch.complex64),
            np.zeros(3),
        ):
            with pytest.raises(ConfigError, match="'lost'"):
                write_tensors(tmp_path / "a", {"lost": value}, {"format": "example"})  # type: ignore[dict-item]
        with pytest.raises(ConfigError, match="format"):
            write_tensors(tmp_path / "a", {}, {})
        assert os.listdir(tmp_path) == []


def _zip(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, b"data")
    return buffer.getvalue()


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        file.addfile(tarfile.TarInfo("a"))
    return buffer.getvalue()


def _torch_save() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(3)}, buffer)
    return buffer.getvalue()


def _numpy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


class Boom:
    """Says so when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os._exit, (99,)


# Content (from a good file), and what the message must say.
BAD: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda good: b"", "an empty file"),
    "three bytes": (lambda good: good[:3], "truncated"),
    "eight bytes": (lambda good: good[:8], "truncated|no format"),
    "cut in the header": (lambda good: good[:200], "truncated safetensors file"),
    "cut after the header": (lambda good: good[: 8 + int.from_bytes(good[:8], "little")], "truncated"),
    "cut in the values": (lambda good: good[:-1], "truncated"),
    "bytes added": (lambda good: good + b"\0", "belong to nothing"),
    "LFS pointer": (
        lambda good: b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n",
        "git lfs pull",
    ),
    "HTML": (lambda good: b"\n<!DOCTYPE html><html><body>404</body></html>", "an HTML page"),
    "XML": (lambda good: b"<?xml version='1.0'?><Error>AccessDenied</Error>", "an XML document"),
    "JSON": (lambda good: b'{"error": "Repository not found"}', "JSON text"),
    "text": (lambda good: b"Entry not found, alas\n", "a text file"),
    "pickle": (lambda good: pickle.dumps(Boom()), "a pickle, which can run code"),
    "torch.save": (lambda good: _torch_save(), "a torch.save file"),
    "zip": (lambda good: _zip("model.safetensors"), "a zip archive"),
    "gzip": (lambda good: gzip.compress(good), "a gzip archive"),
    "tar": (lambda good: _tar(), "a tar archive"),
    "numpy": (lambda good: _numpy(), "a numpy array"),
    "picture": (lambda good: b"\x89PNG\r\n\x1a\n" + good, "a PNG picture"),
    "GGUF": (lambda good: b"GGUF\3\0\0\0" + good, "a GGUF file"),
    "zeros": (lambda good: bytes(len(good)), "nothing but zeros"),
    "noise": (lambda good: random.Random(3).randbytes(len(good)), "no format known"),
    "plain safetensors": (lambda good: safetensors.torch.save({"a": torch.zeros(3)}), "mmattn did not write"),
}


class TestBadFiles:
    @pytest.mark.parametrize("kind", BAD)
    def test_the_message_says_what_it_looks_like(self, tmp_path: Path, kind: str) -> None:
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

    def test_another_format(self, tmp_path: Path) -> None:
        write_tensors(tmp_path / "a", example(), META)
        with pytest.raises(AdapterFileError, match="'example'.*'other' was asked"):
            read_tensors(tmp_path / "a", "other")

    def test_describe(self, tmp_path: Path) -> None:
        write_tensors(tmp_path / "a", example(), META)
        assert describe(tmp_path / "a") == "a safetensors file"
        assert "no such file" in describe(tmp_path / "b")

    def test_every_flipped_bit_of_the_header_and_64_of_the_values(self, tmp_path: Path) -> None:
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
        tensors = {"good": torch.randn(5), "bad.weight": torch.randn(31)}
        tensors["bad.weight"][17] = value
        tensors["bad.weight"] = tensors["bad.weight"].to(dtype)
        write_tensors(tmp_path / "a", tensors, META)
        with pytest.raises(NonFiniteError, match=r"'bad\.weight' has 1 values.* of 31"):
            read_tensors(tmp_path / "a", "example")
        after, _ = read_tensors(tmp_path / "a", "example", check_finite=False)
        assert same_bits(after["bad.weight"], tensors["bad.weight"])


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
    "more fields": ({"x": {**entry(), "module": "os.system"}}, BODY),
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
        with pytest.raises(AdapterFileError) as caught:
            read_tensors(tmp_path / "a", "example")
        assert "checksum)" not in str(caught.value) or kind == "wrong bits"

    def test_nothing_is_allocated_for_what_is_not_there(self, tmp_path: Path) -> None:
        """Deep, long and large headers end in an error, soon and without much memory."""
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


class TestBadJson:
    @pytest.mark.parametrize(
        ("raw", "words"),
        [
            (b'{"a": NaN}', "NaN"),
            (b'{"a": -Infinity}', "not a finite number"),
            (b'{"a": 1e999}', "not a finite number"),
            (b'{"a": 1, "a": 1}', "'a' stands twice"),
            (b'{"a": {"b": 1, "c": 2, "b": 3}}', "'b' stands twice"),
            (b"[" * 100_000, "deeper"),
            (b"[" * 65 + b"]" * 65, "deeper"),
            (b'{"a": ' + b"1" * 5000 + b"}", "not sound JSON"),
            (b'{"a": 1} x', "not sound JSON"),
            (b'{"a": "\\ud800"}', "not sound JSON"),
            (b'{"a": "\xff"}', "not sound JSON"),
            (b'{"a": 1', "not sound JSON"),
            (b"", "an empty file"),
            (b"<html>", "an HTML page"),
            (b'"' + b"x" * (1 << 20) + b'"', "at most 1,048,576"),
        ],
    )
    def test_refused(self, tmp_path: Path, raw: bytes, words: str) -> None:
        (tmp_path / "a.json").write_bytes(raw)
        with pytest.raises(AdapterFileError, match=words):
            read_json(tmp_path / "a.json")

    def test_brackets_in_text_do_not_nest(self, tmp_path: Path) -> None:
        value = {"a": "[" * 1000 + '\\"[{' * 100 + "\\"}
        write_json(tmp_path / "a.json", value)
        assert read_json(tmp_path / "a.json") == value


def run(code: str, *args: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **kwargs)  # type: ignore[call-overload,no-any-return]


class TestSaving:
    @pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
    def test_mode_follows_the_umask(self, tmp_path: Path, umask: int, mode: int) -> None:
        old = os.umask(umask)
        try:
            write_tensors(tmp_path / "a", example(), META)
            write_json(tmp_path / "b", META)
        finally:
            os.umask(old)
        assert (tmp_path / "a").stat().st_mode & 0o777 == mode
        assert (tmp_path / "b").stat().st_mode & 0o777 == mode

    def test_an_existing_mode_stays(self, tmp_path: Path) -> None:
        write_tensors(tmp_path / "a", example(), META)
        (tmp_path / "a").chmod(0o640)
        write_tensors(tmp_path / "a", {}, META)
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
        assert read_tensors(tmp_path / "a", "example")[0] == {}

    def test_a_link_stays_a_link_and_its_target_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "deep").mkdir()
        write_json(tmp_path / "deep/real", {"old": 1})
        (tmp_path / "link").symlink_to("deep/real")
        (tmp_path / "new link").symlink_to("deep/none yet")
        for name in ("link", "new link"):
            write_json(tmp_path / name, {"new": 2})
            assert (tmp_path / name).is_symlink()
        assert read_json(tmp_path / "deep/real") == read_json(tmp_path / "deep/none yet") == {"new": 2}
        assert litter(tmp_path) == litter(tmp_path / "deep") == []

    def test_a_folder_a_missing_parent_and_a_parent_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        before = sorted(os.listdir(tmp_path))
        for path, error in {
            tmp_path: IsADirectoryError,
            tmp_path / "none" / "a": FileNotFoundError,
            tmp_path / "file" / "a": OSError,
        }.items():
            with pytest.raises(error):
                write_tensors(path, example(), META)
        assert sorted(os.listdir(tmp_path)) == before

    def test_a_read_only_folder(self) -> None:
        # Root writes anywhere, so a process that gives its rights up does it; outside the tests' own private folder.
        code = """
import os, sys
from mmattn.files import write_json
if os.getuid() == 0:
    os.setuid(65534)
for folder in sys.argv[1:]:
    try:
        write_json(os.path.join(folder, "a"), {"new": 2})
        print("written")
    except OSError as error:
        print(type(error).__name__)
"""
        with tempfile.TemporaryDirectory() as shut, tempfile.TemporaryDirectory() as free:
            write_json(os.path.join(shut, "a"), {"old": 1})
            os.chmod(shut, 0o555)
            os.chmod(free, 0o777)
            done = run(code, shut, free)
            assert done.stdout.split() == ["PermissionError", "written"], done.stderr
            assert read_json(os.path.join(shut, "a")) == {"old": 1}
            assert os.listdir(shut) == ["a"]

    def test_disk_full_at_twenty_sizes(self, tmp_path: Path) -> None:
        """The system refuses to let a file grow; what was there stays, and nothing else is left."""
        write_tensors(tmp_path / "a", {"x": torch.zeros(3)}, META)
        old = (tmp_path / "a").read_bytes()
        code = """
import resource, sys, torch
from mmattn.files import write_tensors
tensors = {"x": torch.ones(50_000), "y": torch.ones(50_000)}
for size in range(0, 400_000, 20_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        write_tensors(sys.argv[1], tensors, {"format": "example"})
    except OSError as error:
        print(type(error).__name__)
"""
        done = run(code, tmp_path / "a")
        assert done.stdout.split() == ["OSError"] * 20, done.stderr
        assert (tmp_path / "a").read_bytes() == old
        assert os.listdir(tmp_path) == ["a"]

    def test_ctrl_c_in_the_middle(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_json(tmp_path / "a", {"old": 1})

        def interrupt(*args: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("os.fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_json(tmp_path / "a", {"new": 2})
        assert read_json(tmp_path / "a") == {"old": 1}
        assert os.listdir(tmp_path) == ["a"]

    def test_data_then_name_then_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The order that outlives a power cut."""
        steps: list[str] = []
        sync, replace = os.fsync, os.replace

        def watched_sync(handle: int) -> None:
            steps.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
            sync(handle)

        def watched_replace(a: str, b: str) -> None:
            steps.append("rename")
            replace(a, b)

        monkeypatch.setattr("os.fsync", watched_sync)
        monkeypatch.setattr("os.replace", watched_replace)
        write_tensors(tmp_path / "a", example(), META)
        assert steps == ["file", "rename", "folder"]

    def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(self, tmp_path: Path) -> None:
        code = """
import sys
from mmattn.atomic import replacing
with replacing(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("ready", flush=True)
    sys.stdin.readline()
    file.write(b" and half")
"""
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(tmp_path / name)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in ("killed", "alive")
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        writers[0].kill()
        writers[0].communicate()
        assert len(litter(tmp_path)) == 2
        write_json(tmp_path / "other", {})
        assert len(litter(tmp_path)) == 1
        writers[1].communicate("go\n")
        assert (tmp_path / "alive").read_bytes() == b"half and half"
        assert sorted(os.listdir(tmp_path)) == ["alive", "other"]

    def test_tensors_that_change_while_they_are_written_make_no_bad_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A training thread beside the save: the file holds some step's values, and its checksums fit."""
        weight = torch.zeros(1000)
        sha256 = hashlib.sha256

        def busy(*args: bytes) -> object:
            weight.add_(1)
            return sha256(*args)

        monkeypatch.setattr("mmattn.files.hashlib.sha256", busy)
        write_tensors(tmp_path / "a", {"x": weight, "y": weight}, META)
        monkeypatch.undo()
        after, _ = read_tensors(tmp_path / "a", "example")
        assert after["y"][0] > after["x"][0] > 0


class TestFingerprint:
    def test_one_changed_weight_anywhere_changes_it(self) -> None:
        state = {"a": torch.randn(101, 103), "b": torch.randn(9001, dtype=torch.float64).bfloat16(), "c": torch.ones(3)}
        first = fingerprint(state)
        assert fingerprint({name: x.clone() for name, x in reversed(state.items())}) == first
        seen = {first}
        for tensor in state.values():
            flat = tensor.view(-1).view(torch.uint8)
            for place in random.Random(7).sample(range(len(flat)), min(len(flat), 100)):
                flat[place] ^= 1
                seen.add(fingerprint(state))
                flat[place] ^= 1
        assert len(seen) == 1 + 100 + 100 + 12
        assert fingerprint(state) == first

    def test_swaps_and_moves_change_it(self) -> None:
        weight = torch.randn(64, 2048)
        changes = [weight.flip(0), weight.flip(1), weight.roll(1, 0), weight.roll(2048, 1).roll(1, 1), weight.T.clone()]
        swapped = weight.clone()
        swapped[[3, 5]] = weight[[5, 3]]
        marks = {fingerprint({"w": x}) for x in [weight, swapped, *changes]}
        assert len(marks) == 7

    def test_names_shapes_and_dtypes_count(self) -> None:
        x = torch.zeros(6)
        states = [{"w": x}, {"v": x}, {"w": x.view(2, 3)}, {"w": x.int()}, {"w": x, "v": x}, {"w": x[:5]}, {}]
        assert len({fingerprint(state) for state in states}) == 7

    def test_views_count_by_their_values(self) -> None:
        weight = torch.randn(50, 4099)
        assert fingerprint({"w": weight[:, 1:4098]}) == fingerprint({"w": weight[:, 1:4098].clone()})
        assert fingerprint({"w": weight.view(-1)[1:]}) == fingerprint({"w": weight.view(-1)[1:].clone()})

    def test_no_values_no_fingerprint(self) -> None:
        with pytest.raises(ConfigError, match="meta"):
            fingerprint({"w": torch.zeros(3, device="meta")})
