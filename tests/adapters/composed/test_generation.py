"""Two language models that write one text: in every way of generating as in one pass over what was written."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import peft
import pytest
import torch

import mmattn
from mmattn.core.positions import token_positions
from tests import tiny
from tests.adapters.composed.composed_hosts import LENGTH, ROWS, along, attach, augmenting
from tests.tiny import assert_close, differs

NEW = 6

families = pytest.mark.parametrize("family", tiny.FAMILIES)


@functools.cache
def scene(family: str) -> SimpleNamespace:
    """An anchor with an open composed adapter, and the greedy continuation of each row alone and without a cache."""
    s = SimpleNamespace(model=attach(tiny.make(family)), ids=tiny.text(ROWS, LENGTH))
    s.rows = torch.cat([generate(s.model, s.ids[i : i + 1], memory=along(), use_cache=False) for i in range(ROWS)])
    s.own = generate(tiny.make(family), s.ids)
    return s


@torch.no_grad()
def generate(model, ids, **kwargs):
    """New tokens only (b, NEW)."""
    out = model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False} | kwargs)
    return out[:, ids.shape[1] :]


def lengths_read(lm) -> tuple[list[tuple[int, int]], object]:
    """The sizes (b, l) of what `lm` reads from now on, and the hook that notes them."""
    read: list[tuple[int, int]] = []
    hook = lm.model.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return read, hook


@families
@torch.no_grad()
def test_token_by_token_equals_one_pass(family):
    s = scene(family)
    how = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = s.model.generate(s.ids, memory=along(), **how)
    assert torch.equal(out.sequences[:, LENGTH:], s.rows) and not torch.equal(s.rows, s.own)
    full = s.model(out.sequences, memory=along()).logits[:, LENGTH - 1 : -1]
    assert_close(torch.stack(out.logits, 1), full)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gemma3_text", "mistral", "mamba"])
def test_the_other_model_may_be_of_any_family(family):
    """Also one with windows shorter than the text, or with a running state that cannot be taken back."""
    lm, s = along(family), scene("llama")
    how = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": NEW, "do_sample": False}
    out = s.model.generate(s.ids, memory=lm, **how)
    assert_close(torch.stack(out.logits, 1), s.model(out.sequences, memory=lm).logits[:, LENGTH - 1 : -1])
    beams = generate(s.model, s.ids, memory=lm, num_beams=3)
    assert torch.equal(beams, generate(s.model, s.ids, memory=lm, num_beams=3, use_cache=False))


@torch.no_grad()
def test_each_token_is_read_and_projected_once():
    s, lm, projected = scene("llama"), copy.deepcopy(augmenting()), []
    memory = mmattn.AugmentingModel(lm)
    read, _ = lengths_read(lm)
    hook = (
        s.model.adapters["default"]
        .attention(2)
        .kv_proj.k_proj.register_forward_hook(lambda _, args, out: projected.append(args[0].shape[:2].numel()))
    )
    generate(s.model, s.ids, memory=memory)
    hook.remove()
    assert read == [(ROWS, LENGTH)] + [(ROWS, 1)] * (NEW - 1)
    assert sum(projected) == ROWS * (LENGTH + NEW - 1)
    read.clear()
    beams = generate(s.model, s.ids, memory=memory, num_beams=2)
    assert read == [(2 * ROWS, LENGTH)] + [(2 * ROWS, 1)] * (NEW - 1)
    # What was read is forgotten with the call.
    read.clear()
    assert torch.equal(generate(s.model, s.ids, memory=memory, num_beams=2), beams)
    assert read[0] == (2 * ROWS, LENGTH)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("helper", ["assistant", "prompt lookup"])
def test_drafts_do_not_change_the_answer(family, helper):
    s = scene(family)
    how = {"assistant": {"assistant_model": tiny.make(family)}, "prompt lookup": tiny.PROMPT_LOOKUP}
    assert torch.equal(generate(s.model, s.ids[:1], memory=along(), **how[helper]), s.rows[:1])


@torch.no_grad()
def test_a_refused_draft_is_unread():
    """What a draft added is cut off again: the other model never goes on from words that were taken back."""
    s, lm = scene("llama"), copy.deepcopy(augmenting())
    memory = mmattn.AugmentingModel(lm)
    read, _ = lengths_read(lm)
    got = generate(s.model, s.ids[:1], memory=memory, assistant_model=tiny.make("llama"))
    assert torch.equal(got, s.rows[:1])
    assert all(length < LENGTH + NEW for _, length in read[1:]), "read anew"


@torch.no_grad()
def test_the_next_turn_reads_what_it_must():
    """A text that goes on from the host's cache, in a call of its own."""
    s = scene("llama")
    how = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    first = s.model.generate(s.ids, memory=along(), **how)
    text = torch.cat([first.sequences, tiny.text(ROWS, 5, seed=5)], 1)
    want = generate(s.model, text, memory=along())
    assert torch.equal(generate(s.model, text, memory=along(), **tiny.going_on(first.past_key_values)), want)


def test_options_of_the_attention_hold_over_a_growing_memory():
    for options in ({"null_slot": True, "length_norm": 5.0}, {"qk_norm": True, "num_kv_heads": 1}, {"rotary": False}):
        model, ids = attach(tiny.make("llama"), **options), tiny.text(ROWS, LENGTH)
        how = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        with torch.no_grad():
            out = model.generate(ids, memory=along(), **how)
            full = model(out.sequences, memory=along()).logits[:, LENGTH - 1 : -1]
        assert_close(torch.stack(out.logits, 1), full)
        assert differs(full, tiny.own(out.sequences)[:, LENGTH - 1 : -1])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # by peft
@torch.no_grad()
def test_an_augmenting_model_with_a_lora_reads_padded_rows_as_alone():
    """Invariant 196: it is given the positions of the real tokens, as one without a LoRA is."""
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    other = peft.get_peft_model(tiny.make("gpt2", 1), lora).eval()
    settings = mmattn.ComposedAdapter(memory_dim=32, layers=(0, 2), augmenting_layers=(0, 2), num_heads=2, head_dim=8)
    model = tiny.open_gates(mmattn.attach(tiny.make("llama"), settings))
    rows = [tiny.text(1, length, seed=length)[0] for length in (3, 7)]
    ids, mask = tiny.left_padded(rows)
    memory = mmattn.AugmentingModel(other)
    places = token_positions(mask.bool())
    found = model(input_ids=ids, attention_mask=mask, position_ids=places, memory=memory)
    alone = model(input_ids=rows[0][None], memory=memory).logits[0]
    tiny.assert_close(found.logits[0, -3:], alone)
