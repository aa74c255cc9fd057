"""Checkpoints of peft's prefix tuning and cartridges answer as in peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mmattn
from mmattn.errors import AdapterFileError, NonFiniteError
from mmattn.testing.case import no_trace, traces
from tests import tiny
from tests.adapters.joined_hosts import CLOSE, answer, distance
from tests.adapters.prefix.test_adapter import P

# Both by peft.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning"),
]


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
