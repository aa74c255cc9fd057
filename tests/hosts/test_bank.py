"""A bank gathers what projecting the hits of each request would have made: the same numbers, never stale ones."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
import torch

import mmattn
from mmattn.errors import ConditionError, ConfigError, MaskError, NonFiniteError, ShapeError
from mmattn.files import read_tensors, write_tensors
from mmattn.hosts.bank import Bank
from mmattn.positions import Rotary
from tests import tiny
from tests.tiny import assert_close, differs

ROWS, LENGTH, ENTRIES, SLOTS, HITS = 3, 7, 23, 5, 11

SETTINGS = {
    "plain": {},
    "gates per head": {"gate": "head"},
    "gates per channel, no feed-forward": {"gate": "channel", "feed_forward": 0},
    "grouped heads": {"num_heads": 4, "num_kv_heads": 2},
    "one key head": {"num_heads": 3, "num_kv_heads": 1},
    "query and key norm": {"qk_norm": True},
    "null slot": {"null_slot": True},
    "null slot and length norm": {"null_slot": True, "length_norm": 17.0},
    "score bias": {"score_bias": True},
    "score bias and null slot": {"score_bias": True, "null_slot": True, "num_heads": 4, "num_kv_heads": 2},
    "resampler": {"resampler": mmattn.Resampler(num_latents=3, depth=2, num_heads=2)},
    "latest hit": {"look": "latest"},
}
settings = pytest.mark.parametrize("setting", SETTINGS.values(), ids=list(SETTINGS))


def entries(n=ENTRIES, m=SLOTS, seed=0):
    """Entries of 1 to m real slots; behind them there is garbage."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, m + 1, (n, 1), generator=draw)
    mask = torch.arange(m) < lengths
    tokens = torch.randn(n, m, tiny.MEMORY_DIM, generator=draw).masked_fill(~mask[..., None], torch.nan)
    return mmattn.Memory(tokens, mask)


def hits(n=ENTRIES, count=HITS, seed=0):
    """Rows, mask and scores of three requests: some hits are missing, the second request found nothing at all."""
    draw = torch.Generator().manual_seed(100 + seed)
    rows = torch.randint(0, n, (ROWS, count), generator=draw)
    mask = torch.rand(ROWS, count, generator=draw) < 0.7
    mask[1], mask[:, 0] = False, torch.tensor([True, False, True])
    scores = torch.randn(ROWS, count, generator=draw)
    return {"rows": rows.masked_fill(~mask, -1), "mask": mask, "scores": scores.masked_fill(~mask, torch.nan)}


def by_hand(memory, rows, mask, scores):
    """The memory that a request without a bank would be given."""
    (b, n), m = rows.shape, memory.length
    rows = rows.clamp(min=0)
    real = memory._filled("mask")[rows] & mask[..., None]
    return mmattn.Memory(
        memory.tokens[rows].flatten(1, 2),
        real.flatten(1),
        torch.arange(n).repeat_interleave(m).expand(b, -1),
        torch.where(mask, scores, 0).repeat_interleave(m, 1),
    )


@contextlib.contextmanager
def projections(model):
    """Counts how often keys and values are projected inside the block."""
    seen = []
    layers = [attention.k_proj for attention in model.attentions().values()]
    hooks = [layer.register_forward_hook(lambda *_: seen.append(1)) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def answer(model, memory, **given):
    """Logits, and how many projections they took."""
    if any(adapter.config.look == "latest" for adapter in model.adapters.values()):
        given["images"] = torch.arange(LENGTH).clamp(max=HITS - 1).add(1).expand(ROWS, -1)
    with torch.no_grad(), projections(model) as seen:
        return model(tiny.text(ROWS, LENGTH), memory=memory, **given).logits, len(seen)


def check(bank, memory, found=None):
    """What the bank gathers is what projecting the entries of `memory` gives; returns it."""
    found = found or hits(memory.batch)
    got, projected = answer(bank.model, bank.gather(**found))
    want, _ = answer(bank.model, by_hand(memory, **found))
    assert projected == 0
    assert_close(got, want, 1e-6)
    return got


# The same as projecting


@settings
def test_gathering_is_projecting_the_hits(setting):
    model, memory = tiny.attach(tiny.make("llama"), **setting), entries()
    bank, found = model.bank(memory), hits()
    with torch.no_grad():
        for attention in model.attentions().values():
            if attention.score_scale is not None:
                attention.score_scale.fill_(0.3)
        bank.refresh()
    got, own = check(bank, memory, found), tiny.own(tiny.text(ROWS, LENGTH))
    assert torch.equal(got[1], own[1])
    assert differs(got[[0, 2]], own[[0, 2]])
    for name, adapter in model.adapters.items():
        for layer in adapter.layers:
            with torch.no_grad():
                _, made = bank.gather(**found).look(name, adapter, layer, LENGTH)
                _, want = model.prepare(by_hand(memory, **found)).look(name, adapter, layer, LENGTH)
            assert made.lengths is want.lengths is None and made.null is want.null
            assert torch.equal(made.mask, want.mask)
            shown = torch.nn.functional.pad(want.mask, (int(want.null), 0), value=True)[:, None, :, None]
            assert_close(made.keys * shown, want.keys * shown, 1e-6)
            assert_close(made.values * shown, want.values * shown, 1e-6)
            if want.bias is not None:
                assert torch.equal(made.bias * want.mask.any(1, True), want.bias * want.mask.any(1, True))


@settings
def test_bfloat16(setting):
    model, memory, found = tiny.attach(tiny.make("llama"), **setting).bfloat16(), entries().to(torch.bfloat16), hits()
    found["scores"] = found["scores"].bfloat16()
    got, projected = answer(model, model.bank(memory).gather(**found))
    assert projected == 0
    assert_close(got, answer(model, by_hand(memory, **found))[0], 2e-2)


@pytest.mark.parametrize("setting", [{}, {"score_bias": True, "num_heads": 4, "num_kv_heads": 2}])
def test_padding_is_left_out_where_that_pays(setting):
    model, memory = tiny.attach(tiny.make("llama"), **setting), entries(7, 61)
    memory = mmattn.Memory(memory.tokens, memory.mask & (torch.arange(61) % 3 == 1))
    bank, found = model.bank(memory), hits(7, 211)
    check(bank, memory, found)
    with torch.no_grad():
        made = bank.gather(**found).look("default", model.adapters["default"], 0, 1)[1]
    assert made.lengths is not None and made.keys.shape[2] == sum(made.lengths) == made.mask.sum()


def test_full_entries_need_no_mask():
    model, memory = tiny.attach(tiny.make("llama")), tiny.memory(ENTRIES, SLOTS)
    rows = torch.tensor([[5, 22, 0], [5, 5, 7], [1, 2, 3]])
    prepared = model.bank(memory).gather(rows.to(torch.uint8))
    want = mmattn.Memory(memory.tokens[rows].flatten(1, 2))
    assert_close(answer(model, prepared)[0], answer(model, want)[0], 1e-6)
    with torch.no_grad():
        assert prepared.look("default", model.adapters["default"], 0, 1)[1].mask is None


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


def test_the_language_can_be_any_family():
    for family in ("gpt2", "bloom", "mamba"):
        check(tiny.attach(tiny.make(family)).bank(entries()), entries())


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
    made = {layer: prepared.look("default", model.adapters["default"], layer, 1)[1] for layer in (0, 2)}
    for how in ({}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        with projections(model) as seen:
            got = model.generate(**prompt, **how, memory=prepared)
        assert not seen
        assert torch.equal(got, model.generate(**prompt, **how, memory=plain))
    for layer, kept in made.items():
        assert kept.keys.shape[0] == ROWS
        assert prepared.look("default", model.adapters["default"], layer, 1)[1] is kept
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
            kept = [given.look("default", model.adapters["default"], 0, 1)[1].keys for given in (prepared, plain)]
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
    with pytest.raises(IndexError, match=rf"found row {gone}, .*removed"):
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
    with pytest.raises(IndexError, match=rf"request 1 found row {ENTRIES}, .* {ENTRIES} rows"):
        bank.gather(torch.tensor([[3, 4], [ENTRIES, 6]]))
    with pytest.raises(IndexError, match="mask=rows >= 0"):
        bank.gather(torch.tensor([[3, 4], [5, -1]]))
    for wrong in (rows.float(), rows[0], rows > 3, rows.tolist()):
        with pytest.raises(ShapeError, match=r"int tensor \(b, n\)"):
            bank.gather(wrong)
    with pytest.raises(MaskError, match="bool"):
        bank.gather(rows, mask=torch.ones(2, 2))
    with pytest.raises(ShapeError, match="mask must be"):
        bank.gather(rows, mask=rows[:, :1] > 0)
    with pytest.raises(ShapeError, match="scores must be"):
        bank.gather(rows, scores=torch.ones(2, 3))
    with pytest.raises(ShapeError, match="floating point"):
        bank.gather(rows, scores=rows)
    with pytest.raises(NonFiniteError, match="scores at row 1"):
        bank.gather(rows, scores=torch.tensor([[1.0, 2], [3, torch.nan]]))
    with pytest.raises(ShapeError, match="one entry per hit"):
        bank.gather(rows, sources=[["a", "b"], ["c"]])
    with pytest.raises(ShapeError, match="no scores"):
        tiny.attach(tiny.make("llama"), score_bias=True).bank(entries()).gather(rows)
    with pytest.raises(ShapeError, match="rows"):
        model(tiny.text(ROWS, LENGTH), memory=bank.gather(rows))


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
        model.bank(entries(), torch.int8)
    for attention in model.attentions().values():
        attention.rotary = Rotary(attention.head_dim)
    with pytest.raises(ConfigError, match="rotates keys by their place"):
        model.bank(entries())
    model.set_adapter([])
    with pytest.raises(ConditionError, match="set_adapter"):
        model.bank(entries())


# Weights that change


def train(model):
    ids = tiny.text(ROWS, LENGTH)
    model(ids, labels=ids, memory=tiny.memory(ROWS)).loss.backward()
    torch.optim.AdamW(model.adapters.parameters(), lr=0.05).step()


def reload(model):
    model.adapters.load_state_dict({name: value * 0.5 for name, value in model.adapters.state_dict().items()})


def replace(model):
    tiny.attach(model.host, name="other")
    model.delete_adapter("default")
    tiny.attach(model.host, num_heads=2, head_dim=8)
    model.set_adapter("default")


CHANGES = {"trained": train, "loaded": reload, "another dtype": lambda model: model.double(), "replaced": replace}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_pages_of_other_weights_are_never_used(model, change, tmp_path):
    memory, found = entries(), hits()
    bank = model.bank(memory)
    before, used = bank.gather(**found), bank.gather(**found)
    old, _ = answer(model, used)
    change(model)
    want, _ = answer(model, by_hand(memory, **found))
    assert change is replace or not torch.equal(want, old)
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
    model.detach()
    with pytest.raises(ConditionError, match="detached"):
        bank.gather(**hits())


# Files


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
    with pytest.raises(mmattn.AdapterFileError, match=r"adapter 'default', and this host has 'other'"):
        other.load_bank(path)
    reload(model)
    with pytest.raises(mmattn.AdapterFileError, match=r"other weights than those adapter 'default' has here"):
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
            with pytest.raises(mmattn.AdapterFileError):
                model.load_bank(path, mapped=mapped)
        entries().save(path)
        with pytest.raises(mmattn.AdapterFileError, match="mmattn-bank"):
            model.load_bank(path, mapped=mapped)


def test_a_forged_bank_is_refused(model, tmp_path):
    _, path = saved(model, tmp_path)
    tables, metadata = read_tensors(path, "mmattn-bank", check_finite=False)
    forgeries = [
        ({name: table for name, table in tables.items() if name != "default.0.keys"}, metadata),
        (tables | {"default.0.keys": tables["default.0.keys"][1:]}, metadata),
        (tables | {"edition": tables["edition"].float()}, metadata),
        (tables | {"tokens": tables["tokens"][:0]}, metadata),
        (tables | {"tokens": tables["tokens"][..., 1:]}, metadata),
        (tables, metadata | {"adapters": {}}),
        (tables, metadata | {"adapters": ["default"]}),
        (tables, metadata | {"dtype": "I8"}),
        (tables, metadata | {"dtype": "F16"}),
    ]
    for forged, says in forgeries:
        write_tensors(path, forged, says)
        with pytest.raises(mmattn.AdapterFileError):
            model.load_bank(path)
    write_tensors(path, tables, metadata)
    assert isinstance(model.load_bank(path), Bank)


# Threads


def test_threads_see_whole_entries(model):
    """Entries change all at once from one vector to another: what is gathered is all the one or all the other."""
    n, m = 401, 31
    versions = [torch.full((n, m, tiny.MEMORY_DIM), value) * torch.arange(1.0, 14) ** 2 for value in (1.0, -1.0)]
    bank, rows, adapter = model.bank(versions[0]), torch.arange(n)[None], model.adapters["default"]
    with torch.no_grad():
        want = [model.prepare(version[:1]).look("default", adapter, 0, 1)[1].keys[..., :1, :] for version in versions]
    wrong, seen, done = [], set(), threading.Event()

    def read():
        while not done.is_set():
            with torch.no_grad():
                prepared = bank.gather(rows)
                made = prepared.look("default", adapter, 0, 1)[1]
            sign = prepared.memory.tokens[0, 0, 0].sign()
            near = want[0] if sign > 0 else want[1]
            seen.add(int(sign))
            if not (prepared.memory.tokens.sign() == sign).all() or not torch.allclose(made.keys, near, atol=1e-4):
                wrong.append(sign)

    def write():
        for turn in range(40):
            bank.update(range(n), versions[(turn + 1) % 2])
            bank.remove(bank.add(versions[0][:3]))
        done.set()

    threads = [threading.Thread(target=read) for _ in range(3)] + [threading.Thread(target=write)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and seen == {1, -1}
    assert len(bank) == n + 120
