"""How surprised a model is: nats per token, and what they add up to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmattn.errors import check_int
from mmattn.memory import Memory
from mmattn.training.captions import IGNORED, TextBatch, collate


def token_nats(model: Any, batch: TextBatch) -> Tensor:
    """−log p of each token after those before it (and the memory), (b, l - 1); 0 on the padding.

    Entry (i, j) belongs to token j + 1 of row i: nothing predicts the first.
    """
    logits = model(**batch.kwargs()).logits[:, :-1].float()
    labels = batch.labels[:, 1:]
    nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    return nats.view(labels.shape)


def mean_nats(model: Any, batch: TextBatch) -> Tensor:
    """Mean of `token_nats` over the tokens of the batch: the training loss."""
    return token_nats(model, batch).sum() / (batch.labels[:, 1:] != IGNORED).sum().clamp(min=1)


def sum_nats(model: Any, batch: TextBatch) -> tuple[Tensor, int]:
    """Sum of `token_nats` over the tokens of the batch, and how many they are: what `tune` asks of a loss."""
    return token_nats(model, batch).sum(), int((batch.labels[:, 1:] != IGNORED).sum())


@torch.no_grad()
def text_nats(
    model: Any,
    rows: Sequence[Sequence[int]],
    memory: Memory | None = None,
    memory_rows: Sequence[int] | None = None,
    *,
    batch_size: int = 32,
) -> list[list[float]]:
    """`token_nats` of many texts, one list per text, each as long as its text without its first token.

    Args:
        rows: ids of each text. memory: rows to look at; `memory_rows` says which row belongs to which text (by default
            text i reads row i). batch_size: texts at once.
    """
    check_int("batch_size", batch_size)
    out: list[list[float]] = [[] for _ in rows]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    # Texts of like length together: less padding to compute on.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for start in range(0, len(order), batch_size):
        picked = order[start : start + batch_size]
        looked = None if memory is None else [i if memory_rows is None else memory_rows[i] for i in picked]
        seen = None if memory is None else memory[torch.tensor(looked)]
        nats = token_nats(model, collate([rows[i] for i in picked], seen).to(device))
        for place, i in enumerate(picked):
            out[i] = nats[place, : len(rows[i]) - 1].tolist()
    return out


def perplexity(nats: Sequence[float]) -> float:
    """exp of the mean.

    >>> round(perplexity([math.log(12)] * 7), 6)
    12.0
    """
    return math.exp(sum(nats) / len(nats)) if nats else math.nan
