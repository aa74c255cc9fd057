"""The composed adapter: two language models of one text, causal, frozen, each token read once."""

from __future__ import annotations

import copy
import functools

import peft
import pytest
import torch
from transformers import BertConfig, BertModel

import mmattn
from mmattn.core.positions import token_positions
from mmattn.errors import AttachError, ConditionError, ConfigError, NonFiniteError, ShapeError
from tests import tiny
from tests.adapters.composed.composed_hosts import (
    DIM,
    LENGTH,
    ROWS,
    along,
    attach,
    augmenting,
    by_prefixes,
    scene,
)
from tests.tiny import assert_close, differs

families = pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "bloom"])


@families
@torch.no_grad()
def test_a_token_sees_what_the_other_model_has_read_so_far(family):
    """The slow definition: for every token the other model is asked anew, for the text up to it."""
    s = scene(family)
    out = s.model(s.ids, memory=along()).logits
    want = by_prefixes(tiny.make(family), augmenting(), s.ids, s.model.adapters["default"])
    assert_close(out, want)
    assert differs(out, s.own)


@families
@torch.no_grad()
def test_padding_on_the_right_changes_nothing(family):
    s = scene(family)
    rows = [tiny.text(1, length, seed=length)[0] for length in (3, 11, 5)]
    ids, keep = (one.flip(1) for one in tiny.left_padded(rows))
    out = s.model(ids, attention_mask=keep, memory=along()).logits
    for row, text in enumerate(rows):
        assert_close(out[row, : len(text)], s.model(text.flip(0)[None], memory=along()).logits[0])


@families
@torch.no_grad()
def test_the_other_model_may_be_of_another_family(family):
    s = scene()
    lm = augmenting(family)
    model, ids = s.model, s.ids
    out = model(ids, memory=mmattn.AugmentingModel(lm)).logits
    assert_close(out, by_prefixes(tiny.make("llama"), lm, ids, model.adapters["default"]))
    rows = [tiny.text(1, length, seed=length)[0] for length in (3, 11)]
    padded, keep = tiny.left_padded(rows)
    out = model(padded, attention_mask=keep, memory=mmattn.AugmentingModel(lm)).logits
    for row, text in enumerate(rows):
        assert_close(out[row, -len(text) :], model(text[None], memory=mmattn.AugmentingModel(lm)).logits[0])


@pytest.mark.parametrize("head_dim", [26, 32, 64])
@torch.no_grad()
def test_heads_begin_at_their_own_place(head_dim):
    """Whatever the states say, most of what a new adapter sees is the state of the token itself; then that before."""
    block = attach(tiny.make("llama"), opened=False, head_dim=head_dim, own_place=True).adapters["default"].block(2)
    x, states = (
        torch.nn.functional.layer_norm(torch.randn(5, 13, dim), (dim,)) for dim in (block.attention.query_dim, DIM)
    )
    _, weights = block.attention(x, states, causal=True, return_weights=True)
    assert weights.isfinite().all()
    diagonal = weights.diagonal(dim1=2, dim2=3)[..., 1:]
    before = weights.diagonal(-1, dim1=2, dim2=3)
    assert diagonal.mean() > 0.75 and diagonal.mean() > 6 * before.mean()


def test_the_augmenting_model_is_left_alone():
    """It has no gradients, and may require them: its owner's to freeze."""
    s, lm = scene(), copy.deepcopy(augmenting())
    s.model(s.ids, labels=s.ids, memory=mmattn.AugmentingModel(lm)).loss.backward()
    assert all(parameter.requires_grad and parameter.grad is None for parameter in lm.parameters())
    s.model.zero_grad()


def test_a_model_that_does_not_fit_is_refused():
    s = scene()
    for changes, words in (
        ({"hidden_size": 40}, "memory_dim=24.*width 40"),
        ({"hidden_size": DIM, "num_hidden_layers": 4}, "layer 4.*0 to 3"),
        ({"hidden_size": DIM, "num_hidden_layers": 5, "vocab_size": 103}, "101.*103.*tokenizer"),
    ):
        lm = tiny.make("llama", **changes)
        with pytest.raises(ShapeError, match=words):
            s.model(s.ids, memory=mmattn.AugmentingModel(lm))
    trained = copy.deepcopy(augmenting())
    memory = mmattn.AugmentingModel(trained)
    trained.train()
    for ask in (lambda: s.model(s.ids, memory=memory), lambda: mmattn.AugmentingModel(trained)):
        with pytest.raises(ConditionError, match="eval"):
            ask()
    broken = copy.deepcopy(augmenting())
    with torch.no_grad():
        broken.model.norm.weight[0] = float("nan")
    with pytest.raises(NonFiniteError, match="row 0"):
        s.model(s.ids, memory=mmattn.AugmentingModel(broken))
    with pytest.raises(AttachError, match="Linear"):
        mmattn.AugmentingModel(torch.nn.Linear(3, 5))
    sizes = {"hidden_size": DIM, "intermediate_size": 53, "num_hidden_layers": 5, "num_attention_heads": 4}
    encoder = BertModel(BertConfig(vocab_size=tiny.VOCAB, **sizes)).eval()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.normal_(0, 0.2)
    with pytest.raises(AttachError, match="see later ones"):
        mmattn.AugmentingModel(encoder)
    with pytest.raises(ShapeError, match="AugmentingModel"):
        s.model(s.ids, memory=tiny.memory(ROWS, e=DIM))
    with pytest.raises(ConditionError, match="each call"):
        s.model.prepare(along())
    with pytest.raises(ShapeError, match="AugmentingModel"):
        tiny.attach(tiny.make("llama"))(s.ids, memory=along())
    with pytest.raises(ConfigError, match="states of another model"):
        mmattn.doctor(s.model, {"input_ids": s.ids, "memory": along()})
    assert torch.equal(s.model(s.ids).logits, s.own), "a rejected call changes nothing"


def test_a_text_whose_ids_are_not_told_is_refused():
    s = scene()
    embeddings = s.model.host.get_input_embeddings()(s.ids)
    with pytest.raises(ConditionError, match="ids of the whole text"):
        s.model(inputs_embeds=embeddings, memory=along())
    with torch.no_grad():
        cache = s.model(s.ids, memory=along(), use_cache=True).past_key_values
        with pytest.raises(ConditionError, match="ids of the whole text"):
            s.model(s.ids[:, :1], **tiny.going_on(cache), memory=along())
    with pytest.raises(ConditionError, match="part of the host"), s.model.condition(along()):
        s.model.host.model(s.ids)


def test_settings_that_cannot_be():
    fine = {"memory_dim": DIM, "layers": (0, 2)}
    for changes, words in (
        ({"augmenting_layers": (1,)}, "one layer for each"),
        ({"augmenting_layers": 3}, "list of layers"),
        ({"augmenting_layers": (1, -1)}, "augmenting_layers"),
        ({"rotary": 1}, "rotary"),
        ({"own_place": 1}, "own_place"),
        ({"own_place": True, "rotary": False}, "needs rotary"),
        ({"head_dim": 7}, "even"),
        ({"augmenting_layers": ()}, "must be a list of layers"),
        ({"augmenting_layers": "12"}, "must be a list of layers"),
    ):
        with pytest.raises(ConfigError, match=words):
            mmattn.ComposedAdapter(**fine | changes)
    with pytest.raises(AttachError, match="one for each"):
        mmattn.attach(tiny.make("llama"), mmattn.ComposedAdapter(DIM, every=1, augmenting_layers=(1, 2)))


NEW = 6
generate = functools.partial(tiny.written, new=NEW)


def lengths_read(lm) -> tuple[list[tuple[int, int]], object]:
    """The sizes (b, l) of what `lm` reads from now on, and the hook that notes them."""
    read: list[tuple[int, int]] = []
    hook = lm.model.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return read, hook


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
    s, lm = scene("llama"), copy.deepcopy(augmenting())
    memory = mmattn.AugmentingModel(lm)
    read, _ = lengths_read(lm)
    with tiny.counting(s.model.adapters["default"].attention(2).kv_proj.k_proj) as projected:
        generate(s.model, s.ids, memory=memory)
    assert read == [(ROWS, LENGTH)] + [(ROWS, 1)] * (NEW - 1)
    assert sum(states.shape[:2].numel() for (states,) in projected) == ROWS * (LENGTH + NEW - 1)
    read.clear()
    beams = generate(s.model, s.ids, memory=memory, num_beams=2)
    assert read == [(2 * ROWS, LENGTH)] + [(2 * ROWS, 1)] * (NEW - 1)
    # What was read is forgotten with the call.
    read.clear()
    assert torch.equal(generate(s.model, s.ids, memory=memory, num_beams=2), beams)
    assert read[0] == (2 * ROWS, LENGTH)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_drafts_do_not_change_the_answer(family):
    s = scene(family)
    want = generate(s.model, s.ids[:1], memory=along(), use_cache=False)
    for how in ({"assistant_model": tiny.make(family)}, tiny.PROMPT_LOOKUP):
        assert torch.equal(generate(s.model, s.ids[:1], memory=along(), **how), want)


@torch.no_grad()
def test_a_refused_draft_is_unread():
    """What a draft added is cut off again: the other model never goes on from words that were taken back."""
    s, lm = scene("llama"), copy.deepcopy(augmenting())
    memory = mmattn.AugmentingModel(lm)
    read, _ = lengths_read(lm)
    got = generate(s.model, s.ids[:1], memory=memory, assistant_model=tiny.make("llama"))
    assert torch.equal(got, generate(s.model, s.ids[:1], memory=along()))
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
