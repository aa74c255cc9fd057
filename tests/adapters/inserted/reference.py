"""What inserted tokens must amount to: one call of the host alone with embeddings before those of its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import mmattn
from mmattn.adapters import InsertedAdapter
from tests import tiny

#: Real slots of each row.
LENGTHS = [5, 2, 0, 3]


def attach(host: Any, opened: bool = True, name: str = "default", **settings: Any) -> Any:
    """A host with an adapter that inserts tokens; its gates, where it has any, wide open: tanh(20) is 1."""
    model = mmattn.attach(host, InsertedAdapter(tiny.MEMORY_DIM, **settings), name)
    if opened:
        with torch.no_grad():
            for key, parameter in model.adapter(name).named_parameters():
                if "gate" in key:
                    parameter.fill_(20.0)
    return model


def slots(model: Any, memory: mmattn.Memory, row: int = 0, name: str = "default") -> Tensor:
    """The real slots of a row as embeddings (1, m, d)."""
    with torch.no_grad():
        result = model.adapter(name).read(memory)
    remaining: Tensor = result.tokens[row : row + 1, result.real_slots()[row]]
    return remaining


def embedded(host: Any, before: Tensor, ids: Tensor) -> Tensor:
    """The embeddings of a text with others in front."""
    return torch.cat([before, host.get_input_embeddings()(ids)], 1)


def inserted(host: Any, before: Tensor, ids: Tensor) -> Tensor:
    """The answer of a host without adapters to a text after embeddings (1, m, d)."""
    with torch.no_grad():
        logits: Tensor = host(inputs_embeds=embedded(host, before, ids), use_cache=False).logits
    return logits[:, before.shape[1] :]


def weighed(host: Any, before: Tensor, ids: Tensor, gates: Sequence[float], learned: bool = False) -> Tensor:
    """The answer to a text after embeddings of which each layer hears a part, in one call of the host.

    Args:
        host: without adapters, whose layers attend to all that came before.
        before: (1, m, d).
        ids: (1, l).
        gates: how much of what they change each layer adds.
        learned: positions are learned, so that tokens stand beside the text's first ones.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    m, l = before.shape[1], ids.shape[1]
    host_attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    least = torch.finfo(torch.float32).min
    whole = torch.zeros(1, 1, m + l, m + l).masked_fill(~torch.ones(m + l, m + l).tril().bool(), least)
    alone = whole.clone()
    alone[..., m:, :m] = least

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        joined = host_attention(module, q, k, v, whole, **options)[0]
        text = host_attention(module, q, k, v, alone, **options)[0]
        gate = torch.where(torch.arange(m + l) < m, 1.0, gates[module.layer_idx])[None, :, None, None]
        return text + gate * (joined - text), None

    ALL_ATTENTION_FUNCTIONS.register("weighed", attention)
    host.config._attn_implementation = "weighed"
    positions = torch.cat([torch.arange(m) if learned else torch.arange(-m, 0), torch.arange(l)])[None]
    with torch.no_grad():
        inputs = {"inputs_embeds": embedded(host, before, ids), "position_ids": positions, "attention_mask": whole}
        logits: Tensor = host(**inputs, use_cache=False).logits
    return logits[:, m:]
