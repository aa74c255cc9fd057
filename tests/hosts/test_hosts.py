"""Hosts with heads of every kind, with pictures of their own, and with several residual streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

import mmattn
from mmattn import doctor
from mmattn.data.text_batches import collate
from mmattn.errors import AttachError, NonFiniteError
from tests import tiny
from tests.families.building import MEMORY_DIM, tiny_config, tiny_model

IDS = torch.tensor([[5, 9, 3, 7, 11], [4, 6, 8, 2, 13]])
HEADS = {
    "span": ("bert", "AutoModelForQuestionAnswering"),
    "span of a decoder": ("mistral", "AutoModelForQuestionAnswering"),
    "span of an encoder-decoder": ("bart", "AutoModelForQuestionAnswering"),
    "words and sentences": ("bert", "AutoModelForPreTraining"),
    "words": ("distilbert", "AutoModelForMaskedLM"),
    "tokens": ("llama", "AutoModelForTokenClassification"),
    "reward": ("qwen2", "AutoModelForSequenceClassification"),
    "choices": ("bert", "AutoModelForMultipleChoice"),
    "states": ("bert", "AutoModel"),
    "states of a decoder": ("llama", "AutoModel"),
    "states of an encoder-decoder": ("t5", "AutoModel"),
}


def host_of(head: str) -> PreTrainedModel:
    family, auto_class = HEADS[head]
    return tiny_model(family, getattr(transformers, auto_class))


def inputs_of(host: PreTrainedModel) -> dict[str, torch.Tensor]:
    name = type(host).__name__
    if name.endswith("MultipleChoice"):
        return {"input_ids": IDS[:, None].repeat(1, 3, 1)}
    return {"input_ids": IDS} | ({"decoder_input_ids": IDS[:, :3]} if host.config.is_encoder_decoder else {})


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
def test_memory_reaches_every_head(head: str) -> None:
    """A fresh adapter leaves what the host answers bit for bit; with open gates every row follows its memory.

    Invariant 175.
    """
    host = host_of(head)
    inputs = inputs_of(host)
    bare = host(**inputs)
    model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=MEMORY_DIM, layers=(1, 2)))
    given = tiny.memory(6 if head == "choices" else 2)
    fresh = model(**inputs, memory=given)
    assert type(fresh) is type(bare) and torch.equal(fresh[0], bare[0])
    seeing = tiny.open_gates(model)(**inputs, memory=given)
    assert torch.isfinite(seeing[0]).all() and (seeing[0] != bare[0]).flatten(1).any(1).all()


def test_a_multiple_choice_head_has_a_row_of_memory_for_each_choice() -> None:
    """Invariant 175."""
    model = mmattn.attach(host_of("choices"), mmattn.GatedAdapter(memory_dim=MEMORY_DIM))
    with pytest.raises(mmattn.errors.ShapeError, match="6 rows and the memory of adapter 'default' has 2"):
        model(**inputs_of(model.host), memory=tiny.memory(2))


@pytest.mark.parametrize("head", ["span", "choices"])
def test_the_doctor_examines_every_head(head: str) -> None:
    """Invariant 175."""
    model = tiny.open_gates(mmattn.attach(host_of(head), mmattn.GatedAdapter(memory_dim=MEMORY_DIM)))
    report = doctor(model, inputs_of(model.host) | {"memory": tiny.memory(6 if head == "choices" else 2)})
    assert report.ok, report


@torch.no_grad()
@pytest.mark.parametrize("head", ["states", "words and sentences", "span"])
def test_hosts_whose_config_says_return_dict_false(head: str) -> None:
    """A host that returns tuples is adapted like any, and returns tuples.

    Invariant 176.
    """
    host = host_of(head)
    host.config.return_dict = False
    bare = host(IDS)
    assert isinstance(bare, tuple)
    model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=MEMORY_DIM, layers=(1, 2)))
    fresh = model(input_ids=IDS, memory=tiny.memory(2))
    assert isinstance(fresh, tuple) and torch.equal(fresh[0], bare[0])
    assert not torch.equal(tiny.open_gates(model)(input_ids=IDS, memory=tiny.memory(2))[0], bare[0])


def test_a_language_model_whose_config_says_return_dict_false() -> None:
    """Adapters of every position attach, and losses read its logits.

    Invariant 176.
    """
    settings = tiny_config("bert", writes=True)
    settings.return_dict = False
    host = transformers.AutoModelForCausalLM.from_config(settings).eval()
    batch = collate([[5, 9, 3], [4, 6, 8]], tiny.memory(2))
    for config in (mmattn.GatedAdapter(memory_dim=MEMORY_DIM), mmattn.adapters.InsertedAdapter(memory_dim=MEMORY_DIM)):
        model = mmattn.attach(host, config)
        assert isinstance(model(IDS, memory=tiny.memory(2)), tuple)
        assert torch.isfinite(mmattn.training.mean_nats(model, batch))
        model.unload()


def test_logits_that_are_not_finite_are_refused_in_tuples_too() -> None:
    """Invariant 176."""
    model = mmattn.attach(tiny.make("llama"), mmattn.GatedAdapter(memory_dim=MEMORY_DIM))
    with torch.no_grad():
        model.host.lm_head.weight.fill_(torch.inf)
        for by_name in (True, False):
            with pytest.raises(NonFiniteError, match="row 0, 1"):
                model(IDS, memory=tiny.memory(2), return_dict=by_name)


# Hosts that already see: a further memory for their text part, beside pictures of their own


HOSTS = {"llava": 16, "internvl": 4}  # tokens that stand for a picture
PICTURES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=HOSTS)
def told(request: pytest.FixtureRequest) -> tuple[Any, dict[str, torch.Tensor]]:
    """An adapted host, and two texts about a picture each."""
    host = tiny_model(request.param, AutoModelForImageTextToText)
    token = host.config.image_token_id
    picture = torch.full((2, HOSTS[request.param]), token)
    ids = torch.cat([torch.full((2, 1), 5), picture, torch.tensor([[7, 8, 9], [3, 2, 6]])], 1)
    model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=MEMORY_DIM, layers=(0, 2), num_heads=2))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": PICTURES}


@torch.no_grad()
def test_its_own_pictures_and_a_memory(told: tuple[Any, dict[str, torch.Tensor]]) -> None:
    """Both are seen, each by its own row; a fresh adapter changes nothing."""
    model, given = told
    alone = model.host(**given).logits
    assert torch.equal(model(**given, memory=tiny.memory(2)).logits, alone)
    tiny.open_gates(model)
    both = model(**given, memory=tiny.memory(2)).logits
    assert tiny.differs(both, alone)
    other = {**given, "pixel_values": torch.stack([PICTURES[0], PICTURES[1].flip(1)])}
    changed = model(**other, memory=tiny.memory(2)).logits
    tiny.assert_close(changed[0], both[0], 1e-5)
    assert tiny.differs(changed[1:], both[1:], 1e-3), "its own picture is no longer seen"
    assert torch.equal(model(**given).logits, alone)


# Hosts with several residual streams for each token: adapters read their mean, and add to every one


SQUARE = torch.tensor([[5, 9, 3, 7], [4, 4, 6, 12], [8, 11, 6, 3]])  # as many tokens as streams


@pytest.mark.parametrize("position", ["after", "before"])
@pytest.mark.parametrize(("family", "axis"), [("deepseek_v4", 2), ("hy_v4", 2), ("gemma3n_text", 0)])
def test_a_row_sees_its_memory_whatever_the_batch(family: str, axis: int, position: str) -> None:
    """Also where as many rows or tokens are given as there are streams."""
    host = tiny_model(family, AutoModelForCausalLM)
    settings = mmattn.GatedAdapter(memory_dim=MEMORY_DIM, layers=(0, 2), num_heads=2, position=position)
    model = tiny.open_gates(mmattn.attach(host, settings))
    assert model.stream_axis == axis
    memory = mmattn.Memory(torch.randn(3, 5, MEMORY_DIM))
    with torch.no_grad():
        together = model(SQUARE, memory=memory).logits
        assert tiny.differs(together, host(input_ids=SQUARE).logits)
        for row in range(3):
            tiny.assert_close(model(SQUARE[row : row + 1], memory=memory[row]).logits, together[row : row + 1], 1e-5)


def test_layers_of_two_kinds_are_refused() -> None:
    """A host of which some layers hand on several streams, and others one."""
    host = tiny.make("llama")
    first, second = host.model.layers[1:3]
    first.forward = lambda x, *args, run=first.forward, **kwargs: torch.stack([run(x, *args, **kwargs)] * 4, 2)
    second.forward = lambda x, *args, run=second.forward, **kwargs: run(x.mean(2), *args, **kwargs)
    with pytest.raises(AttachError, match="some layers .* several residual streams"):
        mmattn.attach(host, mmattn.GatedAdapter(memory_dim=MEMORY_DIM, layers=(0, 1), num_heads=2))
    mmattn.attach(host, mmattn.GatedAdapter(memory_dim=MEMORY_DIM, layers=(0, 2), num_heads=2))
