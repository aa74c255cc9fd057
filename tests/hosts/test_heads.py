"""Heads that do not write: spans, choices, several outputs, tuples. A memory reaches all of them."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import mmattn
from mmattn import doctor
from mmattn.data.text_batches import collate
from mmattn.errors import NonFiniteError
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


def memory(rows: int = 2) -> mmattn.Memory:
    return mmattn.Memory(torch.randn(rows, 7, MEMORY_DIM, generator=torch.Generator().manual_seed(3)))


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
    given = memory(6 if head == "choices" else 2)
    fresh = model(**inputs, memory=given)
    assert type(fresh) is type(bare) and torch.equal(fresh[0], bare[0])
    seeing = tiny.open_gates(model)(**inputs, memory=given)
    assert torch.isfinite(seeing[0]).all() and (seeing[0] != bare[0]).flatten(1).any(1).all()


def test_a_multiple_choice_head_has_a_row_of_memory_for_each_choice() -> None:
    """Invariant 175."""
    model = mmattn.attach(host_of("choices"), mmattn.GatedAdapter(memory_dim=MEMORY_DIM))
    with pytest.raises(mmattn.errors.ShapeError, match="6 rows and the memory of adapter 'default' has 2"):
        model(**inputs_of(model.host), memory=memory(2))


@pytest.mark.parametrize("head", ["span", "choices"])
def test_the_doctor_examines_every_head(head: str) -> None:
    """Invariant 175."""
    model = tiny.open_gates(mmattn.attach(host_of(head), mmattn.GatedAdapter(memory_dim=MEMORY_DIM)))
    report = doctor(model, inputs_of(model.host) | {"memory": memory(6 if head == "choices" else 2)})
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
    fresh = model(input_ids=IDS, memory=memory())
    assert isinstance(fresh, tuple) and torch.equal(fresh[0], bare[0])
    assert not torch.equal(tiny.open_gates(model)(input_ids=IDS, memory=memory())[0], bare[0])


def test_a_language_model_whose_config_says_return_dict_false() -> None:
    """Adapters of every position attach, and losses read its logits.

    Invariant 176.
    """
    settings = tiny_config("bert", writes=True)
    settings.return_dict = False
    host = transformers.AutoModelForCausalLM.from_config(settings).eval()
    batch = collate([[5, 9, 3], [4, 6, 8]], memory())
    for config in (mmattn.GatedAdapter(memory_dim=MEMORY_DIM), mmattn.adapters.InsertedAdapter(memory_dim=MEMORY_DIM)):
        model = mmattn.attach(host, config)
        assert isinstance(model(IDS, memory=memory()), tuple)
        assert torch.isfinite(mmattn.training.mean_nats(model, batch))
        model.unload()


def test_logits_that_are_not_finite_are_refused_in_tuples_too() -> None:
    """Invariant 176."""
    model = mmattn.attach(tiny.make("llama"), mmattn.GatedAdapter(memory_dim=MEMORY_DIM))
    with torch.no_grad():
        model.host.lm_head.weight.fill_(torch.inf)
        for by_name in (True, False):
            with pytest.raises(NonFiniteError, match="row 0, 1"):
                model(IDS, memory=memory(), return_dict=by_name)
