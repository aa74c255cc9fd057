"""Stores in databases, for real: addresses, processes that write at once, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest
import torch
from qdrant_client import QdrantClient, models

from mmattn import Index
from mmattn.errors import ConfigError, IndexFileError, IndexMismatchError, MissingExtraError
from mmattn.retrieval import LanceStore, PgvectorStore, QdrantStore, register_store
from mmattn.retrieval.stores import STORES, find_address
from mmattn.retrieval.stores.qdrant import ABOUT
from tests import tiny
from tests.retrieval.searching import Letters, held

ROOT = Path(__file__).resolve().parent.parent.parent
TEXTS = ["sun and moon", "a grey cat", "the moon"]
#: By how an address begins, what is not installed where the library is missing, and the extra that brings it.
SCHEMES = {
    "postgresql": ("psycopg", "postgres"),
    "lance": ("lancedb", "lance"),
    "qdrant": ("qdrant_client", "scale"),
}


@pytest.fixture
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An address of the scheme that the test is given, where nothing is yet."""
    if request.param == "postgresql":
        return f"{request.getfixturevalue('postgres')}#{request.getfixturevalue('schema')}.facts"
    return f"{request.param}:{tmp_path / 'facts'}"


every_scheme = pytest.mark.parametrize("address", SCHEMES, indirect=True)


# ---- each of them by itself


def test_an_index_of_pgvector_is_used_and_left_out(postgres: str, schema: str) -> None:
    vectors, queries = torch.randn(2003, 12), torch.randn(29, 12)
    exact = Index.build(vectors).search(queries, 10).ids
    for setting in (True, False):
        index = Index.build(vectors, store="pgvector", dsn=postgres, table=f"{schema}.a{setting}", index=setting)
        assert bool(index.store._read_state()["indexed"]) == setting  # type: ignore[attr-defined]
        found = index.search(queries, 10).ids
        assert found and exact
        share = sum(len(set(a) & set(b)) for a, b in zip(found, exact, strict=True)) / (29 * 10)
        assert share == 1.0 if not setting else share > 0.9
        index.close()


def test_rows_that_were_replaced_hide_no_others_from_an_index(postgres: str, schema: str) -> None:
    """Until a vacuum the old rows stay in the index of pgvector, here all of them nearer to the query."""
    vectors, query = torch.randn(1203, 12), torch.full((12,), 9.0)
    index = Index.build(vectors, store="pgvector", metric="l2", dsn=postgres, table=f"{schema}.a")
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f"ALTER TABLE {schema}.a SET (autovacuum_enabled = false)")
    for values in (query + torch.randn(1200, 12) / 100, vectors[:1200]):
        index.update(range(1200), values)
    assert index.search(query, 10).mask.all()
    index.close()


def test_closing_waits_for_a_change(postgres: str, schema: str) -> None:
    """Else the change would go on in another connection, without its transaction."""
    index = Index.build(torch.eye(3), store="pgvector", dsn=postgres, table=f"{schema}.a")
    store, closing = index.store, threading.Thread(target=index.close)
    assert isinstance(store, PgvectorStore)
    with store.writing():
        closing.start()
        closing.join(0.2)
        store.about = {**store.about, "next_id": 7}
    closing.join()
    assert index.add(torch.ones(1, 3)) == (7,)
    index.close()


def test_requests_to_qdrant_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server refuses large ones."""
    client = QdrantClient(":memory:")
    spies = {name: Mock(wraps=getattr(client, name)) for name in ("retrieve", "query_batch_points", "upsert")}
    for name, spy in spies.items():
        monkeypatch.setattr(client, name, spy)
    index = Index.build(torch.randn(300, 3), store="qdrant", client=client)
    assert index.search(torch.randn(300, 3), 1).mask.all()
    assert len(index.store.get(index.ids)) == 300
    index.delete(index.ids)
    assert len(index) == 0
    assert max(len(call.args[1]) for spy in spies.values() for call in spy.call_args_list) == 256


@pytest.mark.slow
@every_scheme
def test_vectors_are_float32_whatever_the_default(address: str) -> None:
    index = Index.build(torch.rand(3, 3), store=address)
    with tiny.default_dtype(torch.float64):
        hits = index.search(torch.ones(3), 2)
        assert hits.vectors is not None and hits.vectors.dtype == index[0].vector.dtype == torch.float32
    index.close()


# ---- by address


@every_scheme
def test_built_and_opened_by_address(address: str) -> None:
    index = Index.build(
        TEXTS, encoder=Letters(), ids=["x", 7, "7"], metadata=[{"n": 1}, None, [1, 1e300]], store=address
    )
    expected, before = index.search("the moon", 3, filter={"n": 1.0}), held(index)
    index.close()
    again = Index.open(address, encoder=Letters())
    assert again.ids == ("x", 7, "7") and held(again) == before and again.metric == "cosine"
    hits = again.search("the moon", 3, filter={"n": 1.0})
    assert hits.ids == expected.ids == [["x", None, None]] and torch.equal(hits.scores, expected.scores)
    assert again.search(["the moon"], 1, score_threshold=0.99).memory().lengths == [1]
    assert again.add(["a fourth"]) == (8,) and again.ids == ("x", 7, "7", 8)
    again.close()
    with pytest.raises(IndexMismatchError, match="entries were encoded by"):
        Index.open(address, encoder=Letters(seed=2))
    with pytest.raises(ConfigError, match="already|not empty"):
        Index.build(TEXTS, encoder=Letters(), store=address)
    Index.open(address).store.drop()  # type: ignore[attr-defined]
    with pytest.raises(IndexFileError, match="there is no "):
        Index.open(address)


@every_scheme
def test_copied_there_and_back(address: str, tmp_path: Path) -> None:
    from mmattn import Memory

    tokens = Memory.pad([torch.randn(length, 7) for length in (2, 1, 3)])
    index = Index.build(TEXTS, encoder=Letters(), tokens=tokens, ids=["a", 5, "c"])
    index.delete(["c"])
    copied = index.copy(address)
    assert held(copied) == held(index) and copied.space.fingerprint == Letters().fingerprint
    assert [entry.tokens.shape for entry in map(copied.__getitem__, copied.ids)] == [(2, 7), (1, 7)]  # type: ignore
    back = copied.copy("exact")
    assert back.store.about == index.store.about and held(back) == held(index)
    copied.close()


@every_scheme
def test_a_build_that_fails_leaves_nothing(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = find_address(address)  # type: ignore[misc]

    def fail(self: Any, entries: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(store, "add", fail)
        Index.build(torch.eye(3), store=address)
    index = Index.build(torch.eye(3), store=address)
    assert len(index) == 3
    index.close()


@every_scheme
def test_a_change_that_fails_changes_nothing(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index.build(torch.eye(3), store=address)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(index.store), "add", lambda self, entries: (_ for _ in ()).throw(KeyboardInterrupt))
        index.add(torch.eye(3))
    assert index.ids == (0, 1, 2) and index.store.about["next_id"] == 3
    assert index.add(torch.eye(3)) == (3, 4, 5)
    index.close()


@pytest.mark.parametrize(
    ("address", "settings"),
    [
        ("postgresql://me:secret@host:5432/db?sslmode=require#a.facts", ("dsn", "table")),
        ("postgres://me@host/db", ("dsn",)),
        ("lance:runs/facts#other", ("uri", "table")),
        ("lance:s3://bucket/path", ("uri",)),
        ("qdrant:http://host:6333/facts", ("location", "collection")),
        ("qdrant:https://host:6333/", ("location",)),
        ("qdrant:runs/facts", ("location",)),
    ],
)
def test_addresses(address: str, settings: tuple[str, ...]) -> None:
    found = find_address(address)
    assert found is not None and tuple(found[1]) == settings
    parts = {"postgresql://me:secret@host:5432/db?sslmode=require", "a.facts", "postgres://me@host/db", "runs/facts"}
    parts |= {"other", "s3://bucket/path", "http://host:6333", "facts", "https://host:6333"}
    assert set(found[1].values()) <= parts


def test_what_is_no_address(tmp_path: Path) -> None:
    assert find_address("C:\\facts") is find_address("runs/facts") is None
    with pytest.raises(IndexFileError, match="no store has addresses that begin with mysql://; known: ") as no:
        Index.open("mysql://me:secret@host/db")
    assert "postgresql:" in str(no.value) and "secret" not in str(no.value)
    with pytest.raises(IndexFileError):
        Index.open(tmp_path)
    Index.build(torch.eye(3)).save(tmp_path / "index")
    assert Index.open(tmp_path / "index").ids == Index.open(str(tmp_path / "index")).ids == (0, 1, 2)


def test_a_store_of_ones_own_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STORES, "loaded", dict(STORES.loaded))

    @register_store("mine")
    class Mine(LanceStore):
        schemes = ("mine",)

        @classmethod
        def settings_of(cls, address: str) -> dict[str, Any]:
            return {"table": address.removeprefix("mine:")}

    assert Index.build(torch.eye(3), store="mine:facts").store.name == "facts"  # type: ignore[attr-defined]


@every_scheme
def test_without_the_extra(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, extra = SCHEMES[address.partition(":")[0]]
    Path(address.partition(":")[2]).mkdir(exist_ok=True, parents=True) if "//" not in address else None
    monkeypatch.setitem(sys.modules, module, None)
    for attempt in (lambda: Index.open(address), lambda: Index.build(torch.eye(3), store=address)):
        with pytest.raises(MissingExtraError, match=rf"mmattn\[{extra}\]"):
            attempt()


# ---- several processes

WRITER = """
import sys, torch
from mmattn import Index
index = Index.open(sys.argv[1])
for step in range(int(sys.argv[3])):
    index.add(torch.full((2, 3), float(step + 1)), texts=[sys.argv[2]] * 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("address", ["postgresql", "lance"], indirect=True)
def test_two_processes_write_and_numbers_are_given_once(address: str) -> None:
    """Invariant 92."""
    index = Index.build(torch.eye(3), store=address)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, address, name, "11"], env=environment, cwd=ROOT)
        for name in ("one", "two")
    ]
    assert [writer.wait(600) for writer in writers] == [0, 0]
    assert index.ids == tuple(range(47)), "an id is missing, twice, or out of order"
    texts = [index[name].text for name in index.ids[3:]]
    assert texts.count("one") == texts.count("two") == 22
    assert texts[::2] == texts[1::2], "the entries of one change lie together"


# ---- refusals


def test_tables_of_others_are_left_alone(postgres: str, schema: str) -> None:
    address = f"{postgres}#{schema}.facts"
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {schema}.facts (a int)")
        with pytest.raises(IndexFileError, match=f"table '{schema}.facts' is not of this version of mmattn"):
            Index.open(address)
        with pytest.raises(ConfigError, match="there is a table .* already: open it with Index.open"):
            Index.build(torch.eye(3), store=address)
        index = Index.build(torch.eye(3), store=f"{address}2")
        for state in ('{"format_version": 2}', "[2]"):
            connection.execute(f"UPDATE {schema}.facts2_about SET state = %s", [state])
            with pytest.raises(IndexFileError, match="is not of this version of mmattn, which reads format 1"):
                Index.open(f"{address}2")
        index.close()
        connection.execute(f"CREATE TABLE {schema}.facts3_about (a int)")
        with pytest.raises(ConfigError, match="there is a table .* already"):
            Index.build(torch.eye(3), store=f"{address}3")


def test_a_password_is_never_said(postgres: str, schema: str, tmp_path: Path) -> None:
    """Invariant 92."""
    absent = "postgresql://me:s3cret@127.0.0.1:1/db?connect_timeout=2"
    with pytest.raises(IndexFileError, match="cannot open a database of PostgreSQL: .*Start the server") as error:
        Index.open(absent)
    assert "s3cret" not in str(error.value)
    for dsn in ("postgresql://me:s3cret%zz@host/db", "host=a s3cret"):
        with pytest.raises(ConfigError, match="libpq cannot read dsn") as refused:
            Index.build(torch.eye(3), store="pgvector", dsn=dsn)
        assert "s3cret" not in str(refused.value)
    dsn = psycopg.conninfo.make_conninfo(postgres, password="s3cret")
    index = Index.build(torch.eye(3), store="pgvector", dsn=dsn, table=f"{schema}.a")
    assert "s3cret" not in f"{index!r} {index.store!r}"
    index.save(tmp_path / "copy")
    assert b"s3cret" not in b"".join(path.read_bytes() for path in (tmp_path / "copy").rglob("*") if path.is_file())
    again = Index.load(tmp_path / "copy")
    assert again.ids == (0, 1, 2)
    again.close()
    index.close()


def test_a_name_is_only_a_name(postgres: str) -> None:
    """Whatever stands in the name of a table, and in ids, texts and metadata."""
    name = 'f"; DROP TABLE x; --'
    index = Index.build(torch.eye(3), ids=[name, "'", "\0"], texts=[name, "\x01", "\0"], store="pgvector",
                        dsn=postgres, table=name, metadata=[{name: name}, {"\0": "\0"}, 1e300])  # fmt: skip
    assert [index[one][:3] for one in index.ids] == [
        (name, name, {name: name}),
        ("'", "\x01", {"\0": "\0"}),
        ("\0", "\0", 1e300),
    ]
    assert index.search([1.0, 0.0, 0.0], 3, filter={name: name}).ids == [[name, None, None]]
    index.store.drop()  # type: ignore[attr-defined]


def test_settings_of_pgvector(postgres: str, schema: str) -> None:
    with pytest.raises(ConfigError, match="up to 2000 wide, got 2001: give index=False"):
        Index.build(torch.ones(1, 2001), store="pgvector", dsn=postgres)
    index = Index.build(torch.ones(1, 2001), store="pgvector", dsn=postgres, index=False, table=f"{schema}.a")
    assert index.search(torch.ones(2001), 1).ids == [[0]]
    index.close()
    with pytest.raises(ConfigError, match="leave index= out"):
        PgvectorStore.connect(dsn=postgres, table=f"{schema}.a", index=False)


def test_folders_of_others(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(IndexFileError, match="there is no table 'mmattn' in .* that mmattn made: make one"):
            Index.open(f"lance:{folder}")
    Index.build(torch.eye(3), store=f"lance:{tmp_path}")
    store = LanceStore.connect(uri=tmp_path)
    store._write_state({**store._read_state(), "format_version": 2})
    with pytest.raises(IndexFileError, match="is not of this version of mmattn, which reads format 1"):
        Index.open(f"lance:{tmp_path}")


def test_collections_of_others_are_left_alone() -> None:
    client = QdrantClient(":memory:")
    client.create_collection("other", vectors_config=models.VectorParams(size=3, distance=models.Distance.DOT))
    with pytest.raises(IndexFileError, match="no collection 'mmattn' that mmattn made"):
        Index(QdrantStore.connect(client=client))
    with pytest.raises(IndexFileError, match="collection 'other' is not of this version of mmattn"):
        Index(QdrantStore.connect(client=client, collection="other"))
    with pytest.raises(ConfigError, match="a collection 'other' already"):
        Index.build(torch.eye(3), store="qdrant", client=client, collection="other")
    assert client.count("other").count == 0


@pytest.mark.slow
def test_a_folder_of_qdrant_is_opened_twice(tmp_path: Path) -> None:
    """Stores of one process share its client, until the last is closed; another process is refused in words."""
    folder = tmp_path / "q"
    made = Index.build(torch.eye(3), store=f"qdrant:{folder}")
    again = Index.open(f"qdrant:{folder}/../q")
    again.add(torch.eye(3)[:2])
    assert len(made) == 5
    again.close()
    code = f"""
import mmattn
try:
    mmattn.Index.open("qdrant:{folder}")
except mmattn.errors.IndexFileError as error:
    print(error)
"""
    run = [sys.executable, "-W", "error", "-c", code]
    other = subprocess.run(run, capture_output=True, text=True, check=False)
    assert "is open in another process" in other.stdout and not other.stderr
    made.close()
    opened = Index.open(f"qdrant:{folder}")
    assert len(opened) == 5
    opened.close()
    other = subprocess.run([*run[:-1], code.replace("mmattn.Index", "index = mmattn.Index")], capture_output=True)
    assert (other.stdout, other.stderr) == (b"", b"")


def test_further_fields_of_a_collection_are_left_alone() -> None:
    client = QdrantClient(":memory:")
    index = Index.build(torch.eye(3), store="qdrant", client=client)
    client.set_payload("mmattn", {"reviewed": True}, points=models.Filter())
    assert index[1].id == 1 and index.search(torch.ones(3), 3).mask.all()


def test_a_collection_that_was_changed_is_refused() -> None:
    client = QdrantClient(":memory:")
    Index.build(torch.eye(3), store="qdrant", client=client)
    good = client.retrieve("mmattn", [ABOUT])[0].payload
    changes: list[dict[str, Any]] = [{**good, name: value} for name in good for value in ([], -1.5)]
    changes += [{key: value for key, value in good.items() if key != name} for name in good]
    for payload in changes:
        client.upsert("mmattn", [models.PointStruct(id=ABOUT, vector={}, payload=payload)])
        with pytest.raises(IndexFileError):
            Index(QdrantStore.connect(client=client))
