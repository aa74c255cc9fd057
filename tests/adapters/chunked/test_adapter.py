"""Chunked cross-attention: each token reads the neighbours of the last chunk that has ended, and of no other."""

from __future__ import annotations

import inspect

import pytest
import torch

import mmattn
from tests import reference, tiny
from tests.adapters.chunked.chunks import LENGTH, ROWS, SIZE, SLOTS, Library, attach, neighbours, ragged, scene, slow
from tests.tiny import assert_close, differs

families = pytest.mark.parametrize("family", tiny.FAMILIES)
# The rows of a batch share the experts' matrix products, so another row's routing moves a row by one rounding.
EXPERTS = ("mixtral",)

SETTINGS = {
    "plain": {},
    "grouped heads": {"num_heads": 4, "num_kv_heads": 2},
    "query and key norm": {"qk_norm": True},
    "null slot": {"null_slot": True},
    "length norm": {"null_slot": True, "length_norm": 17.0},
    "score bias": {"score_bias": True},
}


def padded(where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (b, LENGTH) and attention mask: whole rows, or rows with 0, 4 and 2 tokens of padding on one side."""
    ids, keep = tiny.text(ROWS, LENGTH), torch.ones(ROWS, LENGTH, dtype=torch.long)
    for row, count in enumerate((0, 4, 2)):
        pads = {"nowhere": slice(0), "left": slice(count), "right": slice(LENGTH - count, None)}[where]
        ids[row, pads], keep[row, pads] = 0, 0
    return ids, keep


# The definition


@pytest.mark.parametrize("where", ["nowhere", "left", "right"])
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=list(SETTINGS))
def test_the_slow_definition(setting, where):
    ids, keep = padded(where)
    real = keep.bool()
    assert (where == "nowhere") == bool(real.all())
    states = []
    lm = tiny.make("llama").double()
    layers = tiny.decoder_layers(lm)
    layers[1].register_forward_pre_hook(lambda _, args: states.append(args[0]))
    with torch.no_grad():
        lm(ids, attention_mask=keep)
    (x,) = states
    model = attach(lm, layers=(0,), **setting).double()
    memory = ragged(scores="score_bias" in setting).to(torch.float64)
    tokens = memory.tokens.clone().requires_grad_()
    memory = mmattn.Memory(tokens, memory.mask, memory.segments, memory.scores)
    model(ids, attention_mask=keep, memory=memory)
    got, block, norm = states[-1], model.adapters["default"].block(0), model.adapters["default"].memory_norm
    how = {name: setting[name] for name in ("num_heads", "num_kv_heads", "length_norm") if name in setting}
    if setting.get("qk_norm"):
        how["norm_eps"] = block.attention.q_norm.eps
    want = slow(block, norm, x, memory, real, scored="score_bias" in setting, **how)
    reference.assert_close(got, want, torch.float64)
    # What reads nothing is the host's own, bit for bit: row 1 has none of its first chunk, row 2 only masked ones.
    silent = ~real | (real.cumsum(1) < torch.tensor([SIZE, 2 * SIZE, LENGTH + 1])[:, None])
    assert silent[0].any() and not silent[0].all() and silent[1].sum() > silent[0].sum()
    assert torch.equal(got[silent], x[silent])
    assert ((got - x).abs().amax(-1)[~silent] > 1e-3).all()
    upstream = torch.randn_like(got)
    inputs = [tokens, *model.adapters.parameters()]
    names = ["memory", *dict(model.adapters.named_parameters())]
    gradients = zip(
        names,
        reference.gradients(got, inputs, upstream),
        reference.gradients(want, inputs, upstream),
        strict=True,
    )
    for name, grad, expected in gradients:
        reference.assert_close(grad, expected, torch.float64, "grad")
        assert grad.any(), f"{name} never learns"


@families
def test_no_token_sees_what_was_found_with_its_own_future(family):
    s, memory = scene(family), neighbours()
    tokens = memory.tokens.clone().requires_grad_()
    out = s.model(s.ids, memory=mmattn.Memory(tokens, segments=memory.segments)).logits
    with torch.no_grad():
        out_alone = s.model(s.ids, memory=memory).logits
    for chunk in range(3):
        first = chunk * SIZE + SIZE - 1
        found_with = memory.segments == chunk
        other = memory.tokens.clone()
        other[found_with] = 3 - 2 * other[found_with]
        with torch.no_grad():
            changed = s.model(s.ids, memory=mmattn.Memory(other, segments=memory.segments)).logits
        assert torch.equal(changed[:, :first], out_alone[:, :first])
        for token in range(first, first + (SIZE if chunk < 2 else LENGTH - first)):
            assert differs(changed[:, token], out_alone[:, token])
        for upto, silent in ((first, True), (first + 1, False)):
            (grad,) = torch.autograd.grad(out[:, :upto].square().sum(), tokens, retain_graph=True)
            assert torch.isfinite(grad).all()
            assert bool((grad[found_with] == 0).all()) == silent
            assert bool(grad[~found_with].any()) == (chunk > 0)


# The contract, family by family


@families
@torch.no_grad()
def test_where_there_are_no_neighbours_the_host_answers(family):
    s, memory = scene(family), ragged()
    mixed = s.model(s.ids, memory=memory).logits
    # Row 1 reads its second chunk first, row 2 nothing at all.
    for row, first in enumerate((SIZE, 2 * SIZE, LENGTH + 1)):
        if family in EXPERTS:
            assert_close(mixed[row, : first - 1], s.own[row, : first - 1], 1e-6)
        else:
            assert torch.equal(mixed[row, : first - 1], s.own[row, : first - 1])
        if first <= LENGTH:
            assert differs(mixed[row, first - 1 :], s.own[row, first - 1 :])
    nothing = [mmattn.Memory(torch.randn(ROWS, 0, tiny.MEMORY_DIM), segments=torch.zeros(ROWS, 0, dtype=torch.long))]
    nothing += [mmattn.Memory(memory.tokens, torch.zeros_like(memory.mask), memory.segments), None]
    nothing += [mmattn.Memory(neighbours().tokens, segments=torch.full_like(memory.segments, -1))]
    nothing += [mmattn.Memory(neighbours().tokens, segments=torch.full_like(memory.segments, 3))]
    nothing += [Library(lambda total: 0)]
    for one in nothing:
        assert torch.equal(s.model(s.ids, memory=one).logits, s.own)
    assert torch.equal(s.model(s.ids, memory=neighbours(), adapter_scale=0.0).logits, s.own)
    with s.model.disable_adapter():
        assert torch.equal(s.model(s.ids, memory=neighbours()).logits, s.own)
    short = s.ids[:, : SIZE - 1]
    if family in tiny.RUNNING_STATE:  # two hosts of equal weights differ by one rounding where their memory lies
        assert_close(s.model(short, memory=neighbours()).logits, tiny.own(short, family), 1e-6)
    else:
        assert torch.equal(s.model(short, memory=neighbours()).logits, tiny.own(short, family))
    assert torch.equal(s.model(short, memory=neighbours()).logits, s.model.host(short).logits)


@families
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_changes_nothing(family, side):
    """Chunks are counted over real tokens, on whichever side the padding is."""
    s, memory = scene(family), neighbours()
    rows = [s.ids[0], s.ids[1, :13], s.ids[2, :11]]
    ids, keep = tiny.left_padded(rows)
    if side == "right":
        for i, row in enumerate(rows):
            ids[i], keep[i] = ids[i].roll(len(row) - LENGTH), keep[i].roll(len(row) - LENGTH)
    # A plain forward of a host with absolute positions needs them.
    positions = (keep.cumsum(1) - 1).clamp(min=0)
    takes_positions = "position_ids" in inspect.signature(s.model.host.forward).parameters
    how = {"position_ids": positions} if takes_positions else {}
    got = s.model(ids, attention_mask=keep, memory=memory, **how).logits
    for i, row in enumerate(rows):
        want = s.model(row[None], memory=memory[i]).logits[0]
        assert_close(got[i][keep[i].bool()], want, 1e-4)


@families
@torch.no_grad()
def test_a_function_finds_the_same_as_segments_tell(family):
    s, library = scene(family), Library(lambda total: SLOTS)
    out = s.model(s.ids, memory=library).logits
    assert len(library.asked) == 1 and library.asked[0].shape == (3 * ROWS, SIZE)
    result = Library(lambda total: SLOTS)(s.ids[:, : 3 * SIZE].reshape(-1, SIZE)).tokens
    segments = torch.arange(3).repeat_interleave(SLOTS).expand(ROWS, -1)
    memory = mmattn.Memory(result.reshape(ROWS, 3 * SLOTS, -1), segments=segments)
    assert torch.equal(s.model(s.ids, memory=memory).logits, out)
