"""Every kind of adapter that acts in the host's own attention: on all hosts, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mmattn
from mmattn.adapters import FusedCacheAdapter, InsertedAdapter, JoinedAdapter, PassageAdapter, PrefixAdapter
from mmattn.errors import AttachError, ConditionError, ShapeError
from mmattn.testing.case import no_trace, stir, traces
from tests import tiny
from tests.adapters.composed import composed_hosts as composing
from tests.adapters.joined_hosts import REACHED, answer

KINDS: dict[str, Any] = {
    "joined": JoinedAdapter(tiny.MEMORY_DIM, layers=(0, 2), gate="head"),
    "inserted": InsertedAdapter(tiny.MEMORY_DIM),
    "prefix": PrefixAdapter(5, 3),
    "passages": PassageAdapter(),
    "fused cache": FusedCacheAdapter(24, gate="head"),
}
IDS = tiny.text(3, 9)
BEGINNING = (torch.arange(5) < torch.tensor([5, 0, 2])[:, None]).long()


def memory_of(kind: str, model: Any) -> Any:
    """A memory for three rows of text, of which the second has none."""
    if kind == "prefix":
        return [2, None, 0]
    if kind == "fused cache":
        return composing.along().prefill(IDS[:, :5], BEGINNING)
    if kind == "passages":
        passages = mmattn.hosts.PassageCache(model)
        passages.add([[5, 6, 7], [9, 11]], progress=False)
        return passages.select([[0, 1], [], [1]])
    return tiny.memory(3, lengths=[5, 0, 2])


def test_every_family_is_reached_or_refused() -> None:
    """No family is forgotten."""
    assert sorted((*REACHED, *tiny.NOTHING_JOINED)) == sorted(tiny.FAMILIES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", REACHED)
def test_hosts(family: str, kind: str) -> None:
    """A fresh adapter is nothing, bit for bit; a trained one is heard, not by a row without slots; no trace is left."""
    host = tiny.make(family)
    before, own = traces(host), answer(host, IDS)
    model = mmattn.attach(host, KINDS[kind])
    memory = memory_of(kind, model)
    if kind not in ("prefix", "passages"):
        assert torch.equal(answer(model, IDS, memory=memory), own)
    stir(model.adapter("default"))
    result = answer(model, IDS, memory=memory)
    assert torch.equal(result[1], own[1]) and tiny.differs(result[::2], own[::2])
    assert torch.equal(answer(model, IDS, memory=memory, adapter_scale=0.0), own)
    assert torch.equal(answer(model, IDS), own)
    assert model.unload() is host
    no_trace(host, before, family)
    assert torch.equal(answer(host, IDS), own)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", tiny.NOTHING_JOINED)
def test_others_are_refused_by_name(family: str, kind: str) -> None:
    """Invariant 105: a host whose attention is not reached is refused by name, and nothing of it has changed."""
    host = tiny.make(family)
    before = traces(host)
    with pytest.raises(AttachError, match=type(host).__name__):
        mmattn.attach(host, KINDS[kind])
    no_trace(host, before, "a refused host")


def part_of_the_host(model: Any, memory: Any) -> None:
    """Call the host without its head, which does not tell the positions of its tokens."""
    with model.condition(memory):
        model.host.model(IDS)


BEFORE = ("inserted", "prefix", "passages", "fused cache")
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(3, -1)
#: The kinds, the call, the error, and what it names.
REFUSED: dict[str, tuple[tuple[str, ...], Callable[[Any, Any], object], type[Exception], str]] = {
    "packed rows": (
        BEFORE,
        lambda model, memory: model(IDS, position_ids=PACKED, memory=memory),
        ConditionError,
        "pad",
    ),
    "slots that arrive": (
        BEFORE,
        lambda model, memory: model(IDS, arrived=torch.zeros(3, 9, dtype=torch.long), memory=memory),
        ConditionError,
        "arrived",
    ),
    "a part of the host": (BEFORE, part_of_the_host, ConditionError, "part of the host"),
    "other rows": (tuple(KINDS), lambda model, memory: model(IDS[:1], memory=memory), ShapeError, "has 3: give"),
    "vectors": (BEFORE[1:], lambda model, _: model(IDS, memory=tiny.memory(3)), ShapeError, "'default'"),
    "parts": (
        ("joined", "inserted"),
        lambda model, memory: model(IDS, memory=mmattn.SharedMemory(tiny.memory(1), memory)),
        ConditionError,
        "one Memory",
    ),
    "a stream": (
        ("joined", "inserted"),
        lambda model, _: model(IDS, memory=mmattn.MemoryStream(tiny.MEMORY_DIM, rows=3)),
        ConditionError,
        "a Memory",
    ),
    "a bank": (("joined", "inserted", "prefix"), lambda model, _: model.bank(tiny.memory(4)), ConditionError, "pages"),
}


@pytest.mark.parametrize(("mistake", "kind"), [(name, kind) for name, (kinds, *_) in REFUSED.items() for kind in kinds])
def test_what_is_refused(mistake: str, kind: str) -> None:
    """Calls that a kind cannot answer are refused, and nothing is changed."""
    _, call, error, words = REFUSED[mistake]
    model = mmattn.attach(tiny.make("llama"), KINDS[kind])
    stir(model.adapter("default"))
    memory = memory_of(kind, model)
    wanted = answer(model, IDS, memory=memory)
    with pytest.raises(error, match=words):
        call(model, memory)
    assert torch.equal(answer(model, IDS), answer(tiny.make("llama"), IDS))
    assert torch.equal(answer(model, IDS, memory=memory), wanted)
