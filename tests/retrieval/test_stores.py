"""Every store of ours passes the contract suite, and the suite notices a store that does not."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn.errors import ConfigError
from mmattn.retrieval import (
    HNSWStore,
    Index,
    InMemoryStore,
    IVFPQStore,
    IVFStore,
    LanceStore,
    PgvectorStore,
    QdrantStore,
    VectorStore,
    register_store,
)
from mmattn.retrieval.stores import STORES, Candidates
from mmattn.testing import check_store, store_checks
from mmattn.testing.case import run_checks

ROOT = Path(__file__).resolve().parent.parent.parent
OURS: dict[str, Callable[..., VectorStore]] = {
    "exact": InMemoryStore,
    "hnsw": HNSWStore,
    "ivf": IVFStore,
    "ivf-settings": partial(IVFStore, lists=7, visited=7),
    "ivfpq": IVFPQStore,
    "ivfpq-settings": partial(IVFPQStore, lists=7, visited=7, bytes=6),
    "qdrant": QdrantStore,
    "qdrant in a folder": QdrantStore,
    "qdrant on a server": QdrantStore,
    "lancedb": LanceStore,
    "lancedb in a folder": LanceStore,
    "pgvector": PgvectorStore,
}
#: What may differ between a folder and the memory of a process.
IN_FOLDERS = ("new", "filter_values", "entries", "order", "updates", "tokens")


PAIRS = [
    pytest.param(kind, check, id=f"{kind}-{name}")
    for kind in OURS
    for check in store_checks()
    if (name := check.__name__.removeprefix("check_")) in IN_FOLDERS or "folder" not in kind
]


def settings(kind: str, number: int, request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if kind == "pgvector":
        dsn, schema = (request.getfixturevalue(name) for name in ("postgres", "schema"))
        return {"dsn": dsn, "table": f"{schema}.t{number}"}
    if kind == "qdrant on a server":
        return {"location": os.environ["QDRANT_URL"], "collection": f"mmattn-test-{uuid.uuid4()}"}
    return {"location" if "qdrant" in kind else "uri": tmp_path / f"{number}"} if "folder" in kind else {}


@pytest.mark.parametrize(("kind", "check"), PAIRS)
def test_ours(kind: str, check: Callable[[Any], None], request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if "server" in kind and "QDRANT_URL" not in os.environ:
        pytest.skip("set QDRANT_URL to the address of a Qdrant server, such as http://localhost:6333")
    made: list[Any] = []

    def make(dim: int, metric: str) -> Any:
        made.append(OURS[kind](dim, metric, **settings(kind, len(made), request, tmp_path)))
        return made[-1]

    check(make)
    for store in made:
        store.drop() if "pgvector" in kind or "server" in kind else store.close()


def test_every_check_says_in_one_sentence_what_it_promises() -> None:
    checks = store_checks()
    assert len(checks) == len({check.__name__ for check in checks}) > 12
    for check in checks:
        assert check.__doc__ and check.__doc__.endswith(".") and len(check.__doc__) <= 120 and "\n" not in check.__doc__


# ---- the suite notices


class Broken(InMemoryStore):
    """Broken in one way, by `fault`."""

    fault = ""

    def add(self, entries: Any) -> None:
        if self.fault == "adds in front":
            old = self.version.entries
            rows = torch.arange(len(old), device=self.device) + len(entries)
            self._follow(entries.concat(old), rows)
        elif self.fault == "normalises":
            super().add(dataclasses.replace(entries, vectors=torch.nn.functional.normalize(entries.vectors)))
        else:
            super().add(entries)

    def update(self, entries: Any) -> None:
        if self.fault == "moves what is updated":
            self.delete(entries.ids)
            self.add(entries)
        else:
            super().update(entries)

    def delete(self, ids: Any) -> None:
        if self.fault != "never deletes":
            super().delete(ids)

    def get(self, ids: Any) -> Any:
        found = super().get(ids)
        if self.fault == "gets in the order asked":
            return found.select([found.rows[name] for name in dict.fromkeys(ids) if name in found.rows])
        return found

    def search(self, queries: Any, top_k: int, filter: Any) -> Candidates:
        if self.fault == "ignores filters":
            filter = None
        if self.fault == "reads 1 as '1'" and isinstance(filter, dict):
            wanted = {name: str(value) for name, value in filter.items()}
            return super().search(
                queries,
                top_k,
                lambda had: isinstance(had, dict) and all(str(had.get(name)) == wanted[name] for name in wanted),
            )
        found = super().search(queries, top_k, filter)
        if self.fault == "compares in float32":
            scores = queries @ found.entries.vectors.T
            if self.metric != "ip" or filter is not None:
                return found
            return Candidates(found.entries, scores.topk(min(top_k, scores.shape[1])).indices)
        if self.fault == "finds twice":
            return Candidates(found.entries, torch.cat([found.rows, found.rows], 1))
        return found

    def save(self, folder: str) -> None:
        if self.fault != "saves nothing":
            super().save(folder)


FAULTS = {
    "": None,
    "adds in front": "check_order",
    "normalises": "check_entries",
    "moves what is updated": "check_order",
    "never deletes": "check_order",
    "gets in the order asked": "check_entries",
    "ignores filters": "check_filters",
    "reads 1 as '1'": "check_filter_values",
    "compares in float32": "check_near_ties",
    "finds twice": "check_best",
    "saves nothing": "check_saved",
}


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store registered in a test is gone after it."""
    monkeypatch.setattr(STORES, "loaded", dict(STORES.loaded))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_promise_is_named(fault: str, named: None) -> None:
    store = register_store("broken")(type("Broken", (Broken,), {"fault": fault}))
    if FAULTS[fault] is None:
        return check_store(store)
    (check,) = [one for one in store_checks() if one.__name__ == FAULTS[fault]]
    with pytest.raises(AssertionError, match=f"{FAULTS[fault]}: "):
        run_checks([check], store)


# ---- the registry


def test_a_name_is_given_once(named: None) -> None:
    with pytest.raises(ConfigError, match="'exact' is mmattn.retrieval.stores.exact.InMemoryStore already"):
        register_store("exact")(type("Other", (InMemoryStore,), {}))
    assert register_store("exact")(InMemoryStore) is InMemoryStore  # a module that is loaded again
    assert repr(Index.build(torch.eye(3))) == "Index(3 entries, e=3, cosine, exact)"


def test_an_index_over_a_store_of_ones_own() -> None:
    index = Index(HNSWStore(3, "ip", links=7))
    index.add(torch.eye(3), ids=["a", "b", "c"])
    assert index.search([0.0, 1.0, 0.0], 1).ids == [["b"]] and isinstance(index.store, HNSWStore)
    assert mmattn.Index.build(torch.eye(3), store="hnsw", links=7).store.settings == index.store.settings


@pytest.mark.slow
def test_the_suite_needs_no_pytest() -> None:
    code = "import sys, mmattn.testing, mmattn.retrieval as r; r.HNSWStore; mmattn.testing.check_store(r.InMemoryStore)"
    code += "; print('pytest' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
