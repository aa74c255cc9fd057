"""What a language host must survive: memories that do not fit, other dtypes, empty batches, padding, guidance."""

from __future__ import annotations

import logging

import pytest
import torch

import mmattn
from mmattn.errors import NonFiniteError, ShapeError
from tests import tiny
from tests.tiny import assert_close, differs, own

ROWS, LENGTH = 3, 7


def spoilt(value, *place):
    """A memory in which a number became this after it was made."""
    memory = tiny.memory(ROWS)
    memory.tokens[place] = value
    return memory


@pytest.mark.parametrize(
    ("rows", "memory", "error", "says"),
    [
        (3, lambda: mmattn.Memory(spoilt(torch.nan, 1, 2, 3).tokens), NonFiniteError, "row 1"),
        (3, lambda: spoilt(torch.inf, 2, 0, 0), NonFiniteError, "row 2"),
        (3, lambda: tiny.memory(2), ShapeError, "2 .*3|3 .*2"),
        (3, lambda: tiny.memory(6), ShapeError, "6"),
        (4, lambda: tiny.memory(1), ShapeError, r"memory\[\[0\] \* 4\]"),
        # Rows that divide the text are the beams of generate, never a plain forward.
        (4, lambda: tiny.memory(2), ShapeError, "2 .*4|4 .*2"),
    ],
)
@torch.no_grad()
def test_memories_that_do_not_fit_are_refused_before_the_host_runs(model, rows, memory, error, says):
    """Invariants 22, 50."""
    ids = tiny.text(rows)
    for call in (
        lambda: model(ids, memory=memory()),
        lambda: model.generate(ids, memory=memory(), max_new_tokens=2),
        lambda: model.generate(ids, memory=memory(), max_new_tokens=2, num_beams=2),
    ):
        with pytest.raises(error, match=says):
            call()
    if error is NonFiniteError:
        with pytest.raises(error, match=says), model.condition(memory()):
            pytest.fail("the block was entered")
    assert torch.equal(model(ids).logits, own(ids))


@pytest.mark.parametrize("memory_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("host_dtype", [torch.float32, torch.float16, torch.bfloat16])
@torch.no_grad()
def test_the_host_keeps_its_dtype_whatever_the_memory_has(ids, host_dtype, memory_dtype):
    """Invariants 18, 19."""
    model, memory = tiny.attach(tiny.make("llama").to(host_dtype)), tiny.memory(ROWS)
    out = model(ids, memory=memory.to(memory_dtype)).logits
    assert out.dtype == host_dtype
    assert_close(out.float(), model(ids, memory=memory).logits.float(), 0.15)
    assert differs(out.float(), model(ids).logits.float())


@torch.no_grad()
def test_autocast_leaves_the_residual_stream_alone(model, ids):
    """Invariant 19."""
    seen = []
    tiny.decoder_layers(model.host)[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    want = model(ids, memory=tiny.memory(ROWS)).logits
    with torch.autocast("cpu", torch.bfloat16):
        model.host(ids)
        got = model(ids, memory=tiny.memory(ROWS)).logits
    assert seen[1] == seen[2], "the adapter changed the dtype of the host's states"
    assert_close(got.float(), want, 0.15)


def test_training_under_autocast(model, ids):
    """Invariant 19."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids, memory=tiny.memory(ROWS)).loss
    loss.backward()
    for name, parameter in model.adapters.named_parameters():
        assert parameter.grad.dtype == parameter.dtype == torch.float32, name
        assert torch.isfinite(parameter.grad).all() and parameter.grad.abs().max() > 0, name


@torch.no_grad()
def test_dropout_only_in_training(ids):
    """Invariant 20."""
    model, memory = tiny.attach(tiny.make("llama"), dropout=0.3), tiny.memory(ROWS)
    first = model(ids, memory=memory).logits
    assert torch.equal(first, model(ids, memory=memory).logits)
    model.train()
    assert differs(model(ids, memory=memory).logits, first)
    assert differs(model(ids, memory=memory).logits, model(ids, memory=memory).logits)
    model.eval()
    assert torch.equal(model(ids, memory=memory).logits, first)


# GPT-J itself takes no empty batch since transformers 5.24.
@pytest.mark.parametrize("family", [*([] if tiny.IS_5_24 else ["gptj"]), "gpt_neo", "falcon", "mamba"])
@torch.no_grad()
def test_an_empty_batch_has_the_hosts_shape(family, ids):
    """Invariant 11."""
    model = tiny.attach(tiny.make(family))
    want = tiny.make(family)(ids[:0]).logits
    assert want.shape == (0, LENGTH, tiny.VOCAB)
    assert torch.equal(model(ids[:0], memory=tiny.memory(ROWS)[:0]).logits, want)


def test_right_padding_gets_the_hosts_own_warning(model):
    """Invariant 55."""
    ids, keep = tiny.left_padded([tiny.text(1, 3)[0], tiny.text(1, 7)[0]])
    ids, keep = ids.flip(1), keep.flip(1)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("transformers.generation.utils")
    logger.addHandler(handler)
    try:
        model.generate(ids, attention_mask=keep, memory=tiny.memory(2), max_new_tokens=2)
    finally:
        logger.removeHandler(handler)
    assert any("right-padding" in record.getMessage() for record in records)


@torch.no_grad()
def test_absolute_positions_of_a_left_padded_forward():
    """Invariant 56."""
    model, rows, memory = tiny.attach(tiny.make("gpt2")), [tiny.text(1, n)[0] for n in (3, 7)], tiny.memory(2)
    ids, keep = tiny.left_padded(rows)
    positions = (keep.cumsum(1) - 1).clamp_min(0)
    got = model(ids, attention_mask=keep, position_ids=positions, memory=memory).logits
    for i, row in enumerate(rows):
        assert_close(got[i, -len(row) :], model(row[None], memory=memory[i]).logits[0])


@torch.no_grad()
def test_both_passes_of_guidance_see_the_memory(model):
    """Invariant 58: classifier-free guidance compares two texts, so the memory is the same on both sides."""
    ids, memory = tiny.text(1), tiny.memory(1)
    out = model.generate(
        ids, memory=memory, guidance_scale=1.7, max_new_tokens=1, return_dict_in_generate=True, output_scores=True
    )
    with_text = model(ids, memory=memory).logits[:, -1].log_softmax(-1)
    without = model(ids[:, -1:], memory=memory).logits[:, -1].log_softmax(-1)
    assert_close(out.scores[0], without + 1.7 * (with_text - without))
