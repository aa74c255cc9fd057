"""The host's own text through the core: the same numbers, padding that is padding, keys and values made once."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

import mmattn
from mmattn.errors import ConditionError
from tests import tiny, tiny_unets
from tests.tiny import assert_close, differs
from tests.tiny_unets import ROWS, run

kinds = pytest.mark.parametrize("kind", tiny_unets.CORE_KINDS)
LENGTHS = [7, 3, 5]
MASK = torch.arange(tiny_unets.TEXT_LENGTH) < torch.tensor(LENGTHS)[:, None]


@pytest.fixture
def model():
    """A tiny UNet with an open adapter, its text through the core."""
    return tiny_unets.attach(tiny_unets.make()).use_core()


def text_projections(model):
    return [model.layer(index).to_k for index in range(len(model.layer_names))]


# The same numbers


@kinds
@torch.no_grad()
def test_unmasked_it_is_what_diffusers_gives(kind):
    unet = tiny_unets.make(kind)
    assert_close(run(mmattn.attach(unet).use_core(), None, kind), tiny_unets.own(kind))
    model, memory = tiny_unets.attach(unet), tiny.memory(ROWS, lengths=[5, 0, 3])
    want = run(model.use_core(False), memory, kind)
    model.use_core()
    out = run(model, memory, kind)
    assert_close(out, want)
    assert torch.equal(out[1], run(model, None, kind)[1])
    ones = torch.ones(ROWS, tiny_unets.TEXT_LENGTH)
    assert_close(run(model, memory, kind, text_mask=ones.bool()), want)
    assert_close(run(model, memory, kind, encoder_attention_mask=ones), want)


@torch.no_grad()
def test_a_layer_that_is_given_a_picture_gives_a_picture(model):
    """Layers of diffusers take states (b, d, height, width), too."""
    memory, words = tiny.memory(ROWS), tiny_unets.text()
    x = torch.randn(ROWS, model.layer(1).query_dim, 3, 5)
    own, found = [], []
    for core, answers in ((False, own), (True, found)):
        model.use_core(core)
        answers.append(model.layer(1)(x, words))
        with model.condition(memory):
            answers.append(model.layer(1)(x, words))
    for got, want in zip(found, own, strict=True):
        assert got.shape == x.shape
        assert_close(got, want)
    assert differs(found[1], found[0])


@kinds
@torch.no_grad()
def test_masked_text_is_the_shorter_text(kind):
    unet = tiny_unets.make(kind)
    model, memory = tiny_unets.attach(unet).use_core(), tiny.memory(ROWS)
    (sample, time, words), kwargs = tiny_unets.given(kind)
    filled = words.masked_fill(~MASK[..., None], 1e4)
    out = model(sample, time, filled, memory=memory, text_mask=MASK, **kwargs).sample
    for block, more in (({"text_mask": MASK}, {}), ({}, {"text_mask": MASK})):
        with model.condition(memory, **block):
            assert torch.equal(model(sample, time, filled, **more, **kwargs).sample, out)
    if kind != "only_cross":  # diffusers does not tell its first attention of the padding, only text_mask reaches it
        by_host = model(sample, time, filled, memory=memory, encoder_attention_mask=MASK.long(), **kwargs).sample
        assert torch.equal(by_host, out)
    for i, length in enumerate(LENGTHS):
        row = tiny_unets.row_of(((sample, time, words[:, :length]), kwargs), i)
        alone = model(*row[0], memory=memory[i], **row[1]).sample
        assert_close(alone, out[i : i + 1])
        model.use_core(False)
        assert_close(model(*row[0], memory=memory[i], **row[1]).sample, out[i : i + 1])
        model.use_core()
    poisoned = words.masked_fill(~MASK[..., None], float("nan")).requires_grad_()
    with torch.enable_grad():
        found = model(sample, time, poisoned, memory=memory, text_mask=MASK, **kwargs).sample
        found.square().mean().backward()
    assert_close(found, out)
    if kind != "k":  # its layers normalise the text before it is masked
        assert poisoned.grad.isfinite().all() and not poisoned.grad[~MASK].any() and poisoned.grad[MASK].any()


@kinds
@torch.no_grad()
def test_rows_whose_text_is_masked_out_get_nothing_from_it(kind):
    model = tiny_unets.attach(tiny_unets.make(kind)).use_core()
    args, kwargs = tiny_unets.given(kind)
    mask = torch.tensor([[True], [False], [True]]).expand(-1, tiny_unets.TEXT_LENGTH)
    last = len(model.layer_names) - 1
    with tiny_unets.listening(model, last) as heard:
        out = run(model, None, kind, text_mask=mask)
        assert not heard["out"][1].any() and heard["out"][0].any()
    assert differs(out[1:2], tiny_unets.own(kind)[1:2])
    assert_close(out[::2], tiny_unets.own(kind)[::2])
    if kind != "only_cross":
        assert torch.equal(model(*args, encoder_attention_mask=mask.float(), **kwargs).sample, out)
    memory = tiny.memory(ROWS)
    with tiny_unets.listening(model, last) as heard:
        run(model, memory, kind, text_mask=mask)
        added = heard["out"][1:2]
        want = tiny_unets.share(model, last, heard["x"], memory)[1:2]
    assert_close(added, want, 1e-4)


# Keys and values once; after changes of weights and LoRAs: tests/hosts/test_what_was_computed.py


@torch.no_grad()
def test_the_texts_keys_and_values_are_those_of_the_text(model):
    (sample, time, words), _ = tiny_unets.given()
    count, plain = len(model.layer_names), mmattn.attach(tiny_unets.make()).host

    def check(made, words=words, **more):
        with tiny_unets.counting(*text_projections(model)) as ran:
            got = model.host(sample, time, words, **more).sample
        assert len(ran) == made * count
        with model.disable_adapter():
            assert_close(got, model.host(sample, time, words, **more).sample)
        if not more:
            assert_close(got, plain(sample, time, words).sample)
        return got

    model.set_adapter([])
    with model.condition(tiny.memory(ROWS)):
        check(1)
        check(0)
        check(0, words=words.clone())  # as transformers give their layers, which project the same text at every step
        words.mul_(-1.5)
        check(1)
        check(0)
        # Another padding is another text, and the same padding is the same.
        first = check(1, encoder_attention_mask=MASK.long())
        assert torch.equal(check(0, encoder_attention_mask=MASK.long()), first)
        assert differs(check(1, encoder_attention_mask=MASK.flip(0).long())[::2], first[::2])
        check(0)
        model.layer(0).to_k.weight.mul_(1.5), plain.get_submodule(model.layer_names[0]).to_k.weight.mul_(1.5)
        with tiny_unets.counting(*text_projections(model)) as ran:
            model.host(sample, time, words)
        assert len(ran) == 1
        check(0)


@pytest.mark.parametrize("padding", ["encoder_attention_mask", "text_mask", None])
def test_inference_mode(model, padding):
    (sample, time, words), _ = tiny_unets.given()
    more = {} if padding is None else {padding: MASK if padding == "text_mask" else MASK.long()}
    with torch.no_grad():
        want = model(sample, time, words, **more).sample
    with torch.inference_mode():
        inside = {name: value.clone() for name, value in more.items()}
        for given, text in ((more, words), (inside, words), (inside, words.clone())):
            with model.condition(None):
                assert torch.equal(model(sample, time, text, **given).sample, want)
                assert torch.equal(model(sample, time, text, **given).sample, want)


@torch.no_grad()
def test_text_that_a_layer_normalises_is_projected_once_too():
    model = tiny_unets.attach(tiny_unets.make("k")).use_core()
    layers = [model.layer(index) for index in range(len(model.layer_names))]
    args, _ = tiny_unets.given("k")
    want = model.host(*args).sample
    with tiny_unets.counting(*text_projections(model)) as ran, model.condition(None):
        for _ in range(3):
            assert torch.equal(model.host(*args).sample, want)
        assert len(ran) == len(layers)
        layers[0].norm_cross.weight.mul_(2)
        assert differs(model.host(*args).sample, want)


# Processors that come and go


@pytest.mark.parametrize(
    "swap",
    [
        lambda unet: unet.set_attention_slice("max"),
        lambda unet: unet.fuse_qkv_projections(),
        lambda unet: unet.set_attn_processor(AttnProcessor()),
        lambda unet: unet.mid_block.attentions[0].transformer_blocks[0].attn2.set_processor(AttnProcessor2_0()),
    ],
)
@torch.no_grad()
def test_processors_replaced_under_the_core_are_noticed(model, swap):
    memory = tiny.memory(ROWS)
    want = run(model, memory)
    swap(model.host)
    for call in (lambda: run(model, memory), lambda: run(model), lambda: model.host(*tiny_unets.given()[0])):
        with pytest.raises(ConditionError, match=r"use_core\(False\)"):
            call()
    model.use_core(False)
    assert_close(run(model, memory), want)
    model.host.set_attn_processor(AttnProcessor2_0())
    assert_close(run(model.use_core(), memory), want)


def test_the_very_same_processors_come_back():
    unet = tiny_unets.make()
    unet.set_attn_processor({name: AttnProcessor() for name in unet.attn_processors})
    before = unet.attn_processors
    for leave in (lambda model: model.use_core(False), lambda model: model.unload()):
        model = mmattn.attach(unet).use_core()
        assert model.use_core() is model and list(unet.state_dict()) == list(tiny_unets.make().state_dict())
        for index, place in enumerate(model.layer_names):
            assert unet.attn_processors[f"{place}.processor"] is model.processors[index]
        leave(model)
        assert unet.attn_processors.keys() == before.keys()
        assert all(got is want for got, want in zip(unet.attn_processors.values(), before.values(), strict=True))
