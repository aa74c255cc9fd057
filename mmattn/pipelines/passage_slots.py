"""Passages as slots of a memory: what a frozen language model makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def read_passages(host: Any, texts: Sequence[Sequence[int]], layer: int, batch_size: int = 64) -> list[Tensor]:
    """Each text of ids as slots (r, 2 d): the state before each token, and the token's embedding.

    A state stands for what came before, so that the state of a token in another text resembles it where the same words
    return, and the embedding says what came then: keys and values of a kNN-LM (arXiv 1911.00172), to be attended to.
    Both are scaled to a mean square of 1.

    Args:
        host: a language model without adapters.
        texts: ids of each passage.
        layer: whose hidden states are taken.
        batch_size: passages at once.
    """
    embeddings = host.get_input_embeddings().weight
    slots: list[Tensor] = []
    for start in range(0, len(texts), batch_size):
        part = texts[start : start + batch_size]
        longest = max(map(len, part))
        # After its end a text may go on with anything: no token looks ahead.
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in part], device=embeddings.device)
        states = host(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[layer]
        before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
        both = torch.cat([_scaled(before), _scaled(embeddings[ids])], -1)
        slots += [row[: len(text)].clone() for row, text in zip(both, part, strict=True)]
    return slots


def searchable(text: str) -> str:
    """The text, or a full stop where there is nothing in it that a text encoder reads: blanks, half a character."""
    return text if any(letter.isprintable() and letter not in " \ufffd" for letter in text) else "."


def _scaled(states: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(states.float(), states.shape[-1:])
