"""Adding, deleting and updating: ids stay, what is gone is never found, and every store agrees with the definition."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from mmattn import Memory
from mmattn.errors import ConfigError, IndexMismatchError, ShapeError
from tests.retrieval.searching import KINDS, METRICS, STORES, WIDTH, built, held, reference, small


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("store", STORES)
def test_any_order_of_changes_agrees_with_a_dict(store: str, metric: str, seeded: int) -> None:
    """A dict of vectors is the definition; some of the steps are large enough to build the structure again."""
    chance = random.Random(seeded)
    index = small(1201, store=store, metric=metric)
    model: dict[Any, torch.Tensor] = {name: index[name].vector for name in index.ids}
    structures = [index.store.version.parts[0].structure]
    steps = [(verb, size) for verb in ("add", "remove", "update") for size in (1, 7, 400)] + [("add", 1300)]
    for step, (verb, size) in enumerate(chance.sample(steps, len(steps))):
        names = chance.sample(list(model), min(size, len(model) // 2))
        if verb == "add":
            vectors = torch.randn(size, WIDTH)
            given = [f"{step} {row}" for row in range(size)] if step % 2 else None
            model |= dict(zip(index.add(vectors, ids=given), vectors, strict=True))
        elif verb == "remove":
            index.delete(names)
            model = {name: vector for name, vector in model.items() if name not in set(names)}
        else:
            vectors = torch.randn(len(names), WIDTH)
            index.update(names, vectors)
            model |= dict(zip(names, vectors, strict=True))
        structures.append(index.store.version.parts[0].structure)
        queries = torch.randn(2, WIDTH)
        ids, _ = reference(queries, {name: vector.tolist() for name, vector in model.items()}, 5, metric)
        assert index.search(queries, 5).ids == ids, (step, verb, size)
        assert index.ids == tuple(model)
    assert structures[-1] is not structures[0]


def test_small_changes_leave_the_structure_as_it_is() -> None:
    index = small(1201, store="hnsw")
    structure = index.store.version.parts[0].structure
    index.add(torch.randn(3, WIDTH))
    index.delete([5])
    index.update([7], torch.randn(1, WIDTH))
    assert index.store.version.parts[0].structure is structure and len(index.store.version.parts) == 2
    index.add(torch.randn(1031, WIDTH))
    assert index.store.version.parts[0].structure is not structure and len(index.store.version.parts) == 1


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "an id twice": (
        lambda index: index.add(torch.ones(2, WIDTH), ids=["a", "a"]),
        IndexMismatchError,
        "'a'.*more than",
    ),
    "an id again": (lambda index: index.add(torch.ones(2, WIDTH), ids=["a", 3]), IndexMismatchError, "already.* 3"),
    "too few ids": (lambda index: index.add(torch.ones(2, WIDTH), ids=["a"]), IndexMismatchError, "ids.* 1 for 2"),
    "a float id": (lambda index: index.add(torch.ones(1, WIDTH), ids=[0.5]), IndexMismatchError, "text or ints.*0.5"),
    "a bool id": (lambda index: index.add(torch.ones(1, WIDTH), ids=[True]), IndexMismatchError, "text or ints.*True"),
    "another width": (lambda index: index.add(torch.ones(1, 7)), IndexMismatchError, "7.*12"),
    "no numbers": (lambda index: index.add([[None]]), ShapeError, "numbers"),
    "unsound metadata": (
        lambda index: index.add(torch.ones(1, WIDTH), metadata=[{"n": float("nan")}]),
        ConfigError,
        "metadata 0",
    ),
    "too little metadata": (
        lambda index: index.add(torch.ones(2, WIDTH), metadata=[{}]),
        IndexMismatchError,
        "metadata.* 1 for 2",
    ),
    "removing nobody": (lambda index: index.delete([3, "nobody", 90]), IndexMismatchError, "'nobody', 90"),
    "removing twice": (lambda index: index.delete([3, 3]), IndexMismatchError, "3 is given more"),
    "removing no list": (lambda index: index.delete(3), ConfigError, "ids must be a list"),
    "updating nobody": (lambda index: index.update([3, 77], torch.ones(2, WIDTH)), IndexMismatchError, "77"),
    "updating too few": (lambda index: index.update([3, 4], torch.ones(1, WIDTH)), IndexMismatchError, "1 items for 2"),
    "tokens for one entry": (
        lambda index: index.add(torch.ones(1, WIDTH), tokens=Memory(torch.ones(1, 2, 3))),
        ShapeError,
        "no encoded tokens",
    ),
    "half a character": (lambda index: index.add(torch.ones(1, WIDTH), texts=["\ud800"]), ValueError, "surrogate"),
    "half a character later": (lambda index: index.update([3], texts=["\ud800"]), ValueError, "surrogate"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_change_changes_nothing(case: str, kind: str) -> None:
    """Invariant 80."""
    change, error, match = REFUSED[case]
    index = small(7, store=kind)
    before = held(index)
    with pytest.raises(error, match=match):
        change(index)
    assert held(index) == before and len(index) == 7
    assert index.add(torch.randn(1, WIDTH)) == (7,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_cannot_be_compared_is_refused_with_its_row(value: float, metric: str, kind: str) -> None:
    """Invariant 80."""
    index = small(7, metric, kind)
    vectors = torch.randn(5, WIDTH)
    vectors[3, 2] = value
    for change in (lambda: index.add(vectors), lambda: index.update([0, 1, 2, 3, 4], vectors)):
        with pytest.raises(ValueError, match="row 3 .*Nothing was changed"):
            change()
    assert len(index) == 7 and index.search(torch.randn(WIDTH), 7).scores.isfinite().all()
    with pytest.raises(ValueError, match="queries: row 3"):
        index.search(vectors, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_have_no_direction(kind: str) -> None:
    vectors = torch.eye(WIDTH)[:3] * torch.tensor([[1.0], [0.0], [1.0]])
    with pytest.raises(ShapeError, match="row 1 is all zeros"):
        built(vectors, kind)
    with pytest.raises(ShapeError, match="row 0 is all zeros"):
        small(3, store=kind).search(torch.zeros(WIDTH), 1)
    assert built(vectors, kind, metric="l2").search(torch.zeros(WIDTH), 1).ids == [[1]]
    assert built(vectors, kind, metric="ip").search(torch.zeros(WIDTH), 2).ids == [[0, 1]]
