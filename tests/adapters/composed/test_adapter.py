"""The composed adapter: two language models of one text, causal, frozen, and nothing of one in the other."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import BertConfig, BertModel

import mmattn
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

families = pytest.mark.parametrize("family", tiny.FAMILIES)
few_families = pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "bloom"])


def trainable(family: str):
    return attach(tiny.make(family)).train()


@few_families
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
def test_no_token_sees_later_ones(family):
    s, changed = scene(family), tiny.text(ROWS, LENGTH)
    changed[:, 4] = (changed[:, 4] + 1) % tiny.VOCAB
    before, after = (s.model(ids, memory=along()).logits for ids in (s.ids, changed))
    assert_close(after[:, :4], before[:, :4])
    assert differs(after[:, 4:], before[:, 4:])


@few_families
@torch.no_grad()
def test_rows_are_independent_and_padding_changes_nothing(family):
    s = scene(family)
    rows = [tiny.text(1, length, seed=length)[0] for length in (3, 11, 5)]
    ids, keep = tiny.left_padded(rows)
    # A model that counts positions from the left edge needs them.
    inputs = {"position_ids": (keep.cumsum(1) - 1).clamp(min=0)} if family == "gpt2" else {}
    out = s.model(ids, attention_mask=keep, memory=along(), **inputs).logits
    for row, text in enumerate(rows):
        alone = s.model(text[None], memory=along()).logits[0]
        assert_close(out[row, -len(text) :], alone)
    right, keep = ids.flip(1), keep.flip(1)
    out = s.model(right, attention_mask=keep, memory=along()).logits
    for row, text in enumerate(rows):
        assert_close(out[row, : len(text)], s.model(text.flip(0)[None], memory=along()).logits[0])


@few_families
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


@families
def test_loss_teaches_every_adapter_weight_and_no_other(family):
    model, lm = trainable(family), copy.deepcopy(augmenting())
    ids = tiny.text(ROWS, LENGTH)
    before = {name: value.clone() for name, value in lm.state_dict().items()}
    loss = model(ids, labels=ids, memory=mmattn.AugmentingModel(lm)).loss
    assert torch.isfinite(loss)
    loss.backward()
    for name, parameter in model.adapters.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, f"{name} never learns"
        assert torch.isfinite(parameter.grad).all(), name
    for part in (model.host, lm):
        for name, parameter in part.named_parameters():
            assert parameter.grad is None, name
    assert all(torch.equal(value, before[name]) for name, value in lm.state_dict().items())
    assert all(parameter.requires_grad for parameter in lm.parameters()), "its owner's to freeze"


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
