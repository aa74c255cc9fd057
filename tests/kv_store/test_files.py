"""A bank in a file: it comes back, it stays there where it is mapped, and a damaged or forged one is refused."""

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
    SLOTS,
    answer,
    entries,
    hits,
    reload,
)


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
