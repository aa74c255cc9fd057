"""An `index.json` that is well signed and wrong: refused by IndexFileError with nothing read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmattn import Index
from mmattn.errors import IndexFileError
from mmattn.retrieval import index_files
from tests.retrieval.searching import same, small

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("good") / "index"
    small(1201, store="hnsw", metric="ip").save(folder)
    return folder


def sign(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with a checksum that fits."""
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    (folder / "index.json").write_text(json.dumps({**body, "sha256": index_files._checksum(body)}))


def refuse_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a store was opened although the manifest is wrong")

    monkeypatch.setattr(type(Index.build(torch.eye(2), store="hnsw").store), "open", read)


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "files without sizes": lambda body: body["files"].update({"entries.jsonl": {}}),
    "no files at all": lambda body: body.update(files={}),
    "a file left out": lambda body: body["files"].pop("engine.faiss"),
    "a file elsewhere": lambda body: body["files"].update({"../v1/entries.jsonl": body["files"]["entries.jsonl"]}),
    "a size that is true": lambda body: body["files"]["entries.jsonl"].update(bytes=True),
    "a version below 0": lambda body: body.update(version=-1),
    "a version that is text": lambda body: body.update(version="1"),
    "about a list": lambda body: body.update(about=[]),
    "no store": lambda body: body["about"].pop("store"),
    "a store that is a list": lambda body: body["about"].update(store=[1]),
    "a setting of another type": lambda body: body["about"]["settings"].update(links="32"),
    "an unknown setting": lambda body: body["about"]["settings"].update(shell="rm"),
    "a setting that is an argument": lambda body: body["about"]["settings"].update(mapped=True),
    "a count that is true": lambda body: body["about"].update(count=True),
    "a huge width": lambda body: body["about"].update(dim=10**15),
    "a next id below the ids": lambda body: body["about"].update(next_id=7),
    "tokens that are not there": lambda body: body["about"].update(token_dim=7),
    "an encoder that is a list": lambda body: body["about"].update(encoder=[]),
    "a module that is code": lambda body: body["about"].update(module="os; import evil"),
    "a format version that is true": lambda body: body.update(format_version=True),
    "a later format": lambda body: body.update(format_version=2),
}
#: These are found by looking at the files or the store.
LATER = {
    "no files at all",
    "a file left out",
    "a size that is true",
    "a setting of another type",
    "an unknown setting",
    "a setting that is an argument",
    "a next id below the ids",
    "tokens that are not there",
}


@pytest.mark.parametrize("case", WRONG)
def test_well_signed_and_wrong(good: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(good, tmp_path / "index")
    manifest = json.loads((good / "index.json").read_text())
    sign(tmp_path / "index", manifest)
    Index.load(tmp_path / "index")
    WRONG[case](manifest)
    sign(tmp_path / "index", manifest)
    if case not in LATER:
        refuse_reading(monkeypatch)
    with pytest.raises(IndexFileError):
        Index.load(tmp_path / "index")


def resign(folder: Path) -> None:
    manifest = json.loads((folder / "index.json").read_text())
    for name in manifest["files"]:
        manifest["files"][name] = index_files._described(str(folder / "v1" / name))
    sign(folder, manifest)


LINES = {
    "a null id": b'{"id": null, "text": null, "metadata": null}',
    "more than it should": b'{"id": 1, "text": null, "metadata": null, "vector": null}',
    "a number for a text": b'{"id": 1, "text": 3, "metadata": null}',
    "a key twice": b'{"id": 1, "id": 7, "text": null, "metadata": null}',
    "NaN": b'{"id": 1, "text": null, "metadata": NaN}',
    "half a character": b'{"id": 1, "text": "\\ud800", "metadata": null}',
    "another encoding": '{"id": 1, "text": "ü", "metadata": null}'.encode("latin-1"),
}


@pytest.mark.parametrize("case", LINES)
def test_a_wrong_line_is_named(tmp_path: Path, case: str) -> None:
    Index.build(torch.eye(3)).save(tmp_path)
    lines = (tmp_path / "v1/entries.jsonl").read_bytes().splitlines()
    lines[1] = LINES[case]
    (tmp_path / "v1/entries.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    resign(tmp_path)
    with pytest.raises(IndexFileError, match=r"entries.jsonl'.*(line 2|row 1|entry 1|text 1)"):
        Index.load(tmp_path)


def change_tensors(folder: Path, **change: Any) -> None:
    from safetensors.torch import load_file

    from mmattn.storage.safetensors import write_tensors

    path = folder / "v1/vectors.safetensors"
    tensors = {**load_file(path), **change}
    write_tensors(
        path, {name: value for name, value in tensors.items() if value is not None}, {"format": "mmattn-index-vectors"}
    )
    resign(folder)


TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "no vectors": ({"vectors": None}, r"vectors \(0,\)"),
    "infinite vectors": ({"vectors": torch.full((1201, 12), torch.inf)}, "NaN or infinite"),
    "rows twice": ({"rows": torch.zeros(1201, dtype=torch.long)}, "not those of 1201 entries"),
    "rows beyond": ({"rows": torch.arange(1, 1202)}, "not those of 1201 entries"),
    "lengths below 0": (
        {"tokens": torch.ones(1200, 2), "lengths": torch.tensor([2, -1] + [1] * 1199)},
        "not those of 1201 entries",
    ),
    "too few tokens": ({"tokens": torch.ones(3, 2), "lengths": torch.ones(1201, dtype=torch.long)}, "holds 3 encoded"),
    "another tensor": ({"more": torch.ones(3)}, "beside the vectors it holds"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_wrong_tensors_are_refused(good: Path, tmp_path: Path, case: str) -> None:
    shutil.copytree(good, tmp_path / "index")
    change, match = TENSORS[case]
    change_tensors(tmp_path / "index", **change)
    with pytest.raises(IndexFileError, match=match):
        Index.load(tmp_path / "index")


def test_zeros_under_the_cosine_are_refused(tmp_path: Path) -> None:
    Index.build(torch.eye(3)).save(tmp_path)
    change_tensors(tmp_path, vectors=torch.zeros(3, 3))
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
        resign(tmp_path / f"{number}")
        with pytest.raises(IndexFileError, match="for another store or metric"):
            Index.load(tmp_path / f"{number}")


def test_a_file_that_does_not_belong_is_refused(tmp_path: Path) -> None:
    Index.build(torch.eye(3)).save(tmp_path)
    (tmp_path / "v1/.DS_Store").write_bytes(b"")
    Index.load(tmp_path)
    (tmp_path / "v1/engine.faiss").write_bytes(b"")
    with pytest.raises(IndexFileError, match=r"files that do not belong to it: \['engine.faiss'\]"):
        Index.load(tmp_path)


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
