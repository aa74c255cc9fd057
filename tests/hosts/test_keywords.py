"""Keywords: what no one would read is refused by name, and what any part of a host reads passes."""

from __future__ import annotations

import inspect

import peft
import pytest
import torch
from transformers.utils import TransformersKwargs

import mmattn
from mmattn.errors import ConditionError, ConfigError, MmattnError
from tests import tiny, tiny_unets
from tests.tiny import FAMILIES

# peft 0.21 asks transformers 5.23 by the old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

ROWS = 3


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_keyword_of_a_family_passes_and_a_misspelt_one_does_not(family):
    lm, ids, memory = tiny.make(family), tiny.text(ROWS), tiny.memory(ROWS)
    model = tiny.attach(lm)
    want = model(ids, memory=memory).logits
    parameters = inspect.signature(type(lm).forward).parameters
    known = {name: one.default for name, one in parameters.items() if name not in ("self", "kwargs", "input_ids")}
    if "kwargs" in parameters:
        known |= dict.fromkeys(TransformersKwargs.__annotations__)
    for name, value in known.items():
        assert torch.equal(model(ids, memory=memory, **{name: value}).logits, want), name
    for name in ("memroy", "adapter_scales", "attention_maks", "strength"):
        with pytest.raises((MmattnError, TypeError), match=name):
            model(ids, memory=memory, **{name: None})
        with pytest.raises((MmattnError, TypeError), match=name):
            model(ids, **{name: None})
        with pytest.raises((MmattnError, TypeError, ValueError), match=name):
            model.generate(ids, memory=memory, max_new_tokens=2, **{name: 1})
        with pytest.raises((MmattnError, TypeError), match=name), model.condition(memory, **{name: 1}):
            pytest.fail("the block was entered")
        with pytest.raises((MmattnError, TypeError), match=name):
            model.prepare(memory, **{name: 1})


def test_a_misspelt_keyword_is_told_the_right_one():
    model, ids = tiny.attach(tiny.make("llama")), tiny.text(ROWS)
    for wrong, right in (("memroy", "memory"), ("atention_mask", "attention_mask"), ("adapter_scal", "adapter_scale")):
        with pytest.raises(ConfigError, match=f"{wrong}=.*did you mean {right}="):
            model(ids, **{wrong: tiny.memory(ROWS)})


@pytest.mark.parametrize("around", [False, True])
@torch.no_grad()
def test_keywords_of_a_host_with_a_lora(around):
    """peft takes some keywords for itself: a LoRA for each row of a batch."""
    lm, ids, memory = tiny.make("llama"), tiny.text(ROWS), tiny.memory(ROWS)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    guest = peft.get_peft_model(lm, config)
    model = tiny.attach(guest if around else lm).eval()
    want = model(ids, memory=memory).logits
    for name in ("attention_mask", "position_ids", "logits_to_keep", "output_attentions"):
        value = 0 if name == "logits_to_keep" else None
        assert torch.equal(model(ids, memory=memory, **{name: value}).logits, want), name
    with pytest.raises(ConfigError, match="memroy"):
        model(ids, memroy=memory)
    if around:
        mixed = model(ids, memory=memory, adapter_names=["default", "__base__", "default"]).logits
        with guest.disable_adapter():
            plain = model(ids, memory=memory).logits
        tiny.assert_close(mixed, torch.stack([want[0], plain[1], want[2]]))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba"])
def test_a_memory_given_to_the_host_is_not_dropped(family):
    """Most hosts take any keyword and read none of ours; trainers and pipelines call the host they know."""
    lm, ids, memory = tiny.make(family), tiny.text(ROWS), tiny.memory(ROWS)
    model = tiny.attach(lm)
    for given in ({"memory": memory}, {"memory": None}, {"adapter_scale": 0.5}):
        with pytest.raises((ConditionError, TypeError), match=next(iter(given))):
            lm(ids, **given)
        with pytest.raises((ConditionError, TypeError), match=next(iter(given))), model.condition(memory):
            lm(ids, **given)
    model.unload()


def test_keywords_of_a_unet():
    model, memory = tiny_unets.attach(tiny_unets.make()), tiny.memory(ROWS)
    args, kwargs = tiny_unets.given()
    for name in ("memroy", "strength", "guided"):
        with pytest.raises((MmattnError, TypeError), match=name):
            model(*args, memory=memory, **kwargs, **{name: 1})
        with pytest.raises((MmattnError, TypeError), match=name):
            model(*args, **kwargs, **{name: 1})
    with pytest.raises((MmattnError, TypeError), match="strength"), model.condition(memory, strength=1):
        pytest.fail("the block was entered")
    with pytest.raises((MmattnError, TypeError), match="memory"):
        model.host(*args, memory=memory, **kwargs)
    with torch.no_grad():
        want = model(*args, memory=memory, **kwargs).sample
        for name in set(inspect.signature(type(model.host).forward).parameters) - {"self", "sample", "timestep"}:
            if name not in ("encoder_hidden_states", "return_dict"):
                assert torch.equal(model(*args, memory=memory, **{name: None}).sample, want), name


def test_what_needs_a_memory_is_not_dropped_without_one():
    model, ids = tiny.attach(tiny.make("llama")), tiny.text(ROWS)
    for given in ({"adapter_scale": 0.5}, {"images": torch.zeros(ROWS, 7, dtype=torch.long)}):
        for call in (model, model.generate):
            with pytest.raises(ConditionError, match=f"{next(iter(given))}=.*memory="):
                call(ids, **given)
    unet = tiny_unets.attach(tiny_unets.make())
    args, kwargs = tiny_unets.given()
    with pytest.raises(ConditionError, match="adapter_scale=.*memory="):
        unet(*args, adapter_scale=0.5, **kwargs)
    for option in ("path", "require_memroy", "adapter_scale"):
        with pytest.raises((MmattnError, TypeError), match=option):
            mmattn.attach(tiny_unets.make(), tiny_unets.adapter(), **{option: "model.layers"})
