"""Saving and loading an index: whole, or refused by name."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmattn import Index, Memory
from mmattn.errors import IndexFileError, IndexMismatchError
from mmattn.retrieval import index_files as folders
from tests.retrieval.searching import METRICS, STORES, WIDTH, Letters, files, same, small


@pytest.mark.parametrize("mapped", [False, True], ids=["loaded", "mapped"])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("store", STORES)
def test_what_was_saved_is_loaded(tmp_path: Path, store: str, metric: str, mapped: bool) -> None:
    index = small(1201, metric=metric, store=store, metadata=[{"n": i, "ü": [None, 0.5]} for i in range(1201)])
    index.delete([5, 900])
    index.add(torch.randn(3, WIDTH), ids=["one", "zwö", "🌷"], texts=["a", None, "line\nbreak"])
    index.update([7], torch.randn(1, WIDTH))
    index.save(tmp_path / "index")
    again = Index.load(tmp_path / "index", mapped=mapped)
    same(index, again)
    if store != "exact":
        with open("/proc/self/maps") as maps:
            named = [line for line in maps if str(tmp_path / "index") in line]
        assert bool(named) == mapped
    # What was loaded goes on as if it had never been away.
    for one in (index, again):
        one.add(torch.ones(2, WIDTH))
        one.delete(["one", 11])
    same(index, again)
    again.save(tmp_path / "index")
    same(again, Index.load(tmp_path / "index"))


@pytest.mark.parametrize(("store", "mapped"), [("ivfpq", False), ("ivfpq", True), ("ivf", True)])
def test_an_index_mapped_from_a_version_that_is_gone_still_searches(tmp_path: Path, store: str, mapped: bool) -> None:
    index = small(1201, store=store)
    index.save(tmp_path / "index")
    again = Index.load(tmp_path / "index", mapped=mapped)
    small(7).save(tmp_path / "index")
    same(index, again)
    shutil.rmtree(tmp_path / "index")
    same(index, again)
    again.save(tmp_path / "new")
    same(index, Index.load(tmp_path / "new"))


def test_small_and_empty(tmp_path: Path) -> None:
    Index.build(torch.empty(0, 7), metric="l2", store="hnsw").save(tmp_path / "empty")
    index = Index.load(tmp_path / "empty")
    assert (len(index), index.dim, index.metric) == (0, 7, "l2")
    index.add(torch.eye(7), tokens=Memory.pad([torch.randn(m, 5) for m in (2, 3, 1, 1, 4, 1, 2)]))
    index.save(tmp_path / "empty")
    same(index, Index.load(tmp_path / "empty"))


def test_encoders(tmp_path: Path) -> None:
    index = Index.build(["a text", "another"], encoder=Letters())
    index.save(tmp_path / "index")
    assert Index.load(tmp_path / "index", encoder=Letters()).search("a text", 1).ids == [[0]]
    alone = Index.load(tmp_path / "index")
    assert alone.search(Letters().encode(["a text"]), 1).ids == [[0]]
    for other in (Letters(seed=3), Letters(7)):
        with pytest.raises(IndexMismatchError, match="width 7|another one"):
            Index.load(tmp_path / "index", encoder=other)
        with pytest.raises(IndexMismatchError):
            alone.search("a text", 1, encoder=other)


def test_a_folder_holds_one_version(tmp_path: Path) -> None:
    index = small(1201, store="hnsw")
    for _ in range(3):
        index.save(tmp_path / "index")
    version = ["v3/engine.faiss", "v3/entries.jsonl", "v3/vectors.safetensors"]
    assert files(tmp_path / "index") == ["index.json", *version]
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "index").rglob("*") if path.is_file()} == {0o644}


# ---- damage


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def forge(folder: Path, **about: Any) -> None:
    """Change what the index says it is, with checksums that fit."""
    manifest = json.loads((folder / "index.json").read_text())
    manifest["about"] |= about
    for name in manifest["files"]:
        raw = (folder / f"v{manifest['version']}" / name).read_bytes()
        manifest["files"][name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    del manifest["sha256"]
    manifest["sha256"] = folders._checksum(manifest)
    (folder / "index.json").write_text(json.dumps(manifest))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "torn vectors": (lambda f: edit(f / "v1/vectors.safetensors", lambda raw: raw[:-1]), "wrong checksum; .* bytes"),
    "bytes after the vectors": (
        lambda f: edit(f / "v1/vectors.safetensors", lambda raw: raw + b"\0"),
        "wrong checksum; .* bytes",
    ),
    "no entries": (lambda f: (f / "v1/entries.jsonl").unlink(), "entries.jsonl"),
    "no manifest": (lambda f: (f / "index.json").unlink(), "it has no index.json"),
    "an edited manifest": (lambda f: edit(f / "index.json", lambda raw: raw.replace(b'"ip"', b'"l2"')), "checksum"),
    "a newer one": (
        lambda f: edit(f / "index.json", lambda raw: raw.replace(b'"format_version": 1', b'"format_version": 2')),
        "format version 2.*reads 1",
    ),
    "an entry fewer": (
        lambda f: (edit(f / "v1/entries.jsonl", lambda raw: raw[: raw.index(b"\n") + 1]), forge(f)),
        "got 1 for 1201 entries",
    ),
    "an entry twice": (
        lambda f: (edit(f / "v1/entries.jsonl", lambda raw: raw.replace(b'"id": 1,', b'"id": 0,')), forge(f)),
        "0 is given more than once",
    ),
    "another count": (lambda f: forge(f, count=1200), "holds 1201 entries.*1200 below 1201 were saved"),
    "another width": (lambda f: forge(f, dim=13), r"\(1201, 12\), torch.float32, and float32 of width 13"),
    "an unknown metric": (lambda f: forge(f, metric="dot"), "metric: Input should be"),
    "an unknown store": (lambda f: forge(f, store="os.system"), "store 'os.system', which is not reg"),
    "another store": (lambda f: forge(f, store="exact", settings={}), "rows"),
    "faiss of something else": (
        lambda f: (edit(f / "v1/engine.faiss", lambda raw: b"nonsense"), forge(f)),
        "faiss says",
    ),
    "a line that is no entry": (
        lambda f: (edit(f / "v1/entries.jsonl", lambda raw: b"[" * 99999 + raw), forge(f)),
        "line 1 is not sound JSON",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("good") / "index"
    small(1201, store="hnsw", metric="ip").save(folder)
    return folder


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_refused_by_name(good: Path, tmp_path: Path, case: str) -> None:
    shutil.copytree(good, tmp_path / "index")
    Index.load(tmp_path / "index")
    damage, match = DAMAGE[case]
    damage(tmp_path / "index")
    with pytest.raises(IndexFileError, match=match):
        Index.load(tmp_path / "index")


@pytest.mark.parametrize("name", ["index.json", "v1/vectors.safetensors", "v1/entries.jsonl", "v1/engine.faiss"])
def test_any_flipped_bit_is_noticed(good: Path, tmp_path: Path, name: str, seeded: int) -> None:
    shutil.copytree(good, tmp_path / "index")
    path, chance = tmp_path / "index" / name, random.Random(seeded)
    raw = path.read_bytes()
    for _ in range(16):
        changed = bytearray(raw)
        changed[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(IndexFileError):
            Index.load(tmp_path / "index")
    path.write_bytes(raw)
    Index.load(tmp_path / "index")


def test_a_file_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"%PDF")
    with pytest.raises(IndexFileError, match="file"):
        Index.load(tmp_path / "file")
    with pytest.raises(NotADirectoryError, match="this is a file"):
        small(3).save(tmp_path / "file")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").write_text("years of work")
    with pytest.raises(IndexFileError, match="holds other things.*thesis.tex"):
        small(3).save(tmp_path / "home")
    assert files(tmp_path) == ["file", "home/thesis.tex"]
