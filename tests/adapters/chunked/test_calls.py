"""Chunked cross-attention in every way of calling: in pieces, prepared, checkpointed, beside others; and mistakes."""

from __future__ import annotations

import pytest
import torch

import mmattn
from mmattn.errors import ConditionError, NonFiniteError, ShapeError
from mmattn.inspect.doctor.run import memories_of
from tests import tiny
from tests.adapters.chunked.chunks import LENGTH, ROWS, SIZE, Library, attach, neighbours, ragged, scene
from tests.tiny import assert_close


@pytest.mark.parametrize("use_reentrant", tiny.ways_of_checkpointing())
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
        result = {name: parameter.grad for name, parameter in model.adapters.named_parameters()}
        gradients.append(result | {f"memory {i}": one.tokens.grad for i, one in enumerate(memories)})
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
    second = s.model(s.ids[:, cut:], memory=memory, **tiny.going_on(first.past_key_values), use_cache=True)
    assert_close(torch.cat([first.logits, second.logits], 1), full)
    # The ids of the first piece are gone: a function cannot be asked for its chunks.
    first = s.model(s.ids[:, :cut], memory=Library(), use_cache=True)
    with pytest.raises(ConditionError, match="whole text"):
        s.model(s.ids[:, cut:], memory=Library(), **tiny.going_on(first.past_key_values))


def test_a_prepared_memory_is_never_stale():
    model, ids, memory = attach(tiny.make("llama")), tiny.text(ROWS, LENGTH), neighbours()
    prepared = model.prepare(memory)
    outputs = []

    def check():
        with torch.no_grad():
            got = model(ids, memory=prepared).logits
            fresh = mmattn.Memory(memory.tokens.clone(), segments=memory.segments.clone())
            assert torch.equal(got, model(ids, memory=fresh).logits)
        assert all(not torch.equal(got, before) for before in outputs)
        outputs.append(got)

    check()
    memory.tokens.mul_(-1.5)
    check()
    memory.segments.copy_((memory.segments + 1) % 3)
    check()
    model(ids, labels=ids, memory=prepared).loss.backward()
    torch.optim.AdamW(model.adapters.parameters(), lr=0.1).step()
    check()
    with torch.no_grad(), model.condition(memory):
        assert torch.equal(model.host(ids).logits, outputs[-1])
        memory.segments.masked_fill_(memory.segments == 1, 5)
        assert not torch.equal(model.host(ids).logits, outputs[-1])
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
