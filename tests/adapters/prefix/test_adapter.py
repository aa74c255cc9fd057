"""A prefix is a cache with its keys and values, from passages what these are in the prompt, from peft what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

import mmattn
from mmattn.adapters import PassageAdapter, PrefixAdapter
from mmattn.errors import AdapterFileError, ConditionError, NonFiniteError, ShapeError
from mmattn.testing.case import no_trace, traces
from tests import tiny
from tests.adapters.joined_hosts import CLOSE, LEARNED, REACHED, answer, distance
from tests.kv_store.passage_hosts import PASSAGES, text as passage_text

P, NEW = 4, 6
# Both by peft.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning"),
]


def adapted(family: str, prefixes: int = 3, **changes: Any) -> Any:
    """A tiny host with prefixes of weights as large as its own keys and values."""
    model = mmattn.attach(tiny.make(family, **changes), PrefixAdapter(P, prefixes))
    with torch.no_grad():
        for number, parameter in enumerate(model.adapters.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return model


def with_cache(host: Any, adapter: Any, prefix: int, ids: Tensor) -> Tensor:
    """What a host without adapters answers to one row whose cache holds a prefix."""
    cache = DynamicCache(config=host.config)
    for layer in adapter.layers:
        block = adapter.prefix(layer)
        cache.update(block.keys[[prefix]].detach(), block.values[[prefix]].detach(), layer)
    with torch.no_grad():
        logits: Tensor = host(ids, **tiny.going_on(cache)).logits
    return logits


@pytest.mark.parametrize("family", REACHED)
def test_hosts(family: str) -> None:
    """On every host that is reached a prefix is a cache of its keys and values, and a row without one is the host's."""
    host = tiny.make(family)
    ids = tiny.text(4, 11)
    host_output = answer(host, ids)
    model = mmattn.attach(host, PrefixAdapter(P, 3))
    model.adapters.load_state_dict(adapted(family).adapters.state_dict())
    memory = torch.tensor([2, -1, 0, 2])
    result = answer(model, ids, memory=memory)
    assert torch.equal(result[1], host_output[1])
    for row in (0, 2, 3):
        expected = with_cache(tiny.make(family), model.adapter("default"), int(memory[row]), ids[[row]])
        assert distance(result[[row]], expected) <= CLOSE
    assert tiny.differs(result[[0, 2, 3]], host_output[[0, 2, 3]])
    for inputs in ([None] * 4, [[]] * 4, torch.full((4,), -1)):
        assert torch.equal(answer(model, ids, memory=inputs), host_output)


@pytest.mark.parametrize("family", ["llama", "gemma2", "glm", "smollm3", "gpt2", "opt", "mistral"])
def test_begun_from_passages(family: str) -> None:
    """Begun from passages, prefixes are these in the prompt; several in a row are passages read one by one."""
    model = mmattn.attach(tiny.make(family), PassageAdapter(), "read")
    passages = mmattn.hosts.PassageCache(model)
    passages.add([one[:5] for one in PASSAGES], progress=False)
    model.add_adapter("prefix", PrefixAdapter(5, 3))
    adapter: Any = model.adapter("prefix")
    adapter.copy_passages(passages.select([[0], [1], [2]]), model.adapter("read"))
    for number, passage in enumerate(PASSAGES):
        whole = torch.tensor([[*passage[:5], *passage_text()[0].tolist()]])
        expected = answer(tiny.make(family), whole)[:, 5:]
        assert distance(answer(model, passage_text(), memory={"prefix": [number]}), expected) <= CLOSE
    rows = [[2, 0], [1], [], [0, 1, 2]]
    if family in LEARNED:
        with pytest.raises(ConditionError, match="learned positions"):
            answer(model, passage_text(4), memory={"prefix": rows})
        return
    result = answer(model, passage_text(4), memory={"prefix": rows})
    expected = answer(model, passage_text(4), memory={"read": passages.select(rows)})
    assert distance(result, expected) <= CLOSE and torch.equal(result[2], expected[2])
    with torch.no_grad():
        adapter.copy_passages(passages.select([[1]]), model.adapter("read"), [0])
    again = answer(model, passage_text(1), memory={"prefix": [0]})
    assert distance(again, result[[1]]) <= CLOSE
    for select, numbers in (([[0]], None), ([[0]], [3]), ([[]], [0])):
        with pytest.raises(ShapeError, match="virtual tokens"):
            adapter.copy_passages(passages.select(select), model.adapter("read"), numbers)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients(family: str) -> None:
    """Gradients reach the keys and values of the prefixes in use."""
    ids, model = tiny.text(3), adapted(family)
    with model.condition([[1, 0], None, 1] if family == "llama" else [1, None, 0]):
        for _ in range(2):  # two graphs in one block
            model(ids, labels=ids).loss.backward()
    for name, one in model.adapters.named_parameters():
        assert one.grad[:2].flatten(1).any(1).all() and not one.grad[2].any(), name


def test_what_is_refused() -> None:
    """Other memories, prefixes that are not there, two adapters before one text."""
    model, ids = adapted("llama"), tiny.text(2)
    host = answer(model, ids)
    for memory in (tiny.memory(2), "01", torch.zeros(2), [True, 0], [[0, None]], [0.5], torch.zeros(2, 1).long()):
        with pytest.raises(ShapeError, match="prefixes|reads no vectors"):
            model(ids, memory=memory)
    for memory in ([0, 3], [0, [-1]], torch.tensor([0, -2])):
        with pytest.raises(ShapeError, match="prefixes 0 to 2"):
            model(ids, memory=memory)
    model.add_adapter("more", PrefixAdapter(2))
    with pytest.raises(ConditionError, match="before one text"):
        model(ids, memory={"default": [0, 1], "more": [0, 0]})
    assert torch.equal(answer(model, ids), host)


def checkpoint(folder: Path, family: str = "llama", kind: str = "prefix", tokens: int = P, **settings: Any) -> Any:
    """A model of peft with random virtual tokens, written to a folder."""
    import peft

    kinds = {"prefix": peft.PrefixTuningConfig, "cartridge": getattr(peft, "CartridgeConfig", None)}
    if kinds[kind] is None:
        pytest.skip("this peft has no cartridges")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tokens)
        config = kinds[kind](task_type="CAUSAL_LM", num_virtual_tokens=tokens, **settings)
        model = peft.get_peft_model(tiny.make(family), config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["prefix", "projected", "cartridge"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "mistral"])
def test_read(family: str, kind: str, tmp_path: Path) -> None:
    """What peft wrote answers here as there, within 1e-5."""
    settings = {"prefix_projection": True, "encoder_hidden_size": 12} if kind == "projected" else {}
    theirs = checkpoint(tmp_path, family, kind.replace("projected", "prefix"), **settings)
    ids = tiny.text(2, 11)
    expected = answer(theirs, ids, attention_mask=torch.ones_like(ids))
    model = mmattn.hosts.load_prefix_tuning(tiny.make(family), tmp_path)
    assert distance(answer(model, ids, memory=[0, 0]), expected) <= CLOSE
    assert distance(answer(model, ids), expected) > 100 * CLOSE
    written = ids
    for _ in range(5):  # peft's own `generate` loses its prefix under transformers 5.24
        logits = answer(theirs, written, attention_mask=torch.ones_like(written))
        written = torch.cat([written, logits[:, -1:].argmax(-1)], 1)
    inputs: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, memory=[0, 0], **inputs), written)


def test_several_checkpoints(tmp_path: Path) -> None:
    """Several checkpoints are the prefixes of one adapter, each row its own."""
    ids, folders = tiny.text(2), [tmp_path / "a", tmp_path / "b"]
    theirs = [checkpoint(folder, kind=kind) for folder, kind in zip(folders, ("prefix", "cartridge"), strict=True)]
    model = mmattn.hosts.load_prefix_tuning(tiny.make("llama"), folders)
    result = answer(model, ids, memory=[0, 1])
    for row, one in enumerate(theirs):
        expected = answer(one, ids[[row]], attention_mask=torch.ones(1, 7))
        assert distance(result[[row]], expected) <= CLOSE
    checkpoint(tmp_path / "c", tokens=P + 1)
    with pytest.raises(AdapterFileError, match="one number of virtual tokens"):
        mmattn.hosts.load_prefix_tuning(model, [*folders, tmp_path / "c"], "more")


def test_bad_files(tmp_path: Path) -> None:
    """Other kinds, other sizes, torn or missing files are refused, and the host is as it was."""
    import peft

    good = tmp_path / "good"
    checkpoint(good)
    host = tiny.make("llama")
    before = traces(host)
    lora = tmp_path / "lora"
    peft.get_peft_model(tiny.make("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(lora)
    checkpoint(tmp_path / "deep", num_layers=2)
    torn = tmp_path / "torn"
    checkpoint(torn)
    path = torn / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    other = tmp_path / "other"
    checkpoint(other)
    save_file({"weights": torch.zeros(2, 3)}, other / "adapter_model.safetensors")
    for folder in (lora, tmp_path / "deep", torn, other, tmp_path / "none"):
        with pytest.raises(AdapterFileError):
            mmattn.hosts.load_prefix_tuning(host, folder)
        no_trace(host, before, folder.name)
    tensors = load_file(good / "adapter_model.safetensors")
    tensors["prompt_embeddings"][0, 0] = torch.nan
    save_file(tensors, good / "adapter_model.safetensors")
    with pytest.raises(NonFiniteError):
        mmattn.hosts.load_prefix_tuning(host, good)
    no_trace(host, before, "NaN")
