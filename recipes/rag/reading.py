"""Passages as the frozen language model reads them, and an adapter that begins as a look-up in what was read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def read(lm: Any, texts: Sequence[list[int]], layer: int, batch_size: int = 64) -> list[Tensor]:
    """Each text of ids as slots (r, 2 d): the state before each token, and the token's embedding.

    A state stands for what came before, so that the state of a token in another text resembles it where the same words
    return, and the embedding says what came then: keys and values of a kNN-LM (arXiv 1911.00172), to be attended to.
    Both are scaled to a mean square of 1.
    """
    embeddings = lm.get_input_embeddings().weight
    slots: list[Tensor] = []
    for start in range(0, len(texts), batch_size):
        part = texts[start : start + batch_size]
        longest = max(map(len, part))
        # After its end a text may go on with anything: no token looks ahead.
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in part], device=embeddings.device)
        states = lm(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[layer]
        before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
        both = torch.cat([_scaled(before), _scaled(embeddings[ids])], -1).cpu()
        slots += [row[: len(text)].clone() for row, text in zip(both, part, strict=True)]
    return slots


def _scaled(states: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(states.float(), states.shape[-1:])


@torch.no_grad()
def begin_as_lookup(adapter: Any, sharpness: float = 6.0) -> None:
    """Make a fresh adapter over `read` slots begin as a look-up: it still adds nothing until its gate opens.

    Queries and keys are the same map of states, so that like finds like, and what is attended to goes out through the
    transpose of the map it came in by, so that a word found is the word said. From random maps 250 steps
    learned little of it.
    """
    for block in adapter.blocks.values():
        attention = block.attention
        width = attention.q_proj.in_features
        attention.q_proj.weight.mul_(sharpness**0.5)
        attention.kv_proj.k_proj.weight.zero_()[:, :width] = attention.q_proj.weight
        attention.kv_proj.v_proj.weight.zero_()[:, width:] = attention.out_proj.weight.T
