"""Cross-entropy of a language model in nats: per token, as a mean, as a sum, and of many texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmattn.data.text_batches import IGNORED, TextBatch, collate
from mmattn.errors import check_int
from mmattn.memory import Memory
from mmattn.training.chunked_loss import chunked_token_nats


def token_nats(model: Any, batch: TextBatch, chunk_size: int | None = None) -> Tensor:
    """Cross-entropy -log p of each token after those before it (and the memory), (b, l - 1); 0 on the padding.

    Entry (i, j) belongs to token j + 1 of row i: nothing predicts the first.

    Args:
        model: a language model, with adapters where the batch has a memory.
        batch: its labels are predicted.
        chunk_size: compute the logits of so many tokens at once, and their gradients with them, so that those of a
            large vocabulary never stand whole; None computes all at once.

    Raises:
        ConditionError: chunks, and the head is trained, or logits are no scaled or capped linear function of last
            hidden states.
        ConfigError: a chunk size below 1.
    """
    if chunk_size is not None:
        return chunked_token_nats(model, batch.kwargs(), batch.labels, chunk_size)
    logits = model(**batch.kwargs()).logits[:, :-1].float()
    labels = batch.labels[:, 1:]
    nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    return nats.view(labels.shape)


def mean_nats(model: Any, batch: TextBatch, chunk_size: int | None = None) -> Tensor:
    """Mean of `token_nats` over the tokens of the batch: the training loss."""
    return token_nats(model, batch, chunk_size).sum() / (batch.labels[:, 1:] != IGNORED).sum().clamp(min=1)


def sum_nats(model: Any, batch: TextBatch, chunk_size: int | None = None) -> tuple[Tensor, int]:
    """Sum of `token_nats` over the tokens of the batch, and the number of these tokens: a `Loss` of `train`."""
    return token_nats(model, batch, chunk_size).sum(), int((batch.labels[:, 1:] != IGNORED).sum())


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
        model: a language model, with adapters where there is a memory.
        rows: ids of each text.
        memory: its rows are attended to.
        memory_rows: for each text the row of the memory; None for row i of text i.
        batch_size: texts at once.

    Raises:
        ConfigError: a batch size below 1.
    """
    check_int("batch_size", batch_size)
    out: list[list[float]] = [[] for _ in rows]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    # Texts of like length together: less padding to compute on.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        read = None if memory is None else [i if memory_rows is None else memory_rows[i] for i in chosen]
        part = None if memory is None else memory[torch.tensor(read)]
        nats = token_nats(model, collate([rows[i] for i in chosen], part).to(device))
        for place, i in enumerate(chosen):
            out[i] = nats[place, : len(rows[i]) - 1].tolist()
    return out


def perplexity(nats: Sequence[float]) -> float:
    """exp of the mean cross-entropy per token, nan of none.

    >>> round(perplexity([math.log(12)] * 7), 6)
    12.0
    """
    return math.exp(sum(nats) / len(nats)) if nats else math.nan
