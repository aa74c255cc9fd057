"""Random language models in the shape of GPT-2 small, alone and with adapters, for every benchmark that generates."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch

import mmattn

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel
    from transformers.cache_utils import Cache

#: Width of the hidden states of passages (as MiniLM has it), tokens of a passage, and tokens of a question.
WIDTH, PASSAGE, PROMPT = 384, 64, 32


def make_host(dtype: torch.dtype, positions: int = 1024) -> GPT2LMHeadModel:
    """Return a random GPT-2 small for texts of `positions` tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = GPT2Config(n_positions=positions, bos_token_id=None, eos_token_id=None, **dropouts)
    return GPT2LMHeadModel(config).to(dtype).eval()


def make_reader(dtype: torch.dtype, positions: int = 1024) -> mmattn.hosts.AdaptedCausalLM:
    """Return the host, for texts of `positions` tokens, with three gated adapters with open gates."""
    torch.manual_seed(0)
    model = mmattn.attach(make_host(dtype, positions), mmattn.GatedAdapter(WIDTH, every=4, num_heads=8, head_dim=64))
    open_gates(model, dtype)
    return model


def from_cache(host: torch.nn.Module, cache: Cache) -> dict[str, Cache]:
    """Return the argument for a KV cache: `cache` since transformers 5.24."""
    parameters = inspect.signature(host.forward).parameters
    return {"past_key_values" if "past_key_values" in parameters else "cache": cache}


def open_gates(model: mmattn.hosts.AdaptedModel, dtype: torch.dtype) -> None:
    """Bring adapters to a dtype and their gates to 0.5, so that the memory has an effect."""
    model.adapters.to(dtype)
    for name, parameter in model.adapters.named_parameters():
        if "gate" in name:
            parameter.data.fill_(0.5)
