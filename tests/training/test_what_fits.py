"""What docs/large-hosts.md says of the memory of a step, counted on hosts of that size without memory of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig, LlamaForCausalLM

import mmattn
from mmattn.adapters.base import build_layers
from mmattn.adapters.protocols import Site
from mmattn.training.losses import AUTO_CHUNK
from tests import tiny

PAGE = Path(__file__).resolve().parents[2] / "docs" / "large-hosts.md"
META = torch.device("meta")
ROWS, TOKENS, SLOTS, WIDTH = 8, 512, 729, 1152
#: By column of the table, the host's sizes and the layers with an adapter.
HOSTS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "1.2 B": (
        {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "tie_word_embeddings": True},
        (8, 10, 12, 14),
    ),
    "8 B": ({"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336}, (16, 20, 24, 28)),
}


def table() -> dict[str, list[float]]:
    """The rows of the table, GB of each host by what they are of."""
    lines = PAGE.read_text(encoding="utf-8").split("## What fits on one card")[1].split("\n## ")[0].splitlines()
    cells = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert cells[0][1:] == list(HOSTS)
    return {name: [float(value) for value in values] for name, *values in cells[2:]}


def fused(
    q: Tensor, k: Tensor, v: Tensor, mask: None = None, dropout_p: float = 0.0, is_causal: bool = False, **settings: Any
) -> Tensor:
    """Attention as cards compute it, which keeps no scores; tensors without values would take the plain one."""
    assert mask is None
    scale = settings.get("scale")
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]


@pytest.fixture(autouse=True)
def attention_of_a_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", fused)
    yield


def make(name: str) -> tuple[Any, Any]:
    """A host in bfloat16, and its adapter in float32."""
    sizes, layers = HOSTS[name]
    config = LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256)
    with META:
        host = LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False).train()
    settings = mmattn.GatedAdapter(WIDTH, layers=layers, num_heads=8, head_dim=64)
    sites = [Site(layer, "after", f"model.layers.{layer}", config.hidden_size, META) for layer in layers]
    adapter = build_layers(settings, sites).to(META)
    memory = torch.empty(ROWS, SLOTS, WIDTH, device=META)
    for layer in layers:
        block = adapter.block(layer)
        host.model.layers[layer].register_forward_hook(
            lambda module, args, out, block=block: block(out, block.attention.project(memory))
        )
    return host, adapter


def gigabytes_kept(host: Any, adapter: nn.Module) -> float:
    """What a forward pass up to the head keeps for the backward pass, beside weights."""
    weights = {
        one.untyped_storage()._cdata for part in (host, adapter) for one in (*part.parameters(), *part.buffers())
    }
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    ids, positions = torch.zeros(ROWS, TOKENS, dtype=torch.long, device=META), torch.arange(TOKENS, device=META)[None]
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        states = host.model.embed_tokens(ids)
        rotation = host.model.rotary_emb(states, positions)
        for layer in host.model.layers:
            states = layer(states, attention_mask=None, position_ids=positions, position_embeddings=rotation)
        host.model.norm(states)
    return sum(storage.nbytes() for storage in kept.values()) / 1e9


@pytest.mark.parametrize("name", HOSTS)
def test_memory_of_a_step(name: str) -> None:
    """Invariant 218: within 5 %, or 0.1 GB, of weights, states of the optimizer, activations and logits."""
    rows, column = table(), list(HOSTS).index(name)
    said = {what: values[column] for what, values in rows.items()}
    host, adapter = make(name)
    trained = sum(one.nbytes for one in adapter.parameters())
    counted = {
        "weights of the host, bfloat16": sum(one.nbytes for one in host.parameters()) / 1e9,
        "adapters, their gradients and two moments of AdamW, float32": 4 * trained / 1e9,
        "activations": gigabytes_kept(host, adapter),
    }
    tokens, vocabulary = ROWS * TOKENS, host.config.vocab_size
    # Logits and their gradients in bfloat16, log-probabilities and their gradients in float32.
    counted["logits, whole"] = tokens * vocabulary * (2 + 2 + 4 + 4) / 1e9
    # Those of a chunk in bfloat16, in float32, and their gradients in bfloat16; gradients of all hidden states.
    states = tokens * host.config.hidden_size * 2
    counted["logits, in chunks of 256 (the default)"] = (AUTO_CHUNK * vocabulary * (2 + 4 + 2) + states) / 1e9
    tiny.checkpoint(host, False)
    counted["activations with `checkpoint_host`"] = gigabytes_kept(host, adapter)
    fixed = sum(counted[what] for what in list(counted)[:2]) + counted["logits, in chunks of 256 (the default)"]
    counted["together"] = fixed + counted["activations"]
    counted["together with `checkpoint_host`"] = fixed + counted["activations with `checkpoint_host`"]
    assert said == pytest.approx(counted, rel=0.05, abs=0.1)
