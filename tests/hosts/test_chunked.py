"""Chunked cross-attention: each token reads the neighbours of the last chunk that has ended, and of no other."""

from __future__ import annotations

import copy
import functools
import inspect
from types import SimpleNamespace

import pytest
import torch

import mmattn
from mmattn.errors import ConditionError, NonFiniteError, ShapeError
from tests import reference, tiny
from tests.chunks import LENGTH, ROWS, SIZE, SLOTS, Library, attach, neighbours, ragged, slow
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


@functools.cache
def scene(family: str) -> SimpleNamespace:
    """A host with an open chunked adapter and what its untouched twin says, for tests that change neither."""
    ids = tiny.text(ROWS, LENGTH)
    return SimpleNamespace(model=attach(tiny.make(family)), ids=ids, own=tiny.own(ids, family))


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


@torch.no_grad()
def test_who_sees_what_is_the_chunk_mask():
    """Behind the last layer a token's answer changes exactly where `masks.chunk` lets it see the slot that changed."""
    model = attach(tiny.make("llama"), layers=(tiny.LAYERS - 1,))
    ids, memory = tiny.text(1, LENGTH), neighbours(1)
    order = memory.segments[0].argsort(stable=True)
    memory = mmattn.Memory(memory.tokens[:, order], segments=memory.segments[:, order])
    allowed = mmattn.masks.chunk(LENGTH, SIZE, SLOTS).tensor
    out = model(ids, memory=memory).logits
    assert allowed.shape == (LENGTH, memory.length) and 0 < allowed.sum() < allowed.numel()
    for slot in range(memory.length):
        other = mmattn.Memory(memory.tokens.clone(), segments=memory.segments)
        other.tokens[:, slot] *= -1
        changed = (model(ids, memory=other).logits != out).any(-1)[0]
        assert torch.equal(changed, allowed[:, slot]), slot


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
def test_a_fresh_adapter_changes_no_bit(family):
    s = scene(family)
    model, twin = attach(tiny.make(family), opened=False), tiny.make(family)
    for memory in (neighbours(), Library()):
        out, want = model(s.ids, labels=s.ids, memory=memory), twin(s.ids, labels=s.ids)
        assert type(out) is type(want)
        assert torch.equal(out.logits, want.logits) and torch.equal(out.loss, want.loss)


@families
@torch.no_grad()
def test_rows_are_strangers(family):
    s, memory = scene(family), neighbours()
    out = s.model(s.ids, memory=memory).logits
    assert differs(out, s.own)
    assert_close(out, torch.cat([s.model(s.ids[i : i + 1], memory=memory[i]).logits for i in range(ROWS)]))
    order = torch.tensor([2, 0, 1])
    assert_close(s.model(s.ids[order], memory=memory[order]).logits, out[order])
    assert differs(s.model(s.ids, memory=memory[order]).logits, out)


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
    assert torch.equal(s.model(s.ids, memory=neighbours(), strength=0.0).logits, s.own)
    with s.model.disabled():
        assert torch.equal(s.model(s.ids, memory=neighbours()).logits, s.own)
    short = s.ids[:, : SIZE - 1]
    assert torch.equal(s.model(short, memory=neighbours()).logits, tiny.own(short, family))


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
    # A plain forward of a host with absolute positions must be told them.
    positions = (keep.cumsum(1) - 1).clamp(min=0)
    told = "position_ids" in inspect.signature(s.model.host.forward).parameters
    how = {"position_ids": positions} if told else {}
    got = s.model(ids, attention_mask=keep, memory=memory, **how).logits
    for i, row in enumerate(rows):
        want = s.model(row[None], memory=memory[i]).logits[0]
        assert_close(got[i][keep[i].bool()], want, 1e-4)


@families
def test_loss_teaches_every_adapter_weight_and_no_host_weight(family):
    model, ids = attach(tiny.make(family)).train(), tiny.text(ROWS, LENGTH)
    with torch.no_grad():
        model.eval()(ids, memory=ragged())
    out = model.train()(ids, labels=ids, memory=ragged())
    assert torch.isfinite(out.loss)
    out.loss.backward()
    for name, parameter in model.adapters.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, f"{name} never learns"
    for name, parameter in model.host.named_parameters():
        assert parameter.grad is None and not parameter.requires_grad, name


@families
@torch.no_grad()
def test_a_function_finds_the_same_as_segments_tell(family):
    s, library = scene(family), Library(lambda total: SLOTS)
    out = s.model(s.ids, memory=library).logits
    assert len(library.asked) == 1 and library.asked[0].shape == (3 * ROWS, SIZE)
    found = Library(lambda total: SLOTS)(s.ids[:, : 3 * SIZE].reshape(-1, SIZE)).tokens
    segments = torch.arange(3).repeat_interleave(SLOTS).expand(ROWS, -1)
    memory = mmattn.Memory(found.reshape(ROWS, 3 * SLOTS, -1), segments=segments)
    assert torch.equal(s.model(s.ids, memory=memory).logits, out)


@families
@torch.no_grad()
def test_a_saved_adapter_gives_the_same_logits(family, tmp_path):
    s, memory = scene(family), ragged()
    s.model.save_adapter(tmp_path / "adapter")
    other = mmattn.load(tiny.make(family), tmp_path / "adapter")
    assert other.adapters["default"].config == s.model.adapters["default"].config
    assert torch.equal(other(s.ids, memory=memory).logits, s.model(s.ids, memory=memory).logits)


@families
@torch.no_grad()
def test_detach_leaves_no_trace(family):
    lm, ids = tiny.make(family), tiny.text(ROWS, LENGTH)
    before = {name: (set(part.__dict__), len(part._forward_hooks)) for name, part in lm.named_modules()}
    model = attach(lm)
    model.generate(ids, memory=Library(), max_new_tokens=2, do_sample=False)
    other = copy.deepcopy(model)
    assert torch.equal(other(ids, memory=neighbours()).logits, model(ids, memory=neighbours()).logits)
    assert model.detach() is lm
    assert {name: (set(part.__dict__), len(part._forward_hooks)) for name, part in lm.named_modules()} == before
    assert torch.equal(lm(ids).logits, tiny.own(ids, family))
    library = Library()
    other.generate(ids, memory=library, max_new_tokens=SIZE, do_sample=False)
    assert len(library.asked) == 2


# Calls


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "plain"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_checkpointing_gives_the_same_gradients(family, use_reentrant):
    ids, gradients = tiny.text(ROWS, LENGTH), []
    for checkpointed in (False, True):
        model = attach(tiny.make(family)).train()
        if checkpointed:
            tiny.checkpoint(model.host, use_reentrant)
        # Two forwards with different neighbours before one backward.
        memories = [mmattn.Memory(one.tokens.requires_grad_(), segments=one.segments) for one in map_seeds((1, 2))]
        losses = [model(ids, labels=ids, memory=one, use_cache=False).loss for one in memories]
        (losses[0] + 2 * losses[1]).backward()
        found = {name: parameter.grad for name, parameter in model.adapters.named_parameters()}
        gradients.append(found | {f"memory {i}": one.tokens.grad for i, one in enumerate(memories)})
    for name, want in gradients[0].items():
        assert want.abs().max() > 0, name
        assert_close(gradients[1][name], want)


def map_seeds(seeds: tuple[int, ...]) -> list[mmattn.Memory]:
    return [neighbours(seed=seed) for seed in seeds]


def test_gradients_reach_what_finds_the_neighbours():
    model, ids = attach(tiny.make("llama")), tiny.text(ROWS, LENGTH)
    encoder = torch.nn.Embedding(tiny.VOCAB, tiny.MEMORY_DIM)
    model(ids, labels=ids, memory=lambda chunks: encoder(chunks)).loss.backward()
    read = ids[:, : 3 * SIZE].unique()
    assert torch.isfinite(encoder.weight.grad).all()
    assert torch.equal(encoder.weight.grad.any(-1).nonzero()[:, 0], read)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "bloom"])
@pytest.mark.parametrize("cut", [4, 7, 10])
@torch.no_grad()
def test_a_text_in_two_pieces_is_the_text(family, cut):
    s, memory = scene(family), ragged()
    full = s.model(s.ids, memory=memory).logits
    first = s.model(s.ids[:, :cut], memory=memory, use_cache=True)
    second = s.model(s.ids[:, cut:], memory=memory, past_key_values=first.past_key_values, use_cache=True)
    assert_close(torch.cat([first.logits, second.logits], 1), full)
    # The ids of the first piece are gone: a function cannot be asked for its chunks.
    first = s.model(s.ids[:, :cut], memory=Library(), use_cache=True)
    with pytest.raises(ConditionError, match="whole text"):
        s.model(s.ids[:, cut:], memory=Library(), past_key_values=first.past_key_values)


@torch.no_grad()
def test_strength_scales_from_nothing():
    s, memory = scene("llama"), neighbours()
    full = s.model(s.ids, memory=memory).logits
    assert torch.equal(s.model(s.ids, memory=memory, strength=0.0).logits, s.own)
    assert torch.equal(s.model(s.ids, memory=memory, strength=1.0).logits, full)
    some = s.model(s.ids, memory=memory, strength=0.3).logits
    assert torch.equal(some[:, : SIZE - 1], s.own[:, : SIZE - 1])
    assert differs(some[:, SIZE - 1 :], s.own[:, SIZE - 1 :]) and differs(some, full)
    with s.model.condition(memory, strength=0.3):
        assert torch.equal(s.model.host(s.ids).logits, some)


@torch.no_grad()
def test_embeddings_instead_of_ids():
    s, memory = scene("llama"), neighbours()
    embeddings = s.model.host.get_input_embeddings()(s.ids)
    assert_close(s.model(inputs_embeds=embeddings, memory=memory).logits, s.model(s.ids, memory=memory).logits)
    with pytest.raises(ConditionError, match="input_ids"):
        s.model(inputs_embeds=embeddings, memory=Library())


def test_a_prepared_memory_is_never_stale():
    model, ids, memory = attach(tiny.make("llama")), tiny.text(ROWS, LENGTH), neighbours()
    prepared = model.prepare(memory)
    seen = []

    def check():
        with torch.no_grad():
            got = model(ids, memory=prepared).logits
            fresh = mmattn.Memory(memory.tokens.clone(), segments=memory.segments.clone())
            assert torch.equal(got, model(ids, memory=fresh).logits)
        assert all(not torch.equal(got, before) for before in seen)
        seen.append(got)

    check()
    memory.tokens.mul_(-1.5)
    check()
    memory.segments.copy_((memory.segments + 1) % 3)
    check()
    model(ids, labels=ids, memory=prepared).loss.backward()
    torch.optim.AdamW(model.adapters.parameters(), lr=0.1).step()
    check()
    with torch.no_grad(), model.condition(memory):
        assert torch.equal(model.host(ids).logits, seen[-1])
        memory.segments.masked_fill_(memory.segments == 1, 5)
        assert not torch.equal(model.host(ids).logits, seen[-1])
        assert torch.equal(model.host(ids).logits, model(ids, memory=memory).logits)


@torch.no_grad()
def test_a_prepared_function_is_asked_once():
    model, ids, library = attach(tiny.make("llama")), tiny.text(ROWS, LENGTH), Library()
    prepared = model.prepare(library)
    first = model(ids, memory=prepared).logits
    with torch.inference_mode():
        assert torch.equal(model(ids, memory=prepared).logits, first)
    assert len(library.asked) == 1
    # What an inference-mode call kept serves one that trains something else.
    model.adapters.requires_grad_(False)
    with torch.inference_mode():
        model(ids[:2], memory=prepared)
    embeddings = model.host.get_input_embeddings()
    with torch.enable_grad():
        embeddings.weight.requires_grad_()
        model(ids[:2], labels=ids[:2], memory=prepared).loss.backward()
    assert embeddings.weight.grad.any()
    longer = torch.cat([ids, tiny.text(ROWS, 4, seed=1)], 1)
    model(longer, memory=prepared)
    assert [tuple(asked.shape) for asked in library.asked] == [(3 * ROWS, SIZE), (ROWS, SIZE)]
    assert torch.equal(library.asked[1], longer[:, 3 * SIZE : 4 * SIZE])
    # Training reads what came in several batches, too.
    gradients = []
    for memory in (prepared, Library()):
        model.adapters.requires_grad_().zero_grad()
        with torch.enable_grad():
            model(longer, labels=longer, memory=memory).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.adapters.parameters()])
    for got, want in zip(*gradients, strict=True):
        assert want.any()
        assert_close(got, want)


@torch.no_grad()
def test_beside_a_gated_adapter(tmp_path):
    ids, own = tiny.text(ROWS, LENGTH), tiny.own(tiny.text(ROWS, LENGTH))
    model = attach(tiny.make("llama"), name="shelf")
    model.add_adapter("eye", mmattn.GatedAdapter(memory_dim=11, layers=(0, 1), num_heads=2, head_dim=8))
    tiny.open_gates(model)
    picture, library = tiny.memory(ROWS, e=11), Library()
    both = model(ids, memory={"eye": picture, "shelf": library}).logits
    eye, shelf = model(ids, memory={"eye": picture}).logits, model(ids, memory={"shelf": library}).logits
    assert differs(both, eye) and differs(both, shelf) and differs(eye, own) and differs(shelf, own)
    asked = len(library.asked)
    with model.disabled("shelf"):
        assert torch.equal(model(ids, memory={"eye": picture, "shelf": library}).logits, eye)
    model.set_adapter("eye")
    assert torch.equal(model(ids, memory={"eye": picture, "shelf": library}).logits, eye)
    assert len(library.asked) == asked, "nobody was going to read it"
    model.set_adapter(["shelf", "eye"])
    with model.disabled("eye"):
        assert torch.equal(model(ids, memory={"eye": picture, "shelf": library}).logits, shelf)
    assert torch.equal(both[:, : SIZE - 1], eye[:, : SIZE - 1])
    with pytest.raises(ShapeError, match="ChunkedAdapter"):
        model(ids, memory={"eye": library})
    model.delete_adapter("shelf")
    assert "prepare_inputs_for_generation" not in model.host.__dict__


@torch.no_grad()
def test_a_bf16_host_and_autocast():
    ids, memory = tiny.text(ROWS, LENGTH), neighbours()
    want = scene("llama").model(ids, memory=memory).logits
    model = attach(tiny.make("llama").to(torch.bfloat16))
    got = model(ids, memory=memory).logits
    assert got.dtype == torch.bfloat16
    assert_close(got.float(), want, 0.15)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(scene("llama").model(ids, memory=memory).logits.float(), want, 0.15)


@torch.no_grad()
def test_a_resampler_reads_each_chunk_by_itself():
    model = attach(tiny.make("llama"), resampler=mmattn.Resampler(num_latents=3, depth=2, num_heads=2))
    ids, memory = tiny.text(ROWS, LENGTH), ragged()
    own, out = tiny.own(ids), model(ids, memory=memory).logits
    assert torch.equal(out[2], own[2]) and torch.equal(out[1, : 2 * SIZE - 1], own[1, : 2 * SIZE - 1])
    assert differs(out[:1, SIZE - 1 :], own[:1, SIZE - 1 :])
    other = mmattn.Memory(memory.tokens.clone(), memory.mask, memory.segments)
    other.tokens[memory.segments == 1] *= -1
    changed = model(ids, memory=other).logits
    assert torch.equal(changed[:, : 2 * SIZE - 1], out[:, : 2 * SIZE - 1])
    assert differs(changed[:2, 2 * SIZE - 1 :], out[:2, 2 * SIZE - 1 :])


# Mistakes


def test_memories_that_do_not_fit():
    model, ids = attach(tiny.make("llama")), tiny.text(ROWS, LENGTH)
    with pytest.raises(ShapeError, match="segments"):
        model(ids, memory=tiny.memory(ROWS))
    with pytest.raises(ShapeError, match="2 .*3|3 .*2"):
        model(ids, memory=neighbours(2))
    with pytest.raises(ShapeError, match="11.*13|13.*11"):
        model(ids, memory=mmattn.Memory(torch.randn(ROWS, 7, 11), segments=torch.zeros(ROWS, 7, dtype=torch.long)))
    with pytest.raises(ShapeError, match="9 chunks.*2 rows"):
        model(ids, memory=lambda chunks: torch.randn(2, 7, tiny.MEMORY_DIM))
    with pytest.raises(ShapeError, match="11.*13|13.*11"):
        model(ids, memory=lambda chunks: torch.randn(len(chunks), 7, 11))
    with pytest.raises(ShapeError, match="NoneType"):
        model(ids, memory=lambda chunks: None)
    with pytest.raises(NonFiniteError, match="row 0"):
        model(ids, memory=lambda chunks: torch.full((len(chunks), 7, tiny.MEMORY_DIM), float("nan")))
    for mask in (torch.ones(ROWS, 1, LENGTH, LENGTH), torch.ones(ROWS, LENGTH + 2)):
        with pytest.raises(ConditionError, match="attention_mask"):
            model(ids, attention_mask=mask, memory=neighbours())
    with pytest.raises(ConditionError, match="part of the host"), model.condition(neighbours()):
        model.host.model(ids)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, tiny.own(ids))
