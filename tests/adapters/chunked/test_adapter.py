"""Chunked cross-attention: a token reads the neighbours of the last chunk that has ended, in every way of calling."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

import mmattn
from mmattn.errors import ConditionError, NonFiniteError, ShapeError
from mmattn.inspect.doctor.run import memories_of
from tests import reference, tiny
from tests.adapters.chunked.chunks import (
    LENGTH,
    ROWS,
    SIZE,
    SLOTS,
    Library,
    attach,
    complete_chunks,
    neighbours,
    ragged,
    scene,
    slow,
)
from tests.tiny import assert_close, differs

FAMILIES = ["llama", "gemma3_text", "gpt2", "bloom", "mamba"]
families = pytest.mark.parametrize("family", FAMILIES)

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


@families
@torch.no_grad()
def test_where_there_are_no_neighbours_the_host_answers(family):
    s, memory = scene(family), neighbours()
    nothing = [mmattn.Memory(memory.tokens, segments=torch.full_like(memory.segments, chunk)) for chunk in (-1, 3)]
    for one in (*nothing, Library(lambda total: 0)):
        assert torch.equal(s.model(s.ids, memory=one).logits, s.own)
    short = s.ids[:, : SIZE - 1]
    assert torch.equal(s.model(short, memory=memory).logits, s.model.host(short).logits)


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
    second = s.model(s.ids[:, cut:], memory=memory, **tiny.going_on(first.past_key_values), use_cache=True)
    assert_close(torch.cat([first.logits, second.logits], 1), full)
    # The ids of the first piece are gone: a function cannot be asked for its chunks.
    first = s.model(s.ids[:, :cut], memory=Library(), use_cache=True)
    with pytest.raises(ConditionError, match="whole text"):
        s.model(s.ids[:, cut:], memory=Library(), **tiny.going_on(first.past_key_values))


@torch.no_grad()
def test_segments_that_are_edited_are_read_anew():
    """In its block and prepared; edits of vectors, masks and weights are in the contract."""
    model, ids, memory = attach(tiny.make("llama")), tiny.text(ROWS, LENGTH), neighbours()
    prepared = model.prepare(memory)
    with model.condition(memory):
        before = model(ids, memory=prepared).logits
        assert torch.equal(model.host(ids).logits, before)
        memory.segments.copy_((memory.segments + 1) % 3)
        fresh = mmattn.Memory(memory.tokens.clone(), segments=memory.segments.clone())
        after = model(ids, memory=fresh).logits
        assert not torch.equal(after, before)
        assert torch.equal(model(ids, memory=prepared).logits, after) and torch.equal(model.host(ids).logits, after)
        memory.segments.masked_fill_(memory.segments == 1, 5)
        assert not torch.equal(model.host(ids).logits, after)


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
    assert [tuple(chunks.shape) for chunks in library.asked] == [(3 * ROWS, SIZE), (ROWS, SIZE)]
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
def test_what_a_function_retrieves_is_what_the_doctor_looks_at():
    """Invariant 193. Each row has the neighbours of its chunks, rows without a whole chunk among them."""
    model, ids = attach(tiny.make("llama")), tiny.text(ROWS, LENGTH)
    mask = torch.ones_like(ids)
    mask[0, : LENGTH - SIZE + 1], mask[1, :SIZE] = 0, 0
    batch = {"input_ids": ids, "attention_mask": mask, "memory": Library()}
    memory = memories_of(model, batch)["default"]
    assert memory.lengths[0] == 0 < memory.lengths[1] != memory.lengths[2]
    assert_close(model(**batch | {"memory": memory}).logits, model(**batch).logits)


# Mistakes


def test_memories_that_do_not_fit():
    model, ids = attach(tiny.make("llama")), tiny.text(ROWS, LENGTH)
    with pytest.raises(ShapeError, match="segments"):
        model(ids, memory=tiny.memory(ROWS))
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


NEW = 13  # two chunks are completed on the way
generate = functools.partial(tiny.written, new=NEW)


@functools.cache
def written_alone(family: str) -> SimpleNamespace:
    """A host with an open chunked adapter, and the greedy continuation of each row made alone and without a cache."""
    s = SimpleNamespace(model=attach(tiny.make(family)), ids=tiny.text(ROWS, LENGTH))
    rows = [generate(s.model, s.ids[i : i + 1], memory=Library(), use_cache=False) for i in range(ROWS)]
    s.rows = torch.cat(rows)
    s.own = generate(tiny.make(family), s.ids)
    return s


@families
def test_with_a_cache_as_without(family):
    """Keys and values of a chunk are computed once."""
    s, library = written_alone(family), Library()
    projections = [s.model.adapters["default"].attention(layer).kv_proj.k_proj for layer in (0, 2)]
    with tiny.counting(*projections) as ran:
        got = generate(s.model, s.ids, memory=library)
    assert sum(len(chunks) for (chunks,) in ran) == 2 * len(library.chunks) and len(library.chunks) > 3 * ROWS
    assert torch.equal(got, s.rows) and not torch.equal(got, s.own)
    # Each chunk was asked for once, as soon as it was complete: all those of the prompt, then those that followed.
    text = torch.cat([s.ids, got], 1)
    assert set(library.chunks) == complete_chunks(text[:, :-1]) and len(set(library.chunks)) == len(library.chunks)
    assert len(library.asked) == 3 and len(library.asked[0]) == 3 * ROWS
    for number, chunks in enumerate(library.asked[1:], 3):
        assert set(map(tuple, chunks.tolist())) == complete_chunks(text[:, number * SIZE : (number + 1) * SIZE])
    again = Library()
    assert torch.equal(generate(s.model, s.ids, memory=again, use_cache=False), s.rows)
    assert again.chunks == library.chunks


@families
def test_beams_read_what_their_own_words_found(family):
    s, how = written_alone(family), {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True}
    how |= {"output_scores": True, "max_new_tokens": NEW, "do_sample": False}
    library = Library()
    with torch.no_grad():
        out = s.model.generate(s.ids, memory=library, **how)
        slow = s.model.generate(s.ids, memory=Library(), use_cache=False, **how)
        rows = [s.model.generate(s.ids[i : i + 1], memory=Library(), **how) for i in range(ROWS)]
        text = out.sequences
        full = s.model(text, memory=Library()).logits[:, LENGTH - 1 : -1].log_softmax(-1)
    assert torch.equal(text, slow.sequences)
    assert torch.equal(text, torch.cat([row.sequences for row in rows]))
    assert_close(out.sequences_scores, torch.cat([row.sequences_scores for row in rows]))
    # The score of a beam is what one pass over its text gives: no beam read what another one found.
    said = full.gather(-1, text[:, LENGTH:, None])[..., 0].mean(1)
    assert_close(out.sequences_scores, said)
    assert complete_chunks(text[:, :-1]) <= set(library.chunks) and len(set(library.chunks)) == len(library.chunks)
    assert len(library.chunks) > 5 * ROWS, "the beams were never of different minds"


@families
def test_left_padding_changes_nothing(family):
    """Rows complete their chunks at different steps."""
    s, library = written_alone(family), Library()
    rows = [tiny.text(1, length, seed=length)[0] for length in (3, 17, 9)]
    ids, keep = tiny.left_padded(rows)
    got = generate(s.model, ids, attention_mask=keep, memory=library)
    want = [generate(s.model, row[None], memory=Library()) for row in rows]
    assert torch.equal(got, torch.cat(want))
    texts = [torch.cat([row, new])[None] for row, new in zip(rows, got, strict=True)]
    assert set(library.chunks) == set().union(*(complete_chunks(text[:, :-1]) for text in texts))
    assert len(set(library.chunks)) == len(library.chunks) and len(library.asked) > 4


CACHES = {"static": {"cache_implementation": "static"}, "chunked": {"prefill_chunk_size": 4}}
DRAFTS = {"assistant": {"assistant": 0}, "prompt lookup": tiny.PROMPT_LOOKUP}


@pytest.mark.parametrize(("family", "how"), tiny.cache_settings(FAMILIES, CACHES))
def test_caches_agree(family, how):
    s, library = written_alone(family), Library()
    assert torch.equal(generate(s.model, s.ids, memory=library, **how), s.rows)
    assert set(library.chunks) == complete_chunks(torch.cat([s.ids, s.rows], 1)[:, :-1])
    assert len(set(library.chunks)) == len(library.chunks)


@pytest.mark.parametrize(("family", "how"), tiny.cache_settings(FAMILIES, DRAFTS))
def test_drafts_do_not_change_the_answer(family, how):
    s, library = written_alone(family), Library()
    if "assistant" in how:
        how = {"assistant_model": tiny.make(family)}
    got = generate(s.model, s.ids[:1], memory=library, **how)
    assert torch.equal(got, s.rows[:1])
    # A draft that is refused may have completed a chunk, which is then asked for in vain.
    assert complete_chunks(torch.cat([s.ids[:1], got], 1)[:, :-1]) <= set(library.chunks)
