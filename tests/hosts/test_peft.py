"""peft before, after and around an adapter: what is trained is exactly what was asked for, in every order."""

from __future__ import annotations

import itertools

import peft
import pytest
import torch

from mmattn.errors import AttachError
from tests import tiny
from tests.tiny import differs, own

pytestmark = [
    # peft 0.21 asks transformers 5.23 by the old name.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    # By peft, which says past_key_values of every version.
    pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning"),
]

ROWS = 3
TASK = {"task_type": "CAUSAL_LM"}
KINDS = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **TASK),
    "lora and the head": lambda: peft.LoraConfig(r=2, target_modules=["v_proj"], modules_to_save=["lm_head"], **TASK),
    "lora and all biases": lambda: peft.LoraConfig(r=2, target_modules=["v_proj"], bias="all", **TASK),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], **TASK),
    "adaption prompt": lambda: peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=2, **TASK),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **TASK),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **TASK),
}


def trained(thing) -> set[str]:
    return {name for name, parameter in thing.named_parameters() if parameter.requires_grad}


def moved_by_a_step(thing, parameters, loss) -> set[str]:
    """Names of the parameters that a step of SGD moves."""
    before = {name: value.clone() for name, value in thing.named_parameters()}
    optimizer = torch.optim.SGD([one for one in parameters if one.requires_grad], lr=1.0)
    loss().backward()
    optimizer.step()
    return {name for name, value in thing.named_parameters() if not torch.equal(value, before[name])}


# p: peft comes; P: it goes; a: an adapter comes; A: it goes.
ORDERS = ["".join(order) for order in itertools.permutations("pPaA") if "".join(order).find("p") < order.index("P")]
ORDERS = [order for order in ORDERS if order.index("a") < order.index("A")]


@pytest.mark.parametrize("leave", ["unload", "merge_and_unload"])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_coming_and_going(order, leave, ids):
    """Invariant 40: while peft is there the host's own weights are frozen; while the adapter is there it is trained."""
    lm, memory = tiny.make("llama"), tiny.memory(ROWS)
    model = guest = None
    for event in order:
        if event == "p":
            guest = peft.get_peft_model(lm, KINDS["lora"]())
        elif event == "P":
            assert getattr(guest, leave)() is lm
            guest = None
        elif event == "a":
            model = tiny.attach(lm)
        else:
            assert model.unload() is lm
            model = None
        lora = {name for name, _ in lm.named_parameters() if "lora_" in name}
        assert bool(lora) == (guest is not None)
        if guest is not None or model is not None:
            assert trained(lm) == lora, event
        if model is not None:
            assert trained(model.adapters) == {name for name, _ in model.adapters.named_parameters()}
            with torch.no_grad():
                assert differs(model(ids, memory=memory).logits, lm(ids).logits), event
    with torch.no_grad():
        assert torch.equal(lm(ids).logits, own(ids)) or leave == "merge_and_unload"
    assert trained(lm) in (set(), {name for name, _ in lm.named_parameters()})


def test_on_the_model_that_peft_returned(ids):
    """Around: the host is the `PeftModel` itself."""
    guest = peft.get_peft_model(tiny.make("llama"), KINDS["lora"]())
    asked, memory = trained(guest), tiny.memory(ROWS)
    model = tiny.attach(guest)
    assert trained(guest) == asked
    both = {f"host.{name}" for name in asked} | {f"adapters.{name}" for name, _ in model.adapters.named_parameters()}
    assert trained(model) == both
    assert moved_by_a_step(model, model.parameters(), lambda: model(ids, labels=ids, memory=memory).loss) == both
    model.unload()
    assert trained(guest) == asked


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_prompts_beside_a_memory(kind, ids):
    """Tokens of peft before the text: rows are still rows, and both are read."""
    lm, memory = tiny.make("llama"), tiny.memory(ROWS)
    model = tiny.attach(lm)
    guest = peft.get_peft_model(lm, KINDS[kind]())
    # A prefix is a cache that was read without a memory.
    arrived = None if kind == "prompt" else torch.full(ids.shape, memory.length)
    with torch.no_grad(), model.condition(memory, arrived=arrived):
        seeing = guest(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        # peft 0.21 gives its prefix to `generate` by a name that transformers 5.24 leaves aside.
        if kind == "prompt" or not tiny.IS_5_24:
            given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            written = guest.generate(**given, max_new_tokens=1, do_sample=False)
            assert torch.equal(written[:, -1], seeing[:, -1].argmax(-1))
    with torch.no_grad():
        blind = guest(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    assert differs(seeing, blind)


# peft put on the adapted model instead of the host


PUT = {
    "get_peft_model": peft.get_peft_model,
    "PeftModel": peft.PeftModelForCausalLM,
    "get_peft_model, mixed": lambda model, config: peft.get_peft_model(model, config, mixed=True),
    "inject_adapter_in_model": lambda model, config: peft.inject_adapter_in_model(config, model),
}


@pytest.mark.parametrize(
    ("way", "kind"), [*(("get_peft_model", kind) for kind in KINDS), *((way, "lora") for way in list(PUT)[1:])]
)
def test_peft_on_the_adapted_model_is_refused_with_the_right_call(way, kind, ids):
    """It would freeze the adapter, or put a LoRA into it, and say nothing."""
    model, memory = tiny.attach(tiny.make("llama", attention_bias="biases" in kind)), tiny.memory(ROWS)
    asked, parts = trained(model), [name for name, _ in model.named_modules()]
    with torch.no_grad():
        want = model(ids, memory=memory).logits
    with pytest.raises(AttachError, match=r"get_peft_model\(model\.host"):
        PUT[way](model, KINDS[kind]())
    assert trained(model) == asked and [name for name, _ in model.named_modules()] == parts
    with torch.no_grad():
        assert torch.equal(model(ids, memory=memory).logits, want)
    # The call that the message names.
    peft.get_peft_model(model.host, KINDS[kind]())
    assert {name for name in trained(model) if name.startswith("adapters.")} == {
        f"adapters.{name}" for name, _ in model.adapters.named_parameters()
    }


def test_a_saved_lora_on_the_adapted_model_is_refused(tmp_path):
    peft.get_peft_model(tiny.make("llama"), KINDS["lora"]()).save_pretrained(tmp_path)
    model = tiny.attach(tiny.make("llama"))
    with pytest.raises(AttachError, match=r"get_peft_model\(model\.host"):
        peft.PeftModel.from_pretrained(model, tmp_path)
    peft.PeftModel.from_pretrained(model.host, tmp_path)


def test_others_may_ask_an_adapted_model_for_its_peft_config():
    """Loggers of training do; what they are told is the host's."""
    model = tiny.attach(tiny.make("llama"))
    assert not hasattr(model, "peft_config")
    guest = peft.get_peft_model(tiny.make("llama"), KINDS["lora"]())
    assert tiny.attach(guest).peft_config is guest.peft_config
