"""A row, document or request that is not finite, or overflows, is refused or ends with an error; no other changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

import mmattn
from mmattn.errors import NonFiniteError
from tests import tiny
from tests.stress import isolation

#: A number that is finite on arrival, and infinite in half precision.
TOO_LARGE = 7e4
kinds = pytest.mark.parametrize("kind", isolation.KINDS)


def memories(kind: str, rows: int = 3) -> list[mmattn.Memory]:
    """A sound memory for each row."""
    batches = (isolation.make_batch(kind, random.Random(seed)) for seed in range(100))
    return next(one.sound for one in batches if one is not None and len(one.sound) >= rows)[:rows]


def spoil(memory: mmattn.Memory) -> mmattn.Memory:
    """A memory with one number that is too large for half precision."""
    tokens = memory.tokens.clone()
    tokens[0, 0, 0] = TOO_LARGE
    return mmattn.Memory(tokens, memory.mask, memory.segments, memory.scores)


@kinds
def test_a_row_that_overflows_is_refused_by_its_number(kind: str) -> None:
    """Invariant 113. In a call, prepared, in `generate`, and with gradients."""
    model, rows = isolation.make_model(kind, torch.float16), memories(kind)
    sound = mmattn.Memory.stack(rows)
    spoilt = mmattn.Memory.stack([rows[0], spoil(rows[1]), rows[2]])
    ids = tiny.text(3, 5)
    with torch.no_grad():
        assert model(ids, memory=sound).logits.isfinite().all()
        with pytest.raises(NonFiniteError, match=r"row 1 .*overflows in .*scale"):
            model(ids, memory=spoilt)
        with pytest.raises(NonFiniteError, match="row 1 "):
            model(ids, memory=model.prepare(spoilt))
    with pytest.raises(NonFiniteError, match="row 1 "):
        model.generate(ids, memory=spoilt, max_new_tokens=2, do_sample=False, pad_token_id=0)
    with pytest.raises(NonFiniteError, match="row 1 "):
        model(ids, memory=spoilt).logits.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_that_overflows_is_refused_by_row(dtype: torch.dtype) -> None:
    """Invariant 113. Without a norm, in which a kernel may or may not overflow."""
    model, rows = isolation.make_model("without a norm", dtype), memories("without a norm")
    weight = model.adapter("default").attention(0).kv_proj.k_proj.weight
    large = mmattn.Memory((weight[:1].sign() * 1e38).float()[None])
    with pytest.raises(NonFiniteError, match=r"row 1 .* overflows in (float32|bfloat16)"):
        model(tiny.text(3, 5), memory=mmattn.Memory.stack([rows[0], large, rows[2]]))


def test_scores_that_overflow_are_refused_by_row() -> None:
    """Invariant 113. A score of 70,000 is infinite in half precision."""
    model, rows = isolation.make_model("score bias", torch.float16), memories("score bias")
    assert rows[2].scores is not None
    rows[2].scores[0, 0] = 7e4
    with pytest.raises(NonFiniteError, match="row 2 "):
        model(tiny.text(3, 5), memory=mmattn.Memory.stack(rows))


def test_what_overflows_after_keys_and_values_is_refused_by_row() -> None:
    """Invariant 113. Without a norm, values that fit half precision become larger in the product with a weight."""
    model, rows = isolation.make_model("without a norm", torch.float16), memories("without a norm")
    tokens = rows[1].tokens.sign() * 2e4
    with pytest.raises(NonFiniteError, match=r"row 1"):
        model(tiny.text(3, 5), memory=mmattn.Memory.stack([rows[0], mmattn.Memory(tokens), rows[2]]))


def test_a_memory_that_is_derived_is_as_checked_as_its_own() -> None:
    """Invariant 113. A cast, a row, or a concatenation of what was finite is looked at again."""
    model, given = isolation.make_model("gated", torch.float32), tiny.memory(2)
    given.tokens[1, 0, 0] = 7e4
    half = given.to(torch.float16)
    for one in (half, mmattn.Memory.cat([half, half]), mmattn.Memory.stack([half[:1], half[1:]]), half.detach()):
        with pytest.raises(NonFiniteError, match="row 1 "):
            model(tiny.text(2), memory=one)
    free = mmattn.Memory(given.tokens, check_finite=False)
    assert not free.to(torch.float16).finite_checked and not mmattn.Memory.cat([given, free]).finite_checked


def packed(ids: Tensor) -> dict[str, Tensor]:
    """Documents (s, l) in one row."""
    return {"input_ids": ids.flatten()[None], "position_ids": torch.arange(ids.shape[1]).repeat(len(ids))[None]}


@pytest.mark.parametrize("kind", [kind for kind in isolation.KINDS if kind != "inserted"])
def test_a_document_that_overflows_is_refused(kind: str) -> None:
    """Invariant 115. Documents share attention, so that none is answered beside one that is not finite."""
    model, rows, ids = isolation.make_model(kind, torch.float16), memories(kind), tiny.text(3, 5)
    with torch.no_grad():
        assert model(**packed(ids), memory=mmattn.Memory.stack(rows)).logits.isfinite().all()
        with pytest.raises(NonFiniteError, match="row 1 "):
            model(**packed(ids), memory=mmattn.Memory.stack([rows[0], spoil(rows[1]), rows[2]]))


@pytest.mark.parametrize("kind", ["gated", "joined"])
def test_a_document_that_was_not_checked_is_refused_too(kind: str) -> None:
    """Invariant 115."""
    model, rows, ids = isolation.make_model(kind, torch.float32), memories(kind), tiny.text(3, 5)
    broken = mmattn.Memory(torch.full_like(rows[1].tokens, torch.nan), check_finite=False)
    with torch.no_grad(), pytest.raises(NonFiniteError, match=r"document .*1.* not finite"):
        model(**packed(ids), memory=mmattn.Memory.stack([rows[0], broken, rows[2]]))


def test_a_row_that_was_not_checked_changes_no_other() -> None:
    """Invariant 115. A matrix product of an odd width may take NaN from one row to the one before."""
    for dtype in isolation.DTYPES:
        model, rows, ids = isolation.make_model("null slot", dtype), memories("null slot"), tiny.text(3, 5)
        broken = mmattn.Memory(torch.full_like(rows[1].tokens, torch.nan), check_finite=False)
        with torch.no_grad():
            want = model(ids, memory=mmattn.Memory.stack(rows)).logits
            try:
                got = model(ids, memory=mmattn.Memory.stack([rows[0], broken, rows[2]])).logits
            except NonFiniteError as error:
                assert "the logits of row 0, 1 are not finite" in str(error)
            else:
                assert torch.equal(got[::2], want[::2]) and got[1, -1].isnan().all()


@torch.no_grad()
def test_beams_of_a_row_that_was_not_checked() -> None:
    """Invariant 191. What is not finite in the memory of a row is that of its beams, and refuses no other row."""
    model, rows, ids = tiny.attach(tiny.make("llama")), tiny.memory(3), tiny.text(3, 5)
    spoilt = rows.tokens.clone()
    spoilt[1] = torch.nan
    options = {"num_beams": 2, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, memory=rows, **options)
    found = model.generate(ids, memory=mmattn.Memory(spoilt, check_finite=False), **options)
    assert torch.equal(found[::2], wanted[::2])


def answers(model: Any, ids: Tensor, given: list[Any], **more: Any) -> list[Any]:
    """The tokens or the error of each request."""
    settings = isolation.settings()
    config = settings["generation_config"].to_diff_dict() | more
    settings["generation_config"] = GenerationConfig(**config)
    out = model.generate_batch(ids.tolist(), memory=given, **settings).values()
    return [one.error or one.generated_tokens for one in out]


@pytest.mark.parametrize("kind", ["joined", "inserted"])
def test_a_request_that_overflows_ends_alone(kind: str) -> None:
    """Invariant 114. In `generate_batch` it has an error, and the others their answers."""
    model, rows, ids = isolation.make_model(kind, torch.float16), memories(kind), tiny.text(3, 5)
    want = answers(model, ids, rows)
    got = answers(model, ids, [rows[0], spoil(rows[1]), rows[2]])
    assert got[::2] == want[::2] and all(isinstance(one, list) for one in want)
    assert "overflows" in got[1] and "scale its vectors" in got[1]


def test_a_request_that_is_not_finite_on_arrival_ends_alone() -> None:
    """Invariant 114. Given as a tensor, or as a memory that need not be finite."""
    model, rows, ids = isolation.make_model("joined", torch.float32), memories("joined"), tiny.text(3, 5)
    broken = torch.full_like(rows[1].tokens, torch.nan)
    want = answers(model, ids, rows)
    ids, both = torch.cat([ids, ids[:1]]), [broken, mmattn.Memory(broken, check_finite=False)]
    got = answers(model, ids, [rows[0], both[0], rows[2], both[1]])
    assert got[:3:2] == want[::2] and all("finite" in one for one in got[1::2])


def test_a_request_that_overflows_later_ends_alone() -> None:
    """Invariant 114. Its keys and values are finite, and a product with them is not; greedy, and drawn."""
    model, rows = isolation.make_model("without a norm", torch.float16), memories("without a norm")
    ids = tiny.text(3, 5)
    late = mmattn.Memory(rows[1].tokens.sign() * 2e4)
    want = answers(model, ids, rows)
    got = answers(model, ids, [rows[0], late, rows[2]])
    assert got[::2] == want[::2] and "is not finite" in got[1]
    drawn = answers(model, ids, [rows[0], late, rows[2]], do_sample=True)
    assert all(isinstance(one, list) for one in drawn[::2]) and "is not finite" in drawn[1]


def test_every_answer_of_a_request_that_overflows_ends() -> None:
    """Invariant 114. Several answers are forked from one prompt."""
    model, rows = isolation.make_model("without a norm", torch.float16), memories("without a norm")
    ids = tiny.text(2, 5)
    late = mmattn.Memory(rows[1].tokens.sign() * 2e4)
    got = answers(model, ids, [late, rows[0]], num_return_sequences=2, do_sample=True)
    assert [isinstance(one, list) for one in got] == [False, False, True, True]


def test_a_memory_that_is_broken_while_its_request_runs() -> None:
    """Invariant 114. An edit in place ends the request, the others and those that come later are answered."""
    running = isolation.Requests(isolation.make_model("joined", torch.float32), running=True)
    rows, ids = memories("joined"), tiny.text(3, 5)
    try:
        want = running.ask(ids, rows)
        edited = mmattn.Memory(rows[1].tokens.clone())
        manager = running.manager
        names = [
            manager.add_request(text, memory=one, max_new_tokens=40, streaming=number == 1)
            for number, (text, one) in enumerate(zip(ids.tolist(), [rows[0], edited, rows[2]], strict=True))
        ]
        first = manager.get_result(timeout=30)  # of the one that streams, which is under way
        edited.tokens.fill_(torch.nan)
        ended = {}
        while len(ended) < 3:
            result = manager.get_result(timeout=30)
            assert result is not None
            if result.is_finished():
                ended[result.request_id] = result
        assert first.request_id in names and "finite" in ended[names[1]].error
        assert [ended[name].error for name in (names[0], names[2])] == [None, None]
        assert running.ask(ids, rows) == want
    finally:
        running.stop()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("gated", torch.float16),
        ("chunked", torch.bfloat16),
        *(
            pytest.param(kind, dtype, marks=pytest.mark.slow)
            for kind in isolation.KINDS
            for dtype in isolation.DTYPES
            if (kind, dtype) not in (("gated", torch.float16), ("chunked", torch.bfloat16))
        ),
    ],
)
def test_some_random_batches(kind: str, dtype: torch.dtype) -> None:
    """Invariant 116. The fuzz of `tests/stress/isolation.py` in short."""
    found = isolation.Found()
    isolation.fuzz_one(kind, dtype, 12, random.Random(3), found)
    assert not found.faults and not found.changed and not found.silent
    assert found.batches == 12 and found.others and found.spoilt["refused"]
