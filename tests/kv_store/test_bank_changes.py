"""A bank whose entries or whose adapter's weights change never gives stale keys and values, in threads neither."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import mmattn
from mmattn.core.positions import Rotary
from mmattn.errors import ConditionError, ConfigError, MaskError, NonFiniteError, ShapeError
from tests import tiny
from tests.kv_store.banks import (
    ENTRIES,
    LENGTH,
    ROWS,
    SLOTS,
    answer,
    by_hand,
    check,
    entries,
    hits,
    read_and_project,
    reload,
    settings,
)
from tests.tiny import assert_close

# Entries that change


def changed(memory, places, by):
    """The memory with other rows at these places."""
    tokens, mask = memory.tokens.clone(), memory.mask.clone()
    tokens[places], mask[places] = by.tokens, by.mask
    return mmattn.Memory(tokens, mask)


@settings
def test_an_update_is_seen_by_those_who_gather_after_it(setting):
    model, before, new = tiny.attach(tiny.make("llama"), **setting), entries(), entries(4, seed=9)
    bank, found = model.bank(before), hits()
    places = [found["rows"][0, 0].item(), *(row for row in (1, 2, 17, 20) if row != found["rows"][0, 0])][:4]
    after = changed(before, places, new)
    used, unused = bank.gather(**found), bank.gather(**found)
    old, _ = answer(model, used)
    bank.update(places, new)
    assert not torch.equal(check(bank, after), old)
    assert torch.equal(answer(model, used)[0], old)
    # Gathered before and looked at after: as it was when it was gathered.
    assert_close(answer(model, unused)[0], old, 1e-6)


def test_the_bank_is_a_copy(model):
    memory = entries()
    bank = model.bank(memory)
    kept = check(bank, memory)
    memory.tokens.mul_(3)
    assert torch.equal(answer(model, bank.gather(**hits()))[0], kept)
    # What was gathered is a memory like any other: an edit of it counts.
    prepared = bank.gather(**hits())
    assert torch.equal(answer(model, prepared)[0], kept)
    prepared.memory.tokens.neg_()
    negated = mmattn.Memory(-entries().tokens, memory.mask)
    assert_close(answer(model, prepared)[0], answer(model, by_hand(negated, **hits()))[0], 1e-6)


def test_entries_that_are_added(model):
    parts = [entries(n, seed=n) for n in (2, 1, 3, 1, 0, 13, 3)]
    bank = model.bank(parts[0])
    rows = [bank.add(part).tolist() for part in parts[1:]]
    assert rows == [[2], [3, 4, 5], [6], [], list(range(7, 20)), [20, 21, 22]]
    assert len(bank) == ENTRIES
    check(bank, mmattn.Memory.stack(parts))


def test_a_removed_entry_is_gone(model):
    memory = entries()
    bank, found = model.bank(memory), hits()
    before = bank.gather(**found)
    want = check(bank, memory, found)
    gone = int(found["rows"][2, 0])
    bank.remove([gone])
    with pytest.raises(IndexError, match=rf"asks for row {gone}, .*removed"):
        bank.gather(**found)
    assert len(bank) == ENTRIES
    assert not bank.memory(torch.tensor([[gone]]), mask=torch.tensor([[False]])).tokens.any()
    # Those who gathered it still have it; those who mask it go on; a later entry may take its row.
    assert_close(answer(model, before)[0], want, 1e-6)
    check(bank, memory, found | {"mask": found["mask"] & (found["rows"] != gone)})
    bank.refresh()
    with pytest.raises(IndexError, match="removed"):
        bank.gather(**found)
    bank.update([gone], entries(1, seed=8))
    check(bank, changed(memory, [gone], entries(1, seed=8)), found)


def test_a_rejected_call_changes_nothing(model):
    memory = entries()
    bank = model.bank(memory)
    want, size = check(bank, memory), bank.nbytes()
    broken = mmattn.Memory(torch.full((2, SLOTS, tiny.MEMORY_DIM), torch.inf), check_finite=False)
    for new, error in (
        (broken, NonFiniteError),
        (tiny.memory(2, SLOTS + 1), ShapeError),
        (tiny.memory(2, SLOTS, tiny.MEMORY_DIM + 1), ShapeError),
        (mmattn.Memory(tiny.memory(2).tokens, scores=torch.ones(2, SLOTS)), ShapeError),
        (mmattn.Memory(torch.randn(2, SLOTS, tiny.MEMORY_DIM, requires_grad=True)), ConditionError),
        ([1, 2], ShapeError),
    ):
        with pytest.raises(error):
            bank.update([3, 4], new)
        with pytest.raises(error):
            bank.add(new)
    for rows, error in (
        ([3, 3], ShapeError),
        ([3, -1], IndexError),
        ([3, ENTRIES], IndexError),
        ([0.5, 1], ShapeError),
    ):
        with pytest.raises(error):
            bank.update(rows, tiny.memory(2))
        with pytest.raises(error):
            bank.remove(rows)
    with pytest.raises(ShapeError, match="3 rows were to be updated with 2 entries"):
        bank.update([3, 4, 5], tiny.memory(2))
    assert (len(bank), bank.nbytes()) == (ENTRIES, size)
    assert torch.equal(answer(model, bank.gather(**hits()))[0], want)


def test_requests_that_do_not_fit(model):
    bank, rows = model.bank(entries()), torch.tensor([[3, 4], [5, 6]])
    scored = tiny.attach(tiny.make("llama"), score_bias=True).bank(entries())
    beyond, absent = torch.tensor([[3, 4], [ENTRIES, 6]]), torch.tensor([[3, 4], [5, -1]])
    spoilt = torch.tensor([[1.0, 2], [3, torch.nan]])
    for gather, error, words in (
        (lambda: bank.gather(beyond), IndexError, rf"request 1 asks for row {ENTRIES}, .* {ENTRIES} rows"),
        (lambda: bank.gather(absent), IndexError, "mask=rows >= 0"),
        *(
            (lambda wrong=wrong: bank.gather(wrong), ShapeError, r"int tensor \(b, n\)")
            for wrong in (rows.float(), rows[0], rows > 3, rows.tolist())
        ),
        (lambda: bank.gather(rows, mask=torch.ones(2, 2)), MaskError, "bool"),
        (lambda: bank.gather(rows, mask=rows[:, :1] > 0), ShapeError, "mask must be"),
        (lambda: bank.gather(rows, scores=torch.ones(2, 3)), ShapeError, "scores must be"),
        (lambda: bank.gather(rows, scores=rows), ShapeError, "floating point"),
        (lambda: bank.gather(rows, scores=spoilt), NonFiniteError, "scores at row 1"),
        (lambda: bank.gather(rows, sources=[["a", "b"], ["c"]]), ShapeError, "one entry per hit"),
        (lambda: scored.gather(rows), ShapeError, "no scores"),
        (lambda: model(tiny.text(ROWS, LENGTH), memory=bank.gather(rows)), ShapeError, "rows"),
    ):
        with pytest.raises(error, match=words):
            gather()


def test_what_cannot_be_a_bank(model):
    for wrong, error, words in (
        (tiny.memory(4, 0), ShapeError, "at least one slot"),
        (tiny.memory(4, 5, 17), ShapeError, "memory_dim=13"),
        (mmattn.Memory(tiny.memory(4).tokens, segments=torch.zeros(4, 5, dtype=torch.long)), ShapeError, "segments"),
        (torch.full((4, 5, 13), torch.nan), NonFiniteError, "row 0"),
        (torch.randn(4, 5, 13, requires_grad=True), ConditionError, "detach"),
    ):
        with pytest.raises(error, match=words):
            model.bank(wrong)
    with pytest.raises(ConfigError, match="floating point dtype"):
        model.bank(entries(), torch.int16)
    for attention in model.attentions().values():
        attention.kv_proj.rotary = Rotary(attention.head_dim)
    with pytest.raises(ConfigError, match="rotates keys by their position"):
        model.bank(entries())
    model.set_adapter([])
    with pytest.raises(ConditionError, match="set_adapter"):
        model.bank(entries())


# Weights that change


def train(model):
    ids = tiny.text(ROWS, LENGTH)
    model(ids, labels=ids, memory=tiny.memory(ROWS)).loss.backward()
    torch.optim.AdamW(model.adapters.parameters(), lr=0.05).step()


def test_pages_of_other_weights_are_never_used(model, tmp_path):
    memory, found = entries(), hits()
    bank = model.bank(memory)
    before, used = bank.gather(**found), bank.gather(**found)
    old, _ = answer(model, used)
    train(model)
    want, _ = answer(model, by_hand(memory, **found))
    assert not torch.equal(want, old)
    for prepared in (before, used):
        assert_close(answer(model, prepared)[0], want, 1e-6)
    for refused in (
        lambda: bank.gather(**found),
        lambda: bank.update([3], entries(1)),
        lambda: bank.add(entries(1)),
        lambda: bank.save(tmp_path / "bank"),
    ):
        with pytest.raises(ConditionError, match=r"'default' .* 23 rows .* bank\.refresh\(\)"):
            refused()
    assert torch.equal(answer(model, bank.memory(**found))[0], want)
    bank.refresh()
    check(bank, memory)
    # Gathered before the weights changed, looked at after the pages were made anew.
    assert_close(answer(model, before)[0], want, 1e-6)
    assert not list(tmp_path.iterdir())


def test_a_bank_belongs_to_its_host(model):
    bank = model.bank(entries())
    prepared = bank.gather(**hits())
    other = tiny.attach(tiny.make("llama", 1))
    reload(other)
    got, projected = answer(other, prepared)
    assert projected == 2
    assert_close(got, answer(other, by_hand(entries(), **hits()))[0], 1e-6)
    model.unload()
    with pytest.raises(ConditionError, match="unloaded"):
        bank.gather(**hits())


# Threads


def test_threads_see_whole_entries(model):
    """Entries change all at once from one vector to another: what is gathered is all the one or all the other."""
    n, m = 401, 31
    versions = [torch.full((n, m, tiny.MEMORY_DIM), value) * torch.arange(1.0, 14) ** 2 for value in (1.0, -1.0)]
    bank = model.bank(versions[0])
    rows, adapter = torch.arange(n)[None], model.adapters["default"]
    with torch.no_grad():
        want = [read_and_project(model.prepare(version[:1]), adapter, 0, 1)[1].keys[..., :1, :] for version in versions]
    wrong, seen, done = [], set(), threading.Event()

    def read():
        while not done.is_set():
            with torch.no_grad():
                prepared = bank.gather(rows)
                made = read_and_project(prepared, adapter, 0, 1)[1]
            sign = prepared.memory.tokens[0, 0, 0].sign()
            near = want[0] if sign > 0 else want[1]
            seen.add(int(sign))
            if not (prepared.memory.tokens.sign() == sign).all() or not torch.allclose(made.keys, near, 1e-5, 1e-4):
                wrong.append(sign)

    def write():
        try:
            for turn in range(40):
                bank.update(range(n), versions[(turn + 1) % 2])
                bank.remove(bank.add(versions[0][:3]))
        finally:
            done.set()

    with ThreadPoolExecutor(4) as pool:
        for thread in [pool.submit(work) for work in (read, read, read, write)]:
            thread.result(120)
    assert not wrong and seen == {1, -1}
    assert len(bank) == n + 120
