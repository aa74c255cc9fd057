"""A store of a third party, in one file outside the package: the contract, files, and what is never imported."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn.errors import IndexFileError
from mmattn.testing import store_checks
from tests.foreign.store import SqliteStore
from tests.retrieval.searching import Letters

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("check", store_checks(), ids=lambda check: check.__name__.removeprefix("check_"))
def test_the_contract(check: Callable[[Any], None]) -> None:
    check(SqliteStore)


def test_it_serves_an_index_by_its_name(tmp_path: Path) -> None:
    texts = ["sun and moon", "a grey cat", "the moon"]
    index = mmattn.Index.build(texts, encoder=Letters(), store="sqlite", metadata=[{"n": n} for n in range(3)])
    assert repr(index) == "Index(3 entries, e=31, cosine, sqlite)"
    index.save(tmp_path / "index")
    again = mmattn.Index.load(tmp_path / "index", encoder=Letters())
    assert again.search("the moon", 2, filter={"n": 2}).texts == [["the moon", None]]
    assert torch.equal(again.search("a cat", 3).scores, index.search("a cat", 3).scores)
    assert sorted(path.name for path in (tmp_path / "index" / "v1").iterdir()) == ["entries.sqlite"]
    with pytest.raises(mmattn.errors.IndexMismatchError, match="entries were encoded by"):
        mmattn.Index.load(tmp_path / "index", encoder=Letters(seed=2))


def test_the_documentation_names_this_file_and_its_lines_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "retrieval.md").read_text(encoding="utf-8")
    assert "](../tests/foreign/store.py)" in page
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "sqlite_store" in block)
    monkeypatch.setitem(sys.modules, "sqlite_store", importlib.import_module("tests.foreign.store"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"mmattn": mmattn, "texts": ["one", "two"], "encoder": Letters(384)}
    exec(code, names)
    assert len(names["index"]) == 0 and names["index"].add(["three"]) == (0,)
    assert len(mmattn.Index.load("facts")) == 2


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    """Well signed, and not what the store writes."""
    index = mmattn.Index.build(torch.eye(3), store="sqlite")
    wrong = {"noise": b"no database" * 99, "another table": None}
    for name, content in wrong.items():
        index.store.save = lambda folder, content=content: (Path(folder) / "entries.sqlite").write_bytes(content or b"")
        index.save(tmp_path / name)
        with pytest.raises(IndexFileError, match="entries.sqlite holds no entries of width 3"):
            mmattn.Index.load(tmp_path / name)


def test_a_store_that_is_not_registered_is_named_and_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mmattn.Index.build(torch.eye(3), store="sqlite").save(tmp_path / "index")
    assert json.loads((tmp_path / "index" / "index.json").read_text())["about"]["module"] == "tests.foreign.store"
    code = f"""
import importlib, sys, mmattn
from mmattn.retrieval import Index
imported, real = [], importlib.import_module
importlib.import_module = lambda name, *rest: (imported.append(name), real(name, *rest))[1]
try:
    Index.load({str(tmp_path / "index")!r})
except mmattn.errors.IndexFileError as error:
    print(error)
print([name for name in (*imported, *sys.modules) if name.startswith("tests")])
import tests.foreign.store
print(len(Index.load({str(tmp_path / "index")!r})))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    message, imported, count = done.stdout.splitlines()
    assert "store 'sqlite', which is not registered" in message and "it says: tests.foreign.store" in message
    assert imported == "[]" and count == "3"
    assert importlib.import_module("tests.foreign.store").SqliteStore is SqliteStore
