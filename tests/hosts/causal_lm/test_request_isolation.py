"""A row, document or request that is not finite, or overflows, is refused or ends with an error; no other changes."""

from __future__ import annotations

import random
import re
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


def memories(kind: str, rows: int = 3) -> list[mmattn.Memory]:
    """A sound memory for each row."""
    batches = (isolation.make_batch(kind, random.Random(seed)) for seed in range(100))
    return next(one.sound for one in batches if one is not None and len(one.sound) >= rows)[:rows]


def spoil(memory: mmattn.Memory) -> mmattn.Memory:
    """A memory with one number that is too large for half precision."""
    tokens = memory.tokens.clone()
    tokens[0, 0, 0] = TOO_LARGE
    return mmattn.Memory(tokens, memory.mask, memory.segments, memory.scores)


def broken(memory: mmattn.Memory) -> mmattn.Memory:
    """A memory that is not finite and need not be."""
    return mmattn.Memory(torch.full_like(memory.tokens, torch.nan), check_finite=False)


def large_product(memory: mmattn.Memory) -> mmattn.Memory:
    """A memory that overflows where it is multiplied by the keys' first weights; without a norm, so that it does."""
    model = isolation.make_model("without a norm", torch.float32)
    weight = model.adapter("default").attention(0).kv_proj.k_proj.weight
    return mmattn.Memory((weight[:1].sign() * 1e38).float()[None])


def large_score(memory: mmattn.Memory) -> mmattn.Memory:
    """A memory with a score that is infinite in half precision."""
    assert memory.scores is not None
    return mmattn.Memory(memory.tokens, memory.mask, memory.segments, memory.scores + TOO_LARGE)


def late(memory: mmattn.Memory) -> mmattn.Memory:
    """A memory whose keys and values are finite in half precision, and a product with them is not."""
    return mmattn.Memory(memory.tokens.sign() * 2e4)


OVERFLOWS: list[Any] = [
    *((kind, torch.float16, spoil, r"row 1 .*overflows in .*scale") for kind in isolation.KINDS),
    ("without a norm", torch.float32, large_product, "row 1 .* overflows in float32"),
    ("without a norm", torch.bfloat16, large_product, "row 1 .* overflows in bfloat16"),
    ("score bias", torch.float16, large_score, "row 1 "),
    ("without a norm", torch.float16, late, "row 1"),
]


@pytest.mark.parametrize(("kind", "dtype", "change", "says"), OVERFLOWS)
def test_a_row_that_overflows_is_refused_by_its_number(kind: str, dtype: torch.dtype, change: Any, says: str) -> None:
    """Invariant 113. In a call, prepared, in `generate`, and with gradients."""
    model, rows, ids = isolation.make_model(kind, dtype), memories(kind), tiny.text(3, 5)
    spoilt = mmattn.Memory.stack([rows[0], change(rows[1]), rows[2]])
    with torch.no_grad():
        assert model(ids, memory=mmattn.Memory.stack(rows)).logits.isfinite().all()
    for call in (
        torch.no_grad()(lambda: model(ids, memory=spoilt)),
        torch.no_grad()(lambda: model(ids, memory=model.prepare(spoilt))),
        lambda: model.generate(ids, memory=spoilt, max_new_tokens=2, do_sample=False, pad_token_id=0),
        lambda: model(ids, memory=spoilt).logits.sum().backward(),
    ):
        with pytest.raises(NonFiniteError, match=says):
            call()


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


@pytest.mark.parametrize(
    ("kind", "dtype", "change", "says"),
    [
        *((kind, torch.float16, spoil, "row 1 ") for kind in isolation.KINDS if kind != "inserted"),
        ("gated", torch.float32, broken, r"document .*1.* not finite"),
        ("joined", torch.float32, broken, r"document .*1.* not finite"),
    ],
)
@torch.no_grad()
def test_a_document_that_is_not_finite_is_refused(kind: str, dtype: torch.dtype, change: Any, says: str) -> None:
    """Invariant 115. Documents share attention, so that none is answered beside it."""
    model, rows, ids = isolation.make_model(kind, dtype), memories(kind), tiny.text(3, 5)
    assert model(**packed(ids), memory=mmattn.Memory.stack(rows)).logits.isfinite().all()
    with pytest.raises(NonFiniteError, match=says):
        model(**packed(ids), memory=mmattn.Memory.stack([rows[0], change(rows[1]), rows[2]]))


def test_a_row_that_was_not_checked_changes_no_other() -> None:
    """Invariant 115. A matrix product of an odd width may take NaN from one row to the one before."""
    for dtype in isolation.DTYPES:
        model, rows, ids = isolation.make_model("null slot", dtype), memories("null slot"), tiny.text(3, 5)
        with torch.no_grad():
            want = model(ids, memory=mmattn.Memory.stack(rows)).logits
            try:
                got = model(ids, memory=mmattn.Memory.stack([rows[0], broken(rows[1]), rows[2]])).logits
            except NonFiniteError as error:
                assert "the logits of row 0, 1 are not finite" in str(error)
            else:
                assert torch.equal(got[::2], want[::2]) and got[1, -1].isnan().all()


@torch.no_grad()
def test_beams_of_a_row_that_was_not_checked() -> None:
    """Invariant 191. What is not finite in the memory of a row is that of its beams, and refuses no other row."""
    model, rows, ids = tiny.attach(tiny.make("llama")), tiny.memory(3), tiny.text(3, 5)
    options = {"num_beams": 2, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, memory=rows, **options)
    spoilt = mmattn.Memory(torch.stack([rows.tokens[0], broken(rows[1]).tokens[0], rows.tokens[2]]), check_finite=False)
    assert torch.equal(model.generate(ids, memory=spoilt, **options)[::2], wanted[::2])


REQUESTS: dict[str, Any] = {
    "overflows, joined": ("joined", torch.float16, spoil, {}, "overflows.*scale its vectors"),
    "overflows, inserted": ("inserted", torch.float16, spoil, {}, "overflows.*scale its vectors"),
    "a tensor": ("joined", torch.float32, lambda memory: broken(memory).tokens, {}, "finite"),
    "a memory": ("joined", torch.float32, broken, {}, "finite"),
    "later": ("without a norm", torch.float16, late, {}, "is not finite"),
    "later, drawn": ("without a norm", torch.float16, late, {"do_sample": True}, "is not finite"),
    "each of several answers": (
        *("without a norm", torch.float16, late),
        *({"num_return_sequences": 2, "do_sample": True}, "is not finite"),
    ),
}


@pytest.mark.parametrize("case", REQUESTS.values(), ids=REQUESTS)
def test_a_request_that_is_not_finite_ends_alone(case: Any) -> None:
    """Invariant 114. In `generate_batch` it has an error, and the others their answers."""
    kind, dtype, change, more, says = case
    model, rows, ids = isolation.make_model(kind, dtype), memories(kind), tiny.text(3, 5)

    def answers(given: list[Any]) -> list[Any]:
        settings = tiny.paged(isolation.NEW)
        config = settings["generation_config"].to_diff_dict() | more
        settings["generation_config"] = GenerationConfig(**config)
        return list(model.generate_batch(ids.tolist(), memory=given, **settings).values())

    got, each = answers([rows[0], change(rows[1]), rows[2]]), more.get("num_return_sequences", 1)
    for number, answer in enumerate(got):
        if number // each == 1:
            assert re.search(says, answer.error)
        else:
            assert answer.error is None
    if not more:
        want = answers(rows)
        assert [got[row].generated_tokens for row in (0, 2)] == [want[row].generated_tokens for row in (0, 2)]


def test_a_memory_that_is_broken_while_its_request_runs() -> None:
    """Invariant 114. An edit in place ends the request, the others and those that come later are answered."""
    model = isolation.make_model("joined", torch.float32)
    running = isolation.Requests(model, running=True)
    rows, ids = memories("joined"), tiny.text(3, 5)
    try:
        want = running.ask(ids, rows)
        edited, steps = mmattn.Memory(rows[1].tokens.clone()), []

        def edit(*_: object) -> None:
            """Edit the memory between two steps, in the thread that takes them."""
            steps.append(1)
            if len(steps) == 5:
                edited.tokens.fill_(torch.nan)

        model.host.register_forward_hook(edit)
        manager = running.manager
        names = [
            manager.add_request(text, memory=one, max_new_tokens=40, streaming=number == 1)
            for number, (text, one) in enumerate(zip(ids.tolist(), [rows[0], edited, rows[2]], strict=True))
        ]
        ended = {}
        while len(ended) < 3:
            result = manager.get_result(timeout=30)
            assert result is not None
            if result.is_finished():
                ended[result.request_id] = result
        assert "finite" in ended[names[1]].error
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
    """Invariant 116."""
    found = isolation.Found()
    isolation.fuzz_one(kind, dtype, isolation.BATCHES, random.Random(3), found)
    assert not found.faults and not found.changed and not found.silent
    assert found.batches == isolation.BATCHES and found.others and found.spoilt["refused"]
