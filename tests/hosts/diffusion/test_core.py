"""The host's own text through the core: the same numbers, padding that is padding, keys and values made once."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

import mmattn
from mmattn.errors import ConditionError
from mmattn.testing.case import rows_of
from tests import tiny, tiny_unets
from tests.tiny import assert_close, differs
from tests.tiny_transformers import attach, given, make, run as ask
from tests.tiny_unets import ROWS, run

kinds = pytest.mark.parametrize("kind", tiny_unets.CORE_KINDS)
LENGTHS = [7, 3, 5]
MASK = torch.arange(tiny_unets.TEXT_LENGTH) < torch.tensor(LENGTHS)[:, None]
TRANSFORMERS = (
    "SD3Transformer2DModel",
    "PixArtTransformer2DModel",
    "SanaTransformer2DModel",
    "WanTransformer3DModel",
    "LTXVideoTransformer3DModel",
)
hosts = pytest.mark.parametrize("host", [*tiny_unets.CORE_KINDS, *TRANSFORMERS])
TEXT, PADDING = "encoder_hidden_states", "encoder_attention_mask"


@pytest.fixture
def model():
    """A tiny UNet with an open adapter, its text through the core."""
    return tiny_unets.attach(tiny_unets.make()).use_core()


def text_projections(model):
    return [model.layer(index).to_k for index in range(len(model.layer_names))]


def unpadded(model):
    """What a host is called with, and a mask (b, m) of ones for its text."""
    batch = given(model)
    ones = torch.ones(batch[TEXT].shape[:2])
    return batch | ({PADDING: ones} if PADDING in batch else {}), ones


# The same numbers


@hosts
@torch.no_grad()
def test_unmasked_it_is_what_diffusers_gives(host):
    """Invariant 96: in UNets, and in transformers that read text beside the picture or joined with it."""
    model, memory = attach(make(host)), tiny.memory(ROWS, lengths=[5, 0, 3])
    batch, ones = unpadded(model)
    want, own = ask(model, batch, memory=memory), ask(model, batch)
    model.use_core()
    assert_close(ask(model, batch), own)
    for more in ({}, {"text_mask": ones.bool()}, {PADDING: ones} if host in tiny_unets.KINDS else {}):
        out = ask(model, batch, memory=memory, **more)
        assert_close(out, want)
        assert torch.equal(out[1], ask(model, batch, **more)[1])
    model.use_core(False)
    assert torch.equal(ask(model, batch, memory=memory), want)


@hosts
@torch.no_grad()
def test_masked_text_is_the_shorter_text(host):
    """Invariant 96: joint attention, too, sees no masked token of its text (diffusers #8673)."""
    model, memory = attach(make(host)).use_core(), tiny.memory(ROWS)
    batch, ones = unpadded(model)
    lengths = [ones.shape[1], 3, 4]
    mask = torch.arange(ones.shape[1]) < torch.tensor(lengths)[:, None]
    filled = batch | {TEXT: batch[TEXT].masked_fill(~mask[..., None], 1e3)}
    out = ask(model, filled, memory=memory, text_mask=mask)
    assert out.isfinite().all() and differs(out[1:], ask(model, filled, memory=memory)[1:], 1e-3)
    for block, more in (({"text_mask": mask}, {}), ({}, {"text_mask": mask})):
        with model.condition(memory, **block):
            assert torch.equal(ask(model, filled, **more), out)
    # diffusers does not tell the first attention of "only_cross" of the padding, only text_mask reaches it
    if host in tiny_unets.KINDS and host != "only_cross":
        assert torch.equal(ask(model, filled | {PADDING: mask.long()}, memory=memory), out)
    for row, length in enumerate(lengths):
        alone = rows_of(batch, slice(row, row + 1), ROWS)
        alone |= {name: value[:, :length] for name, value in alone.items() if name in (TEXT, PADDING)}
        for core in (False, True):
            assert_close(ask(model.use_core(core), alone, memory=memory[row]), out[row : row + 1])
    if host not in tiny_unets.KINDS:
        return
    poisoned = batch[TEXT].masked_fill(~mask[..., None], float("nan")).requires_grad_()
    with torch.enable_grad():
        found = model(**batch | {TEXT: poisoned}, memory=memory, text_mask=mask).sample
        found.square().mean().backward()
    assert_close(found, out)
    if host != "k":  # its layers normalise the text before it is masked
        assert poisoned.grad.isfinite().all() and not poisoned.grad[~mask].any() and poisoned.grad[mask].any()


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
        with tiny.counting(*text_projections(model)) as ran:
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
        with tiny.counting(*text_projections(model)) as ran:
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
    with tiny.counting(*text_projections(model)) as ran, model.condition(None):
        for _ in range(3):
            assert torch.equal(model.host(*args).sample, want)
        assert len(ran) == len(layers)
        layers[0].norm_cross.weight.mul_(2)
        assert differs(model.host(*args).sample, want)


@torch.no_grad()
def test_keys_and_values_of_the_text_are_kept_over_steps():
    model = attach(make("PixArtTransformer2DModel")).use_core()
    batch = given(model)
    batch.pop("encoder_attention_mask")
    # The caption is projected at every step; keys and values are those of what is projected.
    other = batch | {"encoder_hidden_states": batch["encoder_hidden_states"].roll(1, 0)}
    layers = [model.layer(index).to_k for index in range(2)]
    with tiny.counting(*layers) as ran, model.condition(tiny.memory(ROWS)):
        first, second = ask(model.host, batch), ask(model.host, other)
        assert len(ran) == 4 and differs(first, second)
        for _ in range(2):  # as guidance calls a host for each half in turn
            assert torch.equal(ask(model.host, batch), first)
            assert torch.equal(ask(model.host, other), second)
        assert len(ran) == 4
        batch["encoder_hidden_states"] *= 2
        assert differs(ask(model.host, batch), first) and len(ran) == 6


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


def changed(kind, change):
    unet = make(kind)
    change(unet)
    return unet


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize(
    ("host", "says"),
    [
        *(
            (lambda family=family: make(family), "use_core")
            for family in ("FluxTransformer2DModel", "DiTTransformer2DModel", "StableAudioDiTModel")
        ),
        (lambda: make("QwenImageTransformer2DModel"), "use_core"),
        (lambda: make("PRXTransformer2DModel"), "use_core"),
        (lambda: make("simple"), "AttnAddedKVProcessor2_0"),
        (lambda: changed("stable", lambda unet: unet.fuse_qkv_projections()), "FusedAttnProcessor2_0"),
        (lambda: changed("stable", lambda unet: unet.set_attention_slice("max")), "SlicedAttnProcessor"),
    ],
)
def test_attention_that_the_core_cannot_stand_for(host, says):
    model = attach(host())
    before = [model.layer(index).processor for index in range(len(model.layer_names))]
    with pytest.raises(ConditionError, match=says):
        model.use_core()
    assert all(model.layer(index).processor is one for index, one in enumerate(before))
    with pytest.raises(ConditionError, match="use_core"):
        model(**given(model), text_mask=torch.ones(ROWS, 5, dtype=torch.bool))
