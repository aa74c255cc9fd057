"""Checks of an adapter's answers: identity, masks, refusals; and of the doctor, recorded weights and attribution."""

from __future__ import annotations

from unittest import SkipTest

import torch
from torch import Tensor

from mmattn.errors import ConditionError, MmattnError, NonFiniteError, ShapeError
from mmattn.inspect.attention import record
from mmattn.inspect.doctor.checks import cut, emptied, padded
from mmattn.inspect.doctor.run import doctor
from mmattn.memory import Memory
from mmattn.testing.case import Case, close, differ, memory_rows, refuses, rows_of, same


def check_starts_as_identity(case: Case) -> None:
    """A fresh adapter with a memory leaves the host's output bit for bit unchanged."""
    model = case.fresh()
    if not model.adapter(case.name).traits.starts_as_identity:
        raise SkipTest("it says that a fresh one is seen")
    same(case.ask(model, case.memory()), case.host, "fresh, with a memory")
    same(case.ask(model), case.host, "fresh, without a memory")


def check_absent_is_the_host(case: Case) -> None:
    """Without a memory, disabled, inactive, at adapter_scale 0 or unloaded, the output is the host's bit for bit."""
    model, memory = case.trained(), case.memory()
    same(case.ask(model), case.host, "no memory")
    with case.condition(model, None):
        same(case.ask(model.host), case.host, "condition(None)")
    same(case.ask(model, memory, adapter_scale=0), case.host, "adapter_scale=0")
    with model.disable_adapter():
        same(case.ask(model, memory), case.host, "disabled")
    model.set_adapter([])
    same(case.ask(model, {case.name: memory}), case.host, "no adapter active")
    model.set_adapter(case.name)
    same(case.ask(model.unload()), case.host, "unloaded")


def check_memory_is_heard(case: Case) -> None:
    """A trained adapter gives every row a different answer with a memory, without it, and with a second memory."""
    model = case.trained()
    answer = case.ask(model, case.memory())
    differ(answer, case.host, "with a memory and without")
    differ(case.ask(model, case.memory(1)), answer, "another memory")
    differ(case.ask(model, case.memory(), adapter_scale=0.5), answer, "half of it")
    same(case.ask(model, case.memory()), answer, "the same call again")


def check_rows_that_see_nothing(case: Case) -> None:
    """Rows without a slot to see are the host's own bit for bit; to rounding where the host itself mixes rows."""
    model, memory = case.trained(), case.slots()
    same(case.ask(model, cut(memory)), case.host, "0 slots")
    same(case.ask(model, emptied(memory)), case.host, "all slots masked")
    first = torch.arange(case.rows) == 0
    answer = case.ask(model, emptied(memory, first))
    case.same_rows(answer[:1], case.host[:1], "a row without a slot beside rows with some")
    differ(answer[1:], case.host[1:], "the rows beside it")


def check_masked_slots_are_nothing(case: Case) -> None:
    """Values in masked slots change nothing, be they large, NaN or infinite, in vectors and in scores."""
    model, memory = case.trained(), case.slots()
    plain = case.ask(model, padded(memory, 0.0))
    close(plain, case.ask(model, memory), "masked slots after the others")
    for filling in (1e4, torch.nan, torch.inf):
        same(case.ask(model, padded(memory, filling)), plain, f"{filling} in masked slots")


def check_rows_keep_to_themselves(case: Case) -> None:
    """A row alone is answered as in its batch, and another memory of its neighbours changes nothing for it."""
    model, memory = case.trained(), case.memory()
    answer = case.ask(model, memory)
    for row in range(case.rows):
        rows = slice(row, row + 1)
        alone = memory_rows(memory, rows)
        close(case.ask(model, alone, rows_of(case.batch, rows, case.rows)), answer[rows], f"row {row} alone")
    if isinstance(memory, Memory):
        moved = torch.cat([memory.tokens[:1], -memory.tokens[1:]])
        case.same_rows(case.ask(model, memory.replace(moved))[:1], answer[:1], "other memories of the other rows")


def check_order_of_slots(case: Case) -> None:
    """Slots in another order are the same memory, unless the adapter says that it reads them in order."""
    if case.fresh().adapter(case.name).traits.order_matters:
        raise SkipTest("it says that it reads slots in order")
    memory = case.slots()
    _same_with_slots(case, memory, torch.arange(memory.length - 1, -1, -1), "slots backwards")


def check_slots_twice(case: Case) -> None:
    """Every slot twice is the same memory, unless the adapter says that it counts them, as beside a null slot."""
    if case.fresh().adapter(case.name).traits.duplicates_matter:
        raise SkipTest("it says that it counts slots")
    memory = case.slots()
    _same_with_slots(case, memory, torch.arange(memory.length).repeat(2), "every slot twice")


def _same_with_slots(case: Case, memory: Memory, index: Tensor, what: str) -> None:
    model, parts = case.trained(), (memory.mask, memory.segments, memory.scores)
    mask, segments, scores = (None if part is None else part[:, index] for part in parts)
    moved = Memory(memory.tokens[:, index], mask, segments, scores)
    close(case.ask(model, moved), case.ask(model, memory), what)


def check_batch_sizes_match(case: Case) -> None:
    """Another number of rows in the memory than in the batch is a ShapeError, also one row for many."""
    model, memory = case.trained(), case.slots()
    for rows in (1, case.rows - 1, case.rows + 1, 2 * case.rows):
        other: Memory = memory[torch.arange(rows) % case.rows]
        refuses(ShapeError, lambda other=other: case.ask(model, other), f"a memory of {rows} rows")  # type: ignore[misc]
    shared = memory[:1].expand(case.rows)
    close(case.ask(model, shared), case.ask(model, memory[[0] * case.rows]), "one row shared by the caller's word")


def check_bad_memories_are_refused(case: Case) -> None:
    """A memory of another width, with NaN in a visible slot, or of another type is refused, and nothing changes."""
    model, memory = case.trained(), case.slots()
    answer = case.ask(model, memory)
    wide = memory.replace(memory.tokens.repeat(1, 1, 2))
    refuses(ShapeError, lambda: case.ask(model, wide), "twice the width")
    refuses(MmattnError, lambda: case.ask(model, "a memory"), "a string as memory")
    broken = case.slots()
    broken.tokens.masked_fill_(broken.real_slots()[..., None], torch.nan)
    refuses(NonFiniteError, lambda: case.ask(model, broken), "a memory edited to NaN")
    refuses(NonFiniteError, lambda: case.condition(model, broken).__enter__(), "a memory edited to NaN, in a block")
    refuses(ShapeError, lambda: case.condition(model, wide).__enter__(), "twice the width, in a block")
    same(case.ask(model), case.host, "without a memory afterwards")
    same(case.ask(model, memory), answer, "with a good one afterwards")


def check_doctor(case: Case) -> None:
    """The doctor finds a trained adapter well, a fresh one silent, and leaves the model as it was."""
    model, memory = case.trained(), case.memory()
    if not hasattr(memory, "__getitem__"):
        raise SkipTest(f"its memory is a {type(memory).__name__}, which no other can stand for")
    answer = case.ask(model, memory)
    report = doctor(model, {**case.batch, "memory": memory})
    assert report.ok, f"a trained adapter is found ill:\n{report}"
    same(case.ask(model, memory), answer, "after the doctor")
    if not model.adapter(case.name).traits.starts_as_identity:
        return
    failed = doctor(case.fresh(), {**case.batch, "memory": memory}).failed
    assert "each layer adds something" in failed, f"a fresh adapter is found to add something: {failed}"


def check_record(case: Case) -> None:
    """`record` gives the weights of every block that attends, sums of at most 1, 0 on masked slots; answers stay."""
    model, memory = case.trained(), case.memory()
    answer = case.ask(model, memory)
    try:
        with record(model) as weights:
            same(case.ask(model, memory), answer, "while weights are recorded")
    except ConditionError as error:  # the host's own attention does more than a softmax of scaled scores
        raise SkipTest(str(error)) from error
    if not any(name == case.name for name, _ in model.attentions()):
        raise SkipTest("it does not attend to its memory")
    places = {(case.name, layer) for layer in model.adapter(case.name).layers}
    assert set(weights) == places, f"recorded at {sorted(weights)}, and the adapter is at {sorted(places)}"
    for place, (shares, *rest) in weights.items():
        assert shares.dim() == 4 and not rest, f"{place}: not one call with weights (b, h, l, m)"
        assert bool((shares >= 0).all()) and bool((shares.sum(-1) <= 1 + 1e-4).all()), f"{place}: no shares"
    if any(shares.shape[::3] == answer.shape[:1] for (shares, *_) in weights.values()):
        slots = case.slots()
        for place, (shares, *_) in weights.items():
            if shares.shape[3] == slots.length:
                hidden = shares.masked_fill(slots.real_slots()[:, None, None], 0)
                assert not bool(hidden.any()), f"{place}: masked slots have weights"
    same(case.ask(model, memory), answer, "after the recording")
