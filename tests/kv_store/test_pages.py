"""A quantised bank gives the numbers of its definition bit for bit, within half a step of what was projected."""

from __future__ import annotations

import pytest
import torch

import mmattn
from mmattn.errors import AdapterFileError
from mmattn.storage.safetensors import read_tensors, write_tensors
from tests import tiny
from tests.kv_store.banks import (
    ENTRIES,
    ROWS,
    SLOTS,
    answer,
    entries,
    hits,
    read_and_project,
    rounded,
    rounded_bank,
    settings,
)

LONG = 17
INT8 = torch.int8
lengths = pytest.mark.parametrize("m", [1, SLOTS, LONG])


def banks(model, memory):
    """A quantised bank, and a plain one of the numbers that it must have."""
    return model.bank(memory, INT8), rounded_bank(model.bank(memory))


def shown(kv):
    """Keys and values of the slots that may be attended to."""
    kv = kv.without_null()
    if kv.mask is None or kv.lengths is not None:
        return kv.keys, kv.values
    return kv.keys.transpose(1, 2)[kv.mask], kv.values.transpose(1, 2)[kv.mask]


def assert_same(bank, plain, found=None):
    """Both give the same answers and the same keys and values, bit for bit, without projecting."""
    found = found or hits(len(plain))
    (got, projected), (want, _) = (answer(one.model, one.gather(**found)) for one in (bank, plain))
    assert projected == 0
    assert torch.isfinite(got).all() and torch.equal(got, want)
    for adapter in map(bank.model.adapter, bank.model.active):
        for layer in adapter.layers:
            with torch.no_grad():
                ours, theirs = (read_and_project(one.gather(**found), adapter, layer)[1] for one in (bank, plain))
            assert ours.lengths == theirs.lengths and ours.keys.dtype is theirs.keys.dtype
            assert all(map(torch.equal, shown(ours), shown(theirs)))
    return got


# The definition


@settings
@lengths
def test_the_numbers_are_those_of_the_definition(setting, m):
    model, memory = tiny.attach(tiny.make("llama"), **setting), entries(m=m)
    bank, plain = banks(model, memory)
    assert_same(bank, plain)
    exact = model.bank(memory)
    assert not torch.equal(*(answer(model, one.gather(**hits()))[0] for one in (plain, exact)))


@lengths
def test_errors_are_at_most_half_a_step(m):
    model, memory = tiny.attach(tiny.make("llama"), score_bias=True, num_kv_heads=1), entries(m=m)
    every = torch.arange(ENTRIES)[:, None]
    given = {"rows": every, "scores": every * 0.0}
    with torch.no_grad():
        for layer in (0, 2):
            exact, got = (
                read_and_project(bank.gather(**given), model.adapters["default"], layer)[1]
                for bank in (model.bank(memory), model.bank(memory, INT8))
            )
            for part in ("keys", "values"):
                want, numbers = getattr(exact, part), getattr(got, part)
                _, steps = rounded(want, memory.mask, part == "keys" and m == LONG)
                shown = memory.mask[:, None, :, None].expand_as(want)
                assert (steps[shown] > 0).all()
                assert ((numbers - want).abs() <= steps * 0.50001)[shown].all()
                assert ((numbers - want).abs() > steps * 0.4)[shown].any()


def test_what_entries_do_not_show_has_no_say(model):
    """Padding in an entry, and an entry of nothing but padding."""
    memory = entries(m=LONG)
    mask = memory.mask.clone()
    mask[3] = False
    memory = mmattn.Memory(memory.tokens, mask)
    bank, plain = banks(model, memory)
    scores = torch.zeros(ROWS, 2)
    assert_same(bank, plain, {"rows": torch.tensor([[3, 4], [3, 3], [0, 3]]), "scores": scores})
    assert_same(bank, plain)


# Precisions and calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@lengths
def test_every_precision_rounds_once(dtype, m):
    """The numbers of a host in another dtype are codes times scales, rounded to that dtype."""
    model, found = tiny.attach(tiny.make("llama"), null_slot=True).to(dtype), hits()
    bank, plain = banks(model, entries(m=m).to(dtype))
    assert_same(bank, plain, found | {"scores": found["scores"].to(dtype)})


# Edits and files


@pytest.mark.parametrize("m", [SLOTS, LONG])
def test_an_edit_changes_no_other_entry(model, m):
    """The same edits of a quantised bank and of a plain one; what was not named stays as it was, bit for bit."""
    memory, louder = entries(m=m), entries(4, m, seed=9)
    louder = mmattn.Memory(louder.tokens * 100, louder.mask)
    bank, plain = model.bank(memory, INT8), model.bank(memory)

    def stored(one, rows):
        return [table[rows + 1].clone() for table in one._tables.values()]

    places, others = [1, 2, 17, 20], torch.tensor([row for row in range(ENTRIES) if row not in (1, 2, 17, 20)])
    before = stored(bank, others)
    for one in (bank, plain):
        one.update(places, louder)
        assert one.add(louder).tolist() == [23, 24, 25, 26]
        one.remove([23])
    assert all(map(torch.equal, stored(bank, others), before))
    assert not any(table.any() for table in stored(bank, torch.tensor([23])))
    rounded_bank(plain)
    assert_same(bank, plain, hits())
    assert_same(bank, plain, {"rows": torch.tensor([[26], [17], [25]]), "scores": torch.zeros(3, 1)})


def test_what_a_file_says_of_its_pages(model, tmp_path):
    path = tmp_path / "bank.safetensors"
    model.bank(entries(), INT8).save(path)
    tables, metadata = read_tensors(path, "mmattn-bank", check_finite=False)
    for dtype in (None, "BF16", "I16", "int3", ["I8"]):
        write_tensors(path, tables, metadata | {"dtype": dtype})
        with pytest.raises(AdapterFileError):
            model.load_bank(path)
    write_tensors(path, tables | {"default.0.keys.scales": tables["default.0.keys.scales"].float()}, metadata)
    with pytest.raises(AdapterFileError, match="default.0.keys.scales"):
        model.load_bank(path)


# What it is for


@pytest.mark.parametrize("m", [1, 64])
def test_bytes(m):
    """At the sizes of the benchmark, and of the facts: entries of 64 slots and of one, heads of 64 and 40."""
    for k in (64, 40):
        model = tiny.attach(tiny.make("llama"), num_heads=2, head_dim=k)
        memory = tiny.memory(ENTRIES, m)
        exact = model.bank(memory).page_nbytes()
        assert model.bank(memory, INT8).page_nbytes() <= 0.28 * exact
        assert model.bank(memory, torch.bfloat16).page_nbytes() == 0.5 * exact
