"""`save_pretrained` of an adapted model writes the adapters, as peft does; that of the host writes the host."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import mmattn
from mmattn.errors import AttachError, ConditionError, ConfigError
from tests import tiny, tiny_unets

ROWS = 3


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


def test_that_of_the_host_writes_the_host(model, tmp_path):
    model.host.save_pretrained(tmp_path / "attached")
    tiny.make("llama").save_pretrained(tmp_path / "own")
    for name in files(tmp_path / "own"):
        assert (tmp_path / "attached" / name).read_bytes() == (tmp_path / "own" / name).read_bytes()
    host = LlamaForCausalLM.from_pretrained(tmp_path / "attached")
    assert all(torch.equal(value, host.state_dict()[name]) for name, value in model.host.state_dict().items())


def test_a_unet(tmp_path):
    model = tiny_unets.attach(tiny_unets.make())
    model.save_pretrained(tmp_path)
    assert files(tmp_path) == ADAPTER
    again = mmattn.load(tiny_unets.make(), tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.adapters.parameters(), model.adapters.parameters(), strict=True))
