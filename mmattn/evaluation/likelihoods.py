"""Log-likelihoods of continuations under a language model, each row with its own memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from mmattn.data.text_batches import collate
from mmattn.memory import Memory


@torch.no_grad()
def log_likelihoods(
    model: Any, contexts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], memory: Memory | None
) -> list[tuple[float, bool]]:
    """Of each continuation log p after its context, in nats, and whether greedy decoding would write it.

    Rows are padded on the right, where no token of theirs sees the padding.

    Args:
        model: the adapted language model.
        contexts: ids of each context, one at least.
        continuations: ids of each continuation, one at least.
        memory: of as many rows; None for text alone.
    """
    rows = [[*before, *after[:-1]] for before, after in zip(contexts, continuations, strict=True)]
    device = next(model.parameters()).device
    logits = model(**collate(rows, memory).to(device).kwargs()).logits
    found = []
    for number, (row, after) in enumerate(zip(rows, continuations, strict=True)):
        own = logits[number, len(row) - len(after) : len(row)].float()
        wanted = torch.tensor(list(after), device=own.device)
        nats = F.cross_entropy(own, wanted, reduction="sum")
        found.append((-float(nats), bool((own.argmax(-1) == wanted).all())))
    return found
