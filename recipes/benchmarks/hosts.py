"""Language models of random weights in the shapes of models that people use, for every benchmark that needs one."""

from __future__ import annotations

import inspect
from typing import Any

import torch

import mmattn

_12 = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4}
_1B = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
_SMALL = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
#: Model type and config of transformers by the name of a shape.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2 small": ("gpt2", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "Llama": ("llama", {**_12, "intermediate_size": 2048, "vocab_size": 32_000}),
    "Llama 1B": ("llama", {**_1B, "intermediate_size": 8192, "vocab_size": 128_256, "tie_word_embeddings": True}),
    "small": ("llama", {**_SMALL, "intermediate_size": 256, "vocab_size": 997}),
}


def make_host(dtype: torch.dtype, positions: int = 1024, shape: str = "GPT-2 small") -> Any:
    """Return a frozen language model of a shape, for texts of at most `positions` tokens."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    family, sizes = SHAPES[shape]
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = CONFIG_MAPPING[family](max_position_embeddings=positions, **special, **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).requires_grad_(False).eval()


def from_cache(host: torch.nn.Module, cache: object) -> dict[str, Any]:
    """Return the argument for a KV cache: `cache` since transformers 5.24."""
    parameters = inspect.signature(host.forward).parameters
    return {"past_key_values" if "past_key_values" in parameters else "cache": cache}


def open_gates(model: mmattn.hosts.AdaptedModel, dtype: torch.dtype) -> None:
    """Bring adapters to a dtype and their gates to 0.5, so that the memory has an effect."""
    model.adapters.to(dtype)
    for name, parameter in model.adapters.named_parameters():
        if "gate" in name:
            parameter.data.fill_(0.5)
