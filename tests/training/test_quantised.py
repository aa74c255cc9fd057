"""Hosts in 8 and 4 bit, by torchao and bitsandbytes, on the CPU: Invariant 35."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import mmattn
from mmattn import training
from mmattn.errors import ConditionError
from mmattn.storage.safetensors import fingerprint
from mmattn.training import lora
from tests import tiny
from tests.tiny import assert_close
from tests.training import small_run

ROWS = 3
PACKAGE = {"int8": "torchao", "bnb8": "bitsandbytes", "bnb4": "bitsandbytes"}


@pytest.fixture(scope="module", params=["int8", "bnb8", pytest.param("bnb4", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    """A way to quantise that is installed."""
    pytest.importorskip(PACKAGE[request.param])
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny host in a folder. Its inner width of 53 is no multiple of what 4-bit weights are cut into."""
    where = tmp_path_factory.mktemp("host")
    tiny.make("llama").save_pretrained(where)
    return where


def load(folder: Path, kind: str) -> Any:
    """The host in that folder, quantised."""
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        options: Any = TorchAoConfig(Int8WeightOnlyConfig())
    else:
        options = BitsAndBytesConfig(load_in_8bit=kind == "bnb8", load_in_4bit=kind == "bnb4")
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=options, device_map="cpu").eval()


def dequantised(lm: Any, plain: Any = None) -> Any:
    """A host of plain weights that are those of a quantised one: what each layer makes of the unit vectors."""
    plain = tiny.make("llama") if plain is None else plain
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            layer = lm.get_submodule(name.rpartition(".")[0])
            linear = isinstance(layer, nn.Linear)
            parameter.copy_(layer(torch.eye(layer.in_features)).T if linear else layer.weight)
    return plain


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of the adapters, on a batch of text with a memory."""
    ids = tiny.text(ROWS)
    model.adapters.zero_grad()
    model(ids, labels=ids, memory=tiny.memory(ROWS)).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.adapters.named_parameters()}


@pytest.mark.slow
def test_gradients_are_those_of_the_weights_it_stands_for(folder: Path, kind: str) -> None:
    """Invariant 35: before and after calls without gradients, in training and in evaluation mode."""
    model = tiny.attach(load(folder, kind))
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}
    got = [gradients(model.train())]
    with torch.no_grad():
        model.eval()(tiny.text(ROWS), memory=tiny.memory(ROWS))
    got += [gradients(model), gradients(model.train())]
    want = gradients(tiny.attach(dequantised(model.unload().train())).train())
    # bitsandbytes rounds what goes into a layer to 8 bit, too.
    tolerance = 0.1 if kind == "bnb8" else 1e-3
    for found in got:
        for name, value in want.items():
            assert_close(found[name], value, tolerance)
    assert all(value.abs().max() > 0 for value in want.values())


def test_the_host_stays_itself(folder: Path, kind: str, tmp_path: Path) -> None:
    """Invariant 35."""
    lm, ids, memory = load(folder, kind), tiny.text(ROWS), tiny.memory(ROWS)
    keys, kept = set(lm.state_dict()), copy.deepcopy(lm)
    model = tiny.attach(lm, opened=False)
    with torch.no_grad():
        assert torch.equal(model(ids, memory=memory).logits, model(ids).logits), "fresh"
    before = fingerprint(lm.state_dict())
    small_run.run(tmp_path, model=model, max_steps=3)
    assert all(not torch.equal(p, torch.zeros_like(p)) for n, p in model.adapters.named_parameters() if "gate" in n)
    assert fingerprint(lm.state_dict()) == before and set(lm.state_dict()) == keys
    assert before == fingerprint(kept.state_dict()), "no call changed a weight"
    with torch.no_grad():
        want = model(ids, memory=memory).logits
        again = mmattn.load(kept, tmp_path / "adapter")  # a warning if the fingerprint were another
        assert torch.equal(again(ids, memory=memory).logits, want)
    made = model.generate(ids, memory=memory, max_new_tokens=4, num_beams=2, do_sample=False)
    assert made.shape == (ROWS, 7 + 4)
    assert mmattn.doctor(model, {"input_ids": ids, "memory": memory}).failed == []
    assert model.unload() is lm and "_mmattn" not in vars(lm)


def test_4_bit_weights_that_were_laid_out_anew_are_refused(tmp_path: Path) -> None:
    """Processors with bf16 instructions do so at a call in evaluation mode, and no gradient passes any more."""
    functional = pytest.importorskip("bitsandbytes.functional")
    if not functional.has_avx512bf16():
        pytest.skip("this processor lays nothing out anew")
    tiny.make("llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    lm = load(tmp_path, "bnb4")
    with torch.no_grad():
        lm(tiny.text(ROWS))
    with pytest.raises(ConditionError, match="repacked by a call.*load the host again, and attach"):
        tiny.attach(lm)
    assert "_mmattn" not in vars(lm) and any(parameter.requires_grad for parameter in lm.parameters())
    lm = load(tmp_path, "bnb4")
    model = tiny.attach(lm)
    layer = lm.model.layers[0].mlp.up_proj
    with torch.no_grad():
        model(tiny.text(ROWS))
        assert not getattr(layer.weight.quant_state, "packing_format_for_cpu", False)
        model.unload()(tiny.text(ROWS))
    assert layer.weight.quant_state.packing_format_for_cpu, "without adapters it is its own master again"


def test_an_attached_host_in_4_bits_is_the_bare_one_to_the_rounding_of_its_kernel(tmp_path: Path) -> None:
    """Invariant 160: in evaluation mode some processors have a kernel in bfloat16, which passes no gradient."""
    pytest.importorskip("bitsandbytes")
    tiny.make("llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    ids, memory, lm = tiny.text(ROWS), tiny.memory(ROWS), load(tmp_path, "bnb4")
    with torch.no_grad():
        bare = load(tmp_path, "bnb4")(ids).logits
        model = tiny.attach(lm, opened=False)
        attached = model(ids).logits
        assert torch.equal(model(ids, memory=memory).logits, attached) and torch.equal(lm(ids).logits, attached)
        assert_close(attached, bare, 0.1)
        plain = tiny.make("llama", hidden_size=64, intermediate_size=128)
        assert_close(attached, dequantised(lm, plain)(ids).logits, 1e-4)
        assert torch.equal(model.unload()(ids).logits, bare)


def test_a_lora_knows_the_sizes_of_packed_weights(folder: Path, kind: str, tmp_path: Path) -> None:
    lm, plain = load(folder, kind), tiny.make("llama")
    assert lora._linear_sizes(lm) == lora._linear_sizes(plain)
    model = tiny.attach(training.add_lora(lm, 2))
    trained, total = model.trainable_parameters()
    assert total - trained == sum(parameter.numel() for parameter in plain.parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert any("lora_A" in name for name in before) and any("gate" in name for name in before)
    small_run.run(tmp_path, model=model, max_steps=3)
    after = dict(model.named_parameters())
    assert all(not torch.equal(after[name], value) for name, value in before.items()), "both are trained"


def rescaled(lm: Any, kind: str) -> None:
    """Another host with the same whole numbers: the scales of a layer below the adapters are doubled."""
    weight = lm.model.layers[0].mlp.up_proj.weight
    scale = {"int8": lambda: weight.scale, "bnb8": lambda: weight.SCB, "bnb4": lambda: weight.quant_state.absmax}[kind]
    scale().mul_(2)


def test_hidden_states_of_its_lower_layers_are_cached(folder: Path, kind: str, tmp_path: Path) -> None:
    """The step of the whole host, and nothing of a host whose scales alone are others."""

    def step(model: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss, _ = training.sum_nats(model, training.collate([[5, 6, 7, 8]], tiny.memory(1)))
        loss.backward()
        return {name: p.grad.clone() for name, p in model.adapters.named_parameters()} | {"loss": loss.detach()}

    if kind == "bnb8":
        # It rounds what goes into a layer together with the other texts.
        model = tiny.attach(load(folder, kind), layers=(1, 2))
        with pytest.raises(ConditionError, match="has other logits"), training.cached_hidden_states(model, tmp_path):
            pass
        return
    computed = []
    for change in (False, False, True):
        lm = load(folder, kind)
        if change:
            rescaled(lm, kind)
        model = tiny.attach(lm, layers=(1, 2)).train()
        want = step(model)
        with training.cached_hidden_states(model, tmp_path) as cache:
            for name, value in step(model).items():
                assert torch.equal(value, want[name]), name
            computed.append(cache.computed)
    assert computed == [1, 0, 1]


def test_a_lora_alone_is_trained_and_evaluated_in_the_layout_of_gradients(tmp_path: Path) -> None:
    """Invariant 160: also where evaluations come between the steps, and where no adapter holds the layout."""
    pytest.importorskip("bitsandbytes")
    tiny.make("llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "host")
    model = training.add_lora(load(tmp_path / "host", "bnb4"), rank=2)
    args = small_run.arguments(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=1, logging_strategy="no")
    ids = tiny.text(5)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = training.AdapterTrainer(model, args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    packed = [
        name
        for name, layer in model.named_modules()
        if getattr(getattr(getattr(layer, "weight", None), "quant_state", None), "packing_format_for_cpu", False)
    ]
    assert packed == []
