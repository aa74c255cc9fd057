"""Saving and loading an index: whole, or refused by name, its checksums right or wrong."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mmattn import Index
from mmattn.errors import IndexFileError, IndexMismatchError
from mmattn.retrieval import index_files as folders
from mmattn.storage.safetensors import write_tensors
from tests.retrieval.searching import Letters, files, same, small

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(("store", "mapped"), [("ivfpq", False), ("ivfpq", True), ("ivf", True)])
def test_an_index_mapped_from_a_version_that_is_gone_still_searches(tmp_path: Path, store: str, mapped: bool) -> None:
    index = small(1201, store=store)
    index.save(tmp_path / "index")
    again = Index.load(tmp_path / "index", mapped=mapped)
    with open("/proc/self/maps") as maps:
        assert any(str(tmp_path / "index") in line for line in maps) == mapped
    small(7).save(tmp_path / "index")
    same(index, again)
    shutil.rmtree(tmp_path / "index")
    same(index, again)
    again.save(tmp_path / "new")
    same(index, Index.load(tmp_path / "new"))


def test_encoders(tmp_path: Path) -> None:
    index = Index.build(["a text", "another"], encoder=Letters())
    index.save(tmp_path / "index")
    assert Index.load(tmp_path / "index", encoder=Letters()).search("a text", 1).ids == [[0]]
    alone = Index.load(tmp_path / "index")
    assert alone.search(Letters().encode(["a text"]), 1).ids == [[0]]
    for other in (Letters(seed=3), Letters(7)):
        with pytest.raises(IndexMismatchError, match="width 7|another encoder"):
            Index.load(tmp_path / "index", encoder=other)
        with pytest.raises(IndexMismatchError):
            Index(alone.store, other)


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


def sign(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda body: None) -> None:
    """Change what the index says it is, with checksums that fit its files and itself."""
    body = json.loads((folder / "index.json").read_text())
    body["files"] = {name: folders._described(str(folder / "v1" / name)) for name in body["files"]}
    change(body)
    body.pop("sha256", None)
    (folder / "index.json").write_text(json.dumps({**body, "sha256": folders._checksum(body)}))


def wrong_line(line: bytes) -> Callable[[Path], None]:
    return lambda f: edit(
        f / "v1/entries.jsonl", lambda raw: b"\n".join([raw.split(b"\n")[0], line, *raw.split(b"\n")[2:]])
    )


def wrong_tensors(**change: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / "v1/vectors.safetensors"
        tensors = {name: value for name, value in {**load_file(path), **change}.items() if value is not None}
        write_tensors(path, tensors, {"format": "mmattn-index-vectors"})

    return write


#: What is done to a saved index, and what the message names.
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "torn vectors": (lambda f: edit(f / "v1/vectors.safetensors", lambda raw: raw[:-1]), "wrong checksum; .* bytes"),
    "bytes behind": (lambda f: edit(f / "v1/vectors.safetensors", lambda raw: raw + b"\0"), "wrong checksum; .* bytes"),
    "no entries": (lambda f: (f / "v1/entries.jsonl").unlink(), "entries.jsonl"),
    "no manifest": (lambda f: (f / "index.json").unlink(), "it has no index.json"),
    "an edited manifest": (lambda f: edit(f / "index.json", lambda raw: raw.replace(b'"ip"', b'"l2"')), "checksum"),
    "a file too many": (
        lambda f: ((f / "v1/.DS_Store").touch(), (f / "v1/more.faiss").touch()), r"not belong to it: \['more.faiss'\]"
    ),
}  # fmt: skip
#: The same, with checksums that fit.
SIGNED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an entry fewer": (lambda f: edit(f / "v1/entries.jsonl", lambda raw: raw[: raw.index(b"\n") + 1]), "1 for 1201"),
    "an entry twice": (
        lambda f: edit(f / "v1/entries.jsonl", lambda raw: raw.replace(b'"id": 1,', b'"id": 0,')), "0 is given more"
    ),
    "faiss of something else": (lambda f: edit(f / "v1/engine.faiss", lambda raw: b"nonsense"), "faiss says"),
    "a deep line": (lambda f: edit(f / "v1/entries.jsonl", lambda raw: b"[" * 99999 + raw), "line 1 is not sound JSON"),
    "a null id": (wrong_line(b'{"id": null, "text": null, "metadata": null}'), "row 1"),
    "more than it should": (wrong_line(b'{"id": 1, "text": null, "metadata": null, "vector": null}'), "line 2"),
    "a number for a text": (wrong_line(b'{"id": 1, "text": 3, "metadata": null}'), "text 1"),
    "a key twice": (wrong_line(b'{"id": 1, "id": 7, "text": null, "metadata": null}'), "line 2"),
    "NaN": (wrong_line(b'{"id": 1, "text": null, "metadata": NaN}'), "line 2"),
    "half a character": (wrong_line(b'{"id": 1, "text": "\\ud800", "metadata": null}'), "line 2"),
    "another encoding": (wrong_line('{"id": 1, "text": "ü", "metadata": null}'.encode("latin-1")), "line 2"),
    "no vectors": (wrong_tensors(vectors=None), r"vectors \(0,\)"),
    "infinite vectors": (wrong_tensors(vectors=torch.full((1201, 12), torch.inf)), "NaN or infinite"),
    "rows twice": (wrong_tensors(rows=torch.zeros(1201, dtype=torch.long)), "not those of 1201 entries"),
    "rows beyond": (wrong_tensors(rows=torch.arange(1, 1202)), "not those of 1201 entries"),
    "lengths below 0": (
        wrong_tensors(tokens=torch.ones(1200, 2), lengths=torch.tensor([2, -1] + [1] * 1199)), "not those of 1201"
    ),
    "too few tokens": (
        wrong_tensors(tokens=torch.ones(3, 2), lengths=torch.ones(1201, dtype=torch.long)), "holds 3 encoded"
    ),
    "another tensor": (wrong_tensors(more=torch.ones(3)), "beside the vectors it holds"),
}  # fmt: skip
#: Manifests that are well signed and wrong: what the message names, and whether the store is opened to find out.
MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str, bool]] = {
    "files without sizes": (lambda body: body["files"].update({"entries.jsonl": {}}), "bytes", False),
    "no files at all": (lambda body: body.update(files={}), "not belong", True),
    "a file left out": (lambda body: body["files"].pop("engine.faiss"), "engine.faiss", True),
    "a file elsewhere": (
        lambda body: body["files"].update({"../v1/entries.jsonl": body["files"]["entries.jsonl"]}), "entries", False
    ),
    "a size that is true": (lambda body: body["files"]["entries.jsonl"].update(bytes=True), "bytes", False),
    "a version below 0": (lambda body: body.update(version=-1), "version", False),
    "a version that is text": (lambda body: body.update(version="1"), "version", False),
    "about a list": (lambda body: body.update(about=[]), "about", False),
    "no store": (lambda body: body["about"].pop("store"), "store", False),
    "a store that is a list": (lambda body: body["about"].update(store=[1]), "store", False),
    "a setting of another type": (lambda body: body["about"]["settings"].update(links="32"), "links", True),
    "an unknown setting": (lambda body: body["about"]["settings"].update(shell="rm"), "shell", True),
    "a setting that is an argument": (lambda body: body["about"]["settings"].update(mapped=True), "mapped", True),
    "a count that is true": (lambda body: body["about"].update(count=True), "count", False),
    "another count": (lambda body: body["about"].update(count=1200), "1201 entries.*1200 below 1201", True),
    "another width": (lambda body: body["about"].update(dim=13), r"\(1201, 12\).*13", True),
    "a huge width": (lambda body: body["about"].update(dim=10**15), "dim", False),
    "a next id below the ids": (lambda body: body["about"].update(next_id=7), "below 7", True),
    "tokens that are not there": (lambda body: body["about"].update(token_dim=7), "7 was saved", True),
    "an encoder that is a list": (lambda body: body["about"].update(encoder=[]), "encoder", False),
    "a module that is code": (lambda body: body["about"].update(module="os; import evil"), "module", False),
    "an unknown metric": (lambda body: body["about"].update(metric="dot"), "metric", False),
    "an unknown store": (lambda body: body["about"].update(store="os.system"), "'os.system', which is not reg", False),
    "another store": (lambda body: body["about"].update(store="exact", settings={}), "rows", True),
    "a format version that is true": (lambda body: body.update(format_version=True), "format_version", False),
    "a later format": (lambda body: body.update(format_version=2), "format version 2.*reads 1", False),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("good") / "index"
    small(1201, store="hnsw", metric="ip").save(folder)
    return folder


@pytest.mark.parametrize("case", [*DAMAGE, *SIGNED])
def test_damage_is_refused_by_name(good: Path, tmp_path: Path, case: str) -> None:
    """Invariant 134: with checksums that fit, too."""
    shutil.copytree(good, tmp_path / "index")
    damage, match = (DAMAGE | SIGNED)[case]
    damage(tmp_path / "index")
    if case in SIGNED:
        sign(tmp_path / "index")
    with pytest.raises(IndexFileError, match=match):
        Index.load(tmp_path / "index")


@pytest.mark.parametrize("case", MANIFESTS)
def test_well_signed_and_wrong(good: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 82."""
    shutil.copytree(good, tmp_path / "index")
    change, match, is_opened = MANIFESTS[case]
    sign(tmp_path / "index")
    Index.load(tmp_path / "index")
    sign(tmp_path / "index", change)

    def read(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a store was opened although the manifest is wrong")

    if not is_opened:
        monkeypatch.setattr(type(Index.build(torch.eye(2), store="hnsw").store), "open", read)
    with pytest.raises(IndexFileError, match=match):
        Index.load(tmp_path / "index")


def test_zeros_under_the_cosine_are_refused(tmp_path: Path) -> None:
    Index.build(torch.eye(3)).save(tmp_path)
    wrong_tensors(vectors=torch.zeros(3, 3))(tmp_path)
    sign(tmp_path)
    with pytest.raises(IndexFileError, match="all zeros"):
        Index.load(tmp_path)


@pytest.mark.parametrize("store", ["ivf", "ivfpq"])
def test_what_faiss_built_for_another_store_or_metric_is_refused(tmp_path: Path, store: str) -> None:
    for number, other in enumerate(({"store": "hnsw", "metric": "ip"}, {"store": store, "metric": "l2"})):
        torch.manual_seed(0)
        small(1201, store=store, metric="ip").save(tmp_path / f"{number}")
        small(1201, **other).save(tmp_path / "other")
        shutil.copy(tmp_path / "other/v1/engine.faiss", tmp_path / f"{number}/v1/engine.faiss")
        shutil.rmtree(tmp_path / "other")
        sign(tmp_path / f"{number}")
        with pytest.raises(IndexFileError, match="for another store or metric"):
            Index.load(tmp_path / f"{number}")


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


# ---- golden indexes, which mmattn 1.0 saved


def test_a_golden_index_answers_as_it_did(tmp_path: Path) -> None:
    index = Index.load(GOLDEN / "1/exact")
    assert index.ids == ("a", "1", 1, "ü🌷", 8) and (index.metric, index.dim, index.store.kind) == ("l2", 3, "exact")
    assert index["ü🌷"][:3] == ("ü🌷", "ü", "text") and index["a"].metadata == {"n": 1, "ü": [None, 0.5]}
    hits = index.search([[1.0, 0.0, 0.0], [1.0, 1.0, 1.5]], 3)
    assert hits.ids == [["a", "1", 8], [8, 1, "a"]] and hits.memory(tokens=True).lengths == [4, 6]
    index.save(tmp_path / "again")
    same(index, Index.load(tmp_path / "again"))
    assert index.add(torch.ones(1, 3), tokens=index.search([1.0, 0, 0], 1).memory(tokens=True)) == (9,)


def test_a_golden_graph_answers_as_it_did() -> None:
    index = Index.load(GOLDEN / "1/hnsw")
    assert index.store.settings == {"links": 4, "build_effort": 16, "search_effort": 64}
    assert index.search(torch.ones(1, 7), 3).ids == [[39, 38, 37]] and 3 not in index and 40 in index
    assert index.search(torch.ones(1, 7), 2, filter={"odd": 0}).ids == [[38, 36]]
    assert index.add(torch.ones(1, 7)) == (41,)
