"""Attributes of the host on the adapted model: set and deleted where they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

import mmattn
from tests import tiny, tiny_unets
from tests.families.building import tiny_model

# peft 0.21 asks transformers 5.23 by the old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def t5() -> nn.Module:
    return tiny_model("t5", AutoModelForSeq2SeqLM)


def lora() -> nn.Module:
    host: nn.Module = peft.get_peft_model(
        tiny.make("llama"), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    )
    return host


def attached(host: nn.Module) -> Any:
    return tiny.open_gates(mmattn.attach(host, mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, every=1, num_heads=2)))


@pytest.mark.parametrize("make", [lambda: tiny.make("llama"), lambda: tiny.make("gpt2"), lora, t5])
def test_a_generation_config_that_is_set_is_followed(make: Callable[[], nn.Module]) -> None:
    """Invariant 149."""
    model = attached(make())
    asked = GenerationConfig(max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=2)
    asked.decoder_start_token_id = 0
    model.generation_config = asked
    assert model.host.generation_config is model.generation_config is asked
    ids = tiny.text(2)
    start = 1 if model.kind == "encoder_decoder" else ids.shape[1]
    assert model.generate(ids, memory=tiny.memory(2)).shape[1] == start + 3


def test_a_trainer_that_sets_a_generation_config(tmp_path: Any) -> None:
    """Invariant 149."""
    model, asked = (
        attached(t5()),
        GenerationConfig(max_new_tokens=4, decoder_start_token_id=0, pad_token_id=0),
    )
    Seq2SeqTrainer(model=model, args=Seq2SeqTrainingArguments(tmp_path, generation_config=asked, use_cpu=True))
    assert model.host.generation_config.max_new_tokens == 4


def test_whatever_the_host_has_is_set_and_deleted_on_it() -> None:
    """Invariant 149."""
    host = tiny.make("llama")
    host.note = "a plain attribute"
    host.register_buffer("table", torch.zeros(3))
    model, ids = attached(host), tiny.text(1)

    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(7.0)

    head, config = nn.Linear(32, 5, bias=False), tiny.config("llama")
    for name, value in {
        "note": "another",
        "table": torch.ones(3),
        "config": config,
        "loss_function": loss,  # a property with a setter
        "lm_head": head,
        "main_input_name": "inputs_embeds",  # of the class
    }.items():
        setattr(model, name, value)
        assert getattr(host, name) is getattr(model, name) is value
        assert name not in vars(model) and name not in {*model._modules, *model._buffers}
    assert model(ids, memory=tiny.memory(1)).logits.shape[-1] == 5
    assert float(model(ids, labels=ids).loss) == 7
    with pytest.raises(AttributeError):
        model.device = "cpu"  # as on the host
    for name in ("note", "table", "main_input_name"):
        delattr(model, name)
    assert not hasattr(host, "note") and not hasattr(host, "table") and not hasattr(model, "note")
    assert host.main_input_name == model.main_input_name == "input_ids"
    with pytest.raises(AttributeError):
        del model.note


def test_what_the_adapted_model_has_stays_its_own() -> None:
    """Invariant 149: also where the host has an attribute of the same name."""
    host = tiny.make("llama")
    host.path, host.active, host.require_memory = "host", "host", "host"
    model = attached(host)
    model.require_memory, model.active = True, []
    model.remark = "of neither"
    model._mark = "of a library"
    model.extra = nn.Linear(2, 3)
    assert (host.path, host.active, host.require_memory) == ("host", "host", "host")
    assert model.path == "model.layers"
    assert not any(hasattr(host, name) for name in ("remark", "_mark", "extra"))
    assert "extra" in model._modules and any(name.startswith("extra") for name in model.state_dict())
    del model.remark, model._mark, model.extra
    assert not hasattr(model, "remark")


def test_a_host_of_peft_has_them_where_they_are_read() -> None:
    """Invariant 149: on the model that peft has wrapped, which peft reads and does not set."""
    model = attached(lora())
    inner = model.host.get_base_model()
    inner.note = 1
    model.note = 2
    assert inner.note == model.note == 2 and "note" not in vars(model.host)
    del model.note
    assert not hasattr(inner, "note")


def test_a_host_of_diffusers() -> None:
    """Invariant 149."""
    unet = tiny_unets.make()
    unet.note = 1
    model = mmattn.attach(unet, mmattn.DecoupledAdapter(memory_dim=7))
    model.note = 2
    assert unet.note == 2 and model.unload() is unet and unet.note == 2
