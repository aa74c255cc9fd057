"""A bank gathers what projecting the hits of each request would have made: the same numbers, in every kind of call."""

from __future__ import annotations

import pytest
import torch

import mmattn
from tests import tiny
from tests.kv_store.banks import (
    HITS,
    LENGTH,
    ROWS,
    answer,
    by_hand,
    check,
    entries,
    hits,
    projections,
    read_and_project,
    settings,
)
from tests.tiny import assert_close, differs

# The same as projecting


@settings
def test_gathering_is_projecting_the_hits(setting):
    model, memory = tiny.attach(tiny.make("llama"), **setting), entries()
    bank, found = model.bank(memory), hits()
    with torch.no_grad():
        for attention in model.attentions().values():
            if attention.kv_proj.score_scale is not None:
                attention.kv_proj.score_scale.fill_(0.3)
        bank.refresh()
    got, own = check(bank, memory, found), tiny.own(tiny.text(ROWS, LENGTH))
    assert torch.equal(got[1], own[1])
    assert differs(got[[0, 2]], own[[0, 2]])
    for adapter in model.adapters.values():
        for layer in adapter.layers:
            with torch.no_grad():
                _, made = read_and_project(bank.gather(**found), adapter, layer, LENGTH)
                _, want = read_and_project(model.prepare(by_hand(memory, **found)), adapter, layer, LENGTH)
            assert made.lengths is want.lengths is None and made.null is want.null
            assert torch.equal(made.mask, want.mask)
            shown = torch.nn.functional.pad(want.mask, (int(want.null), 0), value=True)[:, None, :, None]
            assert_close(made.keys * shown, want.keys * shown, 1e-6)
            assert_close(made.values * shown, want.values * shown, 1e-6)
            if want.bias is not None:
                assert torch.equal(made.bias * want.mask.any(1, True), want.bias * want.mask.any(1, True))


@pytest.mark.parametrize("setting", [{}, {"score_bias": True, "num_heads": 4, "num_kv_heads": 2}])
def test_padding_is_left_out_where_that_pays(setting):
    model, memory = tiny.attach(tiny.make("llama"), **setting), entries(7, 61)
    memory = mmattn.Memory(memory.tokens, memory.mask & (torch.arange(61) % 3 == 1))
    bank, found = model.bank(memory), hits(7, 211)
    check(bank, memory, found)
    with torch.no_grad():
        made = read_and_project(bank.gather(**found), model.adapters["default"], 0, 1)[1]
    assert made.lengths is not None and made.keys.shape[2] == sum(made.lengths) == made.mask.sum()


@pytest.mark.parametrize("null_slot", [False, True])
def test_no_hits_at_all(null_slot):
    model = tiny.attach(tiny.make("llama"), null_slot=null_slot)
    own, ids = tiny.own(tiny.text(ROWS, LENGTH)), tiny.text(ROWS, LENGTH)
    bank = model.bank(entries(0))
    nothing = torch.full((ROWS, HITS), -1)
    for rows in (nothing, nothing[:, :0]):
        prepared = bank.gather(rows, mask=rows >= 0)
        assert torch.equal(answer(model, prepared)[0], own)
        assert torch.equal(model(ids, memory=prepared).logits, own)
    bank.add(entries())
    check(bank, entries())


def test_several_adapters_read_one_bank():
    model = tiny.attach(tiny.make("llama"), score_bias=True)
    tiny.attach(model.host, name="other", layers=(1, 2), null_slot=True, num_heads=3)
    memory = entries()
    bank, found = model.bank(memory), hits()
    both = check(bank, memory)
    model.set_adapter("other")
    assert not torch.equal(check(bank, memory), both)
    # One that came later, of which the bank knows nothing, reads the entries themselves.
    tiny.attach(model.host, name="late", layers=(1,), opened=False)
    with torch.no_grad():
        model.adapters["late"].block(1).gate.gate.fill_(0.7)
    got, projected = answer(model, bank.gather(**found))
    assert projected == 1
    assert_close(got, answer(model, by_hand(memory, **found))[0], 1e-6)
    bank.refresh()
    check(bank, memory)


def test_pages_of_half_the_size():
    model, memory, found = tiny.attach(tiny.make("llama"), null_slot=True), entries(), hits()
    exact, small = model.bank(memory), model.bank(memory, torch.bfloat16)
    assert small.nbytes() < 0.75 * exact.nbytes()
    got, want = answer(model, small.gather(**found))[0], answer(model, exact.gather(**found))[0]
    assert_close(got, want, 2e-2)
    assert not torch.equal(got, want)
    small.refresh()
    assert torch.equal(answer(model, small.gather(**found))[0], got)


# Calls


@torch.no_grad()
def test_generating_with_beams_copies_pages_once():
    model, memory, found = tiny.attach(tiny.make("llama")), entries(), hits()
    prepared, plain = model.bank(memory).gather(**found), by_hand(memory, **found)
    prompt = {"inputs": tiny.text(ROWS, LENGTH), "max_new_tokens": 6, "do_sample": False}
    made = {layer: read_and_project(prepared, model.adapters["default"], layer, 1)[1] for layer in (0, 2)}
    for how in ({}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        with projections(model) as seen:
            got = model.generate(**prompt, **how, memory=prepared)
        assert not seen
        assert torch.equal(got, model.generate(**prompt, **how, memory=plain))
    for layer, kept in made.items():
        assert kept.keys.shape[0] == ROWS
        assert read_and_project(prepared, model.adapters["default"], layer, 1)[1] is kept
    assert prepared.nbytes() == sum(kept.nbytes() for kept in made.values())
    with model.condition(prepared):
        assert torch.equal(model.host.generate(**prompt), model.generate(**prompt, memory=plain))


@torch.no_grad()
def test_requests_share_entries_and_nothing_else(model):
    memory, ids = entries(), tiny.text(ROWS, LENGTH)
    bank = model.bank(memory)
    one = torch.tensor([[3, 4, 22], [4, 4, 0], [9, 3, 4]])
    two = torch.tensor([[4, 3], [22, 4], [3, 9]])
    size, given = bank.nbytes(), [bank.gather(one), bank.gather(two)]
    alone = [model(ids, memory=by_hand(memory, rows, rows >= 0, rows * 1.0)).logits for rows in (one, two)]
    for _ in range(2):
        for prepared, want in zip(given, alone, strict=True):
            assert_close(model(ids, memory=prepared).logits, want, 1e-6)
    assert bank.nbytes() == size
    for i in range(ROWS):
        row = model(ids[i : i + 1], memory=bank.gather(one[i : i + 1])).logits
        assert_close(row, alone[0][i : i + 1], 1e-6)


def test_gradients_go_the_plain_way(model, ids):
    memory, found = entries(), hits()
    prepared, gradients = model.bank(memory).gather(**found), []
    for given in (prepared, by_hand(memory, **found)):
        model.adapters.zero_grad()
        model(ids, labels=ids, memory=given).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.adapters.parameters()])
    assert prepared.nbytes() == 0
    for got, want in zip(*gradients, strict=True):
        assert want.abs().max() > 0
        assert_close(got, want, 1e-5)
    assert answer(model, prepared)[1] == 0


def test_every_mode(model):
    memory, found = entries(), hits()
    with torch.inference_mode():
        bank = model.bank(mmattn.Memory(memory.tokens * 1, memory.mask))
        inside = bank.gather(**found)
        first = model(tiny.text(ROWS, LENGTH), memory=inside).logits.clone()
        bank.update([0], entries(1))
    bank.update([0], mmattn.Memory(memory.tokens[:1], memory.mask[:1]))
    assert torch.equal(answer(model, bank.gather(**found))[0], first)
    model(tiny.text(ROWS, LENGTH), memory=inside, labels=tiny.text(ROWS, LENGTH)).loss.backward()
    check(bank, memory)
    plain, prepared = by_hand(memory, **found), bank.gather(**found)
    with torch.autocast("cpu", torch.bfloat16):
        rough, projected = answer(model, prepared)
        assert projected == 0
        assert_close(rough.float(), answer(model, plain)[0].float(), 2e-2)
        plain = model.prepare(plain)
        with torch.no_grad():
            kept = [read_and_project(given, model.adapters["default"], 0, 1)[1].keys for given in (prepared, plain)]
        assert kept[0].dtype is kept[1].dtype is torch.bfloat16
        rebuilt = model.bank(memory)
    assert torch.equal(answer(model, prepared)[0], first)
    assert torch.equal(answer(model, rebuilt.gather(**found))[0], first)


def test_names_of_what_was_found(model):
    rows = torch.tensor([[3, -1], [4, 3]])
    sources = [["a", None], ["b", {"page": 7}]]
    prepared = model.bank(entries()).gather(rows, mask=rows >= 0, sources=sources)
    assert prepared.memory.sources == [["a"] * 5 + [None] * 5, ["b"] * 5 + [{"page": 7}] * 5]
    assert prepared.memory.segments.tolist() == [[0] * 5 + [1] * 5] * 2
    assert not prepared.memory.mask[0, 5:].any()
