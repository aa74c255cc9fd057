"""On a device nothing waits for values: what is not finite is raised a moment later, and hurts nobody meanwhile."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import mmattn
from mmattn.core import tracing
from mmattn.core.tracing import UNDER_WAY, report_checks
from mmattn.errors import NonFiniteError
from tests import tiny
from tests.device import act_as_device

Model = Any


class Unknown:
    """An event of a device that has not come to it yet."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        """Wait."""


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device that has not finished any kernel before it is waited for."""
    act_as_device(monkeypatch)

    class Late(tracing._Check):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._event: Any = Unknown()

    monkeypatch.setattr(tracing, "_Check", Late)
    UNDER_WAY.set(())
    yield
    UNDER_WAY.set(())


def spoilt(value: float = torch.nan) -> mmattn.Memory:
    """Three rows, the second one not finite."""
    tokens = tiny.memory(3).tokens.clone()
    tokens[1, 2, 3] = value
    return mmattn.Memory(tokens)


@torch.no_grad()
def test_generate_raises_at_its_end(model: Model) -> None:
    """Invariant 204."""
    with pytest.raises(NonFiniteError, match="row 1"):
        model.generate(tiny.text(3), memory=spoilt(), max_new_tokens=2, do_sample=False, pad_token_id=0)
    wanted = model.generate(tiny.text(3), memory=tiny.memory(3), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert wanted.shape == (3, 9) and not UNDER_WAY.get()


@torch.no_grad()
def test_a_forward_answers_the_other_rows_and_a_later_call_raises(model: Model, monkeypatch: Any) -> None:
    """Invariant 204. The rows beside it are what they are beside a sound row."""
    wanted = model(tiny.text(3), memory=tiny.memory(3)).logits
    report_checks(wait=True)
    found = model(tiny.text(3), memory=spoilt()).logits
    assert torch.equal(found[::2], wanted[::2]) and found[1].isnan().any()
    monkeypatch.setattr(Unknown, "query", lambda self: True)
    with pytest.raises(NonFiniteError, match="row 1"):
        model(tiny.text(3), memory=tiny.memory(3))
    assert torch.equal(model(tiny.text(3), memory=tiny.memory(3)).logits, wanted), "refused once"


@torch.no_grad()
def test_a_prepared_memory_that_overflows_is_refused_each_time(model: Model) -> None:
    """Invariant 204. Keys and values that were cached meanwhile are not taken for finite."""
    half = tiny.attach(tiny.make("llama"), layout={"memory_norm": False}).to(torch.float16)
    prepared = half.prepare(spoilt(7e4))
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="row 1 of the memory .* overflows"):
            half.generate(tiny.text(3), memory=prepared, max_new_tokens=2, do_sample=False, pad_token_id=0)


@torch.no_grad()
def test_another_thread_is_not_refused(model: Model, monkeypatch: Any) -> None:
    """Invariant 204."""
    model(tiny.text(3), memory=spoilt())
    monkeypatch.setattr(Unknown, "query", lambda self: True)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: model(tiny.text(3), memory=tiny.memory(3)).logits).result()
    assert found.isfinite().all()
    with pytest.raises(NonFiniteError, match="row 1"):
        report_checks()


def test_no_step_is_taken_with_it(model: Model) -> None:
    """Invariant 205. Weights are what they were."""
    before = {name: value.clone() for name, value in model.adapters.state_dict().items()}
    optimizer = torch.optim.AdamW(model.adapters.parameters(), 0.1)
    ids = tiny.text(3)
    model.train()(ids, labels=ids, memory=spoilt()).loss.backward()
    with pytest.raises(NonFiniteError, match="row 1"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.adapters.state_dict().items())
    optimizer.zero_grad()
    model(ids, labels=ids, memory=tiny.memory(3)).loss.backward()
    optimizer.step()
    assert not all(torch.equal(value, before[name]) for name, value in model.adapters.state_dict().items())


@torch.no_grad()
def test_a_request_is_refused_by_itself(model: Model) -> None:
    """Invariant 204. In continuous batching, also where its memory was made by a thread that goes on."""
    good, bad = tiny.memory(3), spoilt()
    given = [good[0], bad[1], good[2]]
    found = model.generate_batch(tiny.text(3).tolist(), memory=given, **tiny.paged(3))
    errors = [one.error for one in found.values()]
    assert errors[0] is errors[2] is None and "non-finite values at row 0 (slot 2)" in errors[1]
    assert model(tiny.text(3), memory=good).logits.isfinite().all()
    report_checks(wait=True)


@torch.no_grad()
def test_a_memory_that_no_call_reads_refuses_nothing(model: Model) -> None:
    """Invariant 204. It is refused where it is given."""
    bad = spoilt()
    assert model(tiny.text(3), memory=tiny.memory(3)).logits.isfinite().all()
    report_checks(wait=True)
    with pytest.raises(NonFiniteError, match="row 1"):
        bad.check_finite()


@torch.no_grad()
def test_a_memory_is_freed_with_its_last_use(model: Model) -> None:
    """Invariant 204. Its check does not keep it once it was reported."""
    memory = tiny.memory(3)
    model(tiny.text(3), memory=memory)
    tokens = weakref.ref(memory.tokens)
    report_checks(wait=True)
    gc.disable()
    try:
        model(tiny.text(3), memory=tiny.memory(3))  # an adapter keeps what it computed of the last one
        report_checks(wait=True)
        del memory
        assert tokens() is None
    finally:
        gc.enable()
