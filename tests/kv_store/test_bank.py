"""A bank gathers what projecting the hits of each request would have made, in every kind of call, and from its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mmattn
from mmattn.kv_store.bank import Bank
from mmattn.storage.safetensors import read_tensors, write_tensors
from tests import tiny
from tests.kv_store.banks import (
    ENTRIES,
    HITS,
    LENGTH,
    ROWS,
    SLOTS,
    answer,
    by_hand,
    check,
    entries,
    hits,
    projections,
    read_and_project,
    reload,
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


def saved(model, tmp_path, **how):
    bank = model.bank(entries(), **how)
    bank.add(entries(2, seed=5))
    bank.remove([24])
    bank.save(tmp_path / "bank.safetensors")
    return bank, tmp_path / "bank.safetensors"


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_bank_comes_back_from_its_file(model, tmp_path, mapped, dtype):
    tiny.attach(model.host, name="other", layers=(1,), null_slot=True)
    bank, path = saved(model, tmp_path, dtype=dtype)
    raw, found = path.read_bytes(), hits(ENTRIES + 1)
    back = model.load_bank(path, mapped=mapped)
    assert (len(back), back.slots, back.nbytes()) == (ENTRIES + 2, SLOTS, sum(t.nbytes for t in back._tables.values()))
    want, _ = answer(model, bank.gather(**found))
    got, projected = answer(model, back.gather(**found))
    assert projected == 0
    assert torch.equal(got, want)
    with pytest.raises(IndexError, match="removed"):
        back.gather(torch.tensor([[24]]))
    for one in (bank, back):
        one.update([found["rows"][0, 0].item()], entries(1, seed=6))
    assert path.read_bytes() == raw
    new = answer(model, back.gather(**found))[0]
    assert not torch.equal(new, want)
    assert torch.equal(answer(model, bank.gather(**found))[0], new)
    assert back.add(entries(3)).tolist() == [25, 26, 27]
    back.refresh()
    assert torch.equal(answer(model, back.gather(**found))[0], new)
    # Onto the very file that it may be mapped from.
    back.save(path)
    assert torch.equal(answer(model, back.gather(**found))[0], new)
    again = model.load_bank(path, mapped=mapped)
    assert len(again) == ENTRIES + 5
    assert torch.equal(answer(model, again.gather(**found))[0], new)


def test_what_was_removed_is_in_no_file(model, tmp_path):
    memory = entries()
    bank, path = model.bank(memory), tmp_path / "bank.safetensors"
    secret = memory.tokens[4][memory.mask[4]].numpy().tobytes()
    bank.save(path)
    assert secret in path.read_bytes()
    bank.remove([4])
    bank.save(path)
    assert secret not in path.read_bytes()


def test_a_mapped_bank_stays_in_its_file(model, tmp_path):
    _, path = saved(model, tmp_path)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not tell what is mapped")
    plain = model.load_bank(path)
    assert str(path) not in maps.read_text()
    mapped = model.load_bank(path, mapped=True)
    assert str(path) in maps.read_text()
    assert torch.equal(answer(model, mapped.gather(**hits()))[0], answer(model, plain.gather(**hits()))[0])


def test_the_bank_of_another_adapter_is_refused_by_name(model, tmp_path):
    _, path = saved(model, tmp_path)
    other = tiny.attach(tiny.make("llama"), name="other")
    with pytest.raises(mmattn.errors.AdapterFileError, match=r"adapter 'default', and this host has 'other'"):
        other.load_bank(path)
    reload(model)
    with pytest.raises(
        mmattn.errors.AdapterFileError, match=r"other weights or settings than adapter 'default' has here"
    ):
        model.load_bank(path)
    # The same weights on another copy of the host are the same adapter; the gate has no say in keys and values.
    same = tiny.attach(tiny.make("llama"))
    with torch.no_grad():
        same.adapters["default"].block(0).gate.gate.fill_(0.1)
    assert len(same.load_bank(path)) == ENTRIES + 2


def test_a_damaged_bank_is_refused(model, tmp_path):
    _, path = saved(model, tmp_path)
    raw = path.read_bytes()
    flipped = raw[:-1000] + bytes([raw[-1000] ^ 4]) + raw[-999:]
    damaged = [raw[:-7], raw[: len(raw) // 2], raw[:300], raw + b"0", b"", flipped]
    for mapped in (False, True):
        for content in damaged:
            path.write_bytes(content)
            with pytest.raises(mmattn.errors.AdapterFileError):
                model.load_bank(path, mapped=mapped)
        entries().save(path)
        with pytest.raises(mmattn.errors.AdapterFileError, match="mmattn-bank"):
            model.load_bank(path, mapped=mapped)


def test_a_forged_bank_is_refused(model, tmp_path):
    _, path = saved(model, tmp_path)
    tables, metadata = read_tensors(path, "mmattn-bank", check_finite=False)
    forgeries = [
        ({name: table for name, table in tables.items() if name != "default.0.keys"}, metadata),
        (tables | {"default.0.keys": tables["default.0.keys"][1:]}, metadata),
        (tables | {"present": tables["present"].float()}, metadata),
        (tables | {"tokens": tables["tokens"][:0]}, metadata),
        (tables | {"tokens": tables["tokens"][..., 1:]}, metadata),
        (tables, metadata | {"adapters": {}}),
        (tables, metadata | {"adapters": ["default"]}),
        (tables, metadata | {"dtype": "I8"}),
        (tables, metadata | {"dtype": "F16"}),
    ]
    for forged, says in forgeries:
        write_tensors(path, forged, says)
        with pytest.raises(mmattn.errors.AdapterFileError):
            model.load_bank(path)
    write_tensors(path, tables, metadata)
    assert isinstance(model.load_bank(path), Bank)
