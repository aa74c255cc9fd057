"""The state dict of an adapted model and `save_pretrained`: what is trained, with its settings, never the host."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from transformers import AutoModel, AutoModelForSeq2SeqLM

import mmattn
from mmattn import training
from mmattn.errors import AdapterFileError, AttachError, ConditionError, ConfigError
from tests import tiny, tiny_transformers, tiny_unets
from tests.families.building import tiny_model

# peft 0.21 asks transformers 5.23 by the old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

ROWS = 3
SETTINGS = "adapters.default.adapter_config"


def lora(lm):
    return peft.get_peft_model(lm, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_it_holds_the_adapters_and_can_be_written(family, tmp_path):
    """GPT-2 has tied weights, which safetensors would refuse."""
    model = tiny.attach(tiny.make(family))
    state = model.state_dict()
    assert set(state) == {f"adapters.{name}" for name, _ in model.adapters.named_parameters()} | {SETTINGS}
    save_file(state, tmp_path / "model.safetensors")
    other = tiny.attach(tiny.make(family), opened=False)
    assert other.load_state_dict(load_file(tmp_path / "model.safetensors")) == ([], [])
    ids, memory = tiny.text(ROWS), tiny.memory(ROWS)
    with torch.no_grad():
        assert torch.equal(other(ids, memory=memory).logits, model(ids, memory=memory).logits)
    loaded = mmattn.load(tiny.make(family), tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(ids, memory=memory).logits, model(ids, memory=memory).logits)


def test_inside_another_module():
    whole, other = (nn.ModuleDict({"reader": tiny.attach(tiny.make("llama"), opened=opened)}) for opened in (1, 0))
    state = whole.state_dict()
    assert state and all(key.startswith("reader.adapters.default.") for key in state)
    assert other.load_state_dict(state) == ([], [])
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), other.parameters(), strict=True))
    del state["reader.adapters.default.blocks.0.gate.gate"], state[f"reader.{SETTINGS}"]
    with pytest.raises(RuntimeError, match="Missing key.*gate") as seen:
        other.load_state_dict(state | {"reader.unheard": torch.zeros(1)})
    assert "host" not in str(seen.value) and "reader.unheard" in str(seen.value)


def test_a_lora_on_the_host_is_trained_too():
    model = tiny.attach(tiny.make("llama"))
    lora(model.host)
    state = model.state_dict()
    held = {key for key in state if key.startswith("host.")}
    assert held == {f"host.{name}" for name, _ in model.host.named_parameters() if "lora_" in name}
    state.pop(next(iter(held)))
    with pytest.raises(RuntimeError, match="Missing key.*lora_"):
        model.load_state_dict(state)


def test_a_state_dict_with_the_host_is_loaded_whole():
    """Those of earlier versions have it, and so has what `torch.export` asks for."""
    model, other = tiny.attach(tiny.make("llama")), tiny.attach(tiny.make("llama", seed=1), opened=False)
    state = {name: value.detach() for name, value in model.state_dict(keep_vars=True).items()}
    assert {name for name, _ in model.named_parameters()} <= set(state) and SETTINGS not in state
    assert other.load_state_dict(state) == ([], [])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_which_adapter_of_a_file(tmp_path):
    model = tiny.attach(tiny.make("llama"))
    tiny.attach(model, name="style", layers=(1,))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert mmattn.load(tiny.make("llama"), tmp_path, "style").adapter("style").config.layers == (1,)
    with pytest.raises(AdapterFileError, match="holds the adapters default, style, and none is called 'other'"):
        mmattn.load(tiny.make("llama"), tmp_path, "other")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("adapters.default.blocks.0.gate.gate"), "gate"),
        (lambda state: state.update({SETTINGS: state[SETTINGS][:-5]}), "JSON"),
        (lambda state: state["adapters.default.blocks.0.gate.gate"].fill_(torch.nan), "NaN"),
        (lambda state: state.pop(SETTINGS), "no adapter_config.json"),
    ],
)
def test_damaged_files_are_refused(damage, message, tmp_path):
    state = tiny.attach(tiny.make("llama")).state_dict()
    state = {name: value.clone() for name, value in state.items()}
    damage(state)
    save_file(state, tmp_path / "model.safetensors")
    host = tiny.make("llama")
    with pytest.raises(ValueError, match=message):
        mmattn.load(host, tmp_path)
    assert "_mmattn" not in vars(host)


def test_of_another_host(tmp_path):
    save_file(tiny.attach(tiny.make("llama")).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(AdapterFileError, match="made for a LlamaForCausalLM with 3 layers of width 32"):
        mmattn.load(tiny.make("llama", hidden_size=64), tmp_path)
    written = json.loads(bytes(load_file(tmp_path / "model.safetensors")[SETTINGS].tolist()))
    assert written["kind"] == "gated" and written["host"]["fingerprint"] is None


@pytest.fixture
def model():
    """With two adapters."""
    made = tiny.attach(tiny.make("llama"))
    tiny.attach(made, name="style", layers=(1,))
    return tiny.open_gates(made)


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


ADAPTER = {"README.md", "adapter_config.json", "adapter_model.safetensors"}


def test_the_adapters_are_written_and_loaded_again(model, tmp_path):
    model.save_pretrained(tmp_path / "both")
    assert files(tmp_path / "both") == ADAPTER | {f"style/{name}" for name in ADAPTER}
    ids, memory = tiny.text(ROWS), tiny.memory(ROWS)
    again = mmattn.load(mmattn.load(tiny.make("llama"), tmp_path / "both"), tmp_path / "both", "style")
    with torch.no_grad():
        for names in ("default", "style", ["default", "style"]):
            model.set_adapter(names)
            again.set_adapter(names)
            assert torch.equal(again(ids, memory=memory).logits, model(ids, memory=memory).logits), names


def test_some_are_written_and_other_processes_write_nothing(model, tmp_path):
    model.save_pretrained(tmp_path / "one", selected_adapters=["style"], encoder="clip")
    assert files(tmp_path / "one") == {f"style/{name}" for name in ADAPTER}
    assert '"encoder": "clip"' in (tmp_path / "one" / "style" / "adapter_config.json").read_text()
    assert "style" in mmattn.load(tiny.make("llama"), tmp_path / "one", "style").adapters
    model.save_pretrained(tmp_path / "none", is_main_process=False)
    assert not (tmp_path / "none").exists()


def test_keywords_of_other_libraries(model, tmp_path):
    """Those of transformers' and peft's `save_pretrained`, with the values that ask for nothing."""
    nothing = {"safe_serialization": True, "state_dict": None, "push_to_hub": False, "token": None, "variant": None}
    model.save_pretrained(tmp_path, **nothing, max_shard_size="1GB", save_embedding_layers="auto")
    assert files(tmp_path) >= set(ADAPTER)


def test_what_cannot_be(model, tmp_path):
    with pytest.raises(AttachError, match=r"\['other'\].*attached: default, style"):
        model.save_pretrained(tmp_path / "a", selected_adapters=["default", "other"])
    for option in ({"push_to_hub": True}, {"state_dict": {}}, {"merge": None}):
        with pytest.raises(ConfigError, match=next(iter(option))):
            model.save_pretrained(tmp_path / "a", **option)
    bare = mmattn.attach(tiny_unets.make())
    with pytest.raises(AttachError, match=r"attached: none. The host.* model\.host\.save_pretrained\(folder\)"):
        bare.save_pretrained(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    for owner in (model, type(model)):
        with pytest.raises(ConditionError, match=r"mmattn\.load\(host, folder\)"):
            owner.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("attach", "make"), [(tiny.attach, lambda: tiny.make("llama")), (tiny_unets.attach, tiny_unets.make)]
)
def test_pickling_names_the_verb(attach, make):
    """Invariant 39: of the adapted model, and of its host; unloaded, it is pickled as it was."""
    model = attach(make())
    for save in (pickle.dumps, lambda thing: torch.save(thing, io.BytesIO())):
        for thing in (model, model.host):
            with pytest.raises(TypeError, match="save_adapter"):
                save(thing)
    host = model.unload()
    again = pickle.loads(pickle.dumps(host))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in host.state_dict().items())


HOSTS: dict[str, tuple[Callable[[], Any], Any]] = {
    "language model": (lambda: tiny.make("llama"), mmattn.GatedAdapter(tiny.MEMORY_DIM, every=1)),
    "joined": (lambda: tiny.make("llama"), mmattn.adapters.JoinedAdapter(tiny.MEMORY_DIM, every=1)),
    "prefix": (lambda: tiny.make("llama"), mmattn.adapters.PrefixAdapter(3)),
    "LoRA": (lambda: training.add_lora(tiny.make("llama"), 2), mmattn.GatedAdapter(tiny.MEMORY_DIM, every=1)),
    "encoder": (
        lambda: tiny_model("bert", AutoModel),
        mmattn.GatedAdapter(tiny.MEMORY_DIM, every=1),
    ),
    "encoder and decoder": (
        lambda: tiny_model("t5", AutoModelForSeq2SeqLM),
        mmattn.GatedAdapter(tiny.MEMORY_DIM, every=1),
    ),
    "UNet": (tiny_unets.make, mmattn.DecoupledAdapter(tiny.MEMORY_DIM)),
    "transformer": (tiny_transformers.make, mmattn.DecoupledAdapter(tiny.MEMORY_DIM)),
}


def adapted(name: str, seed: int) -> Any:
    """A host with two adapters of this kind, their values random."""
    make, adapter = HOSTS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = mmattn.attach(make(), adapter)
        model.add_adapter("second", adapter)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in trained(model).values():
                parameter.normal_(0, 0.3)
    return model


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in a module"])
@pytest.mark.parametrize("name", list(HOSTS))
def test_the_state_of_one_is_set_on_another(name: str, nested: bool) -> None:
    """Invariant 158: of model and optimizer, with the names that they have."""
    models, optimizers = [adapted(name, seed) for seed in (0, 1)], []
    for model in models:
        optimizers.append(torch.optim.AdamW(trained(model).values(), lr=0.1))
        for parameter in trained(model).values():
            parameter.grad = torch.ones_like(parameter)
    optimizers[0].step()
    roots = [nn.ModuleDict({"net": model}) if nested else model for model in models]
    state = copy.deepcopy(dcp.get_model_state_dict(roots[0]))
    assert {key for key in state if not key.endswith("adapter_config")} == set(trained(roots[0]))
    assert not any(dcp.set_model_state_dict(roots[1], state))
    values = copy.deepcopy(dcp.get_optimizer_state_dict(roots[0], optimizers[0]))
    dcp.set_optimizer_state_dict(roots[1], optimizers[1], values)
    for optimizer in optimizers:
        optimizer.step()
    assert trained(models[0])
    for key, value in trained(models[0]).items():
        assert torch.equal(value, trained(models[1])[key]), key
