"""The plain baseline: a kNN-LM (arXiv 1911.00172) over questions with their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmattn import training
from mmattn.retrieval import knn_log_probs

from .answering import answer_batch, device_of

NEAREST, TEMPERATURE, WEIGHT = 16, 10.0, 0.9


@torch.no_grad()
def answer_states(
    lm: Any, tokenizer: Any, prompts: Sequence[str], answers: Sequence[str], batch: int = 64
) -> tuple[Tensor, Tensor]:
    """A datastore: the last states (n, d) before each token of the answers, and those tokens (n,)."""
    keys, values = [], []
    for start in range(0, len(prompts), batch):
        given = answer_batch(tokenizer, prompts[start : start + batch], answers[start : start + batch], None)
        given = given.to(device_of(lm))
        states = lm(**given.kwargs(), output_hidden_states=True, use_cache=False).hidden_states[-1]
        said = given.labels[:, 1:]
        keys.append(states[:, :-1][said != -100])
        values.append(said[said != -100])
    return torch.cat(keys), torch.cat(values)


@torch.no_grad()
def answer_by_neighbours(
    lm: Any, tokenizer: Any, prompts: Sequence[str], keys: Tensor, values: Tensor, longest: int = 24
) -> list[str]:
    """What the mixture writes after each prompt, greedily."""
    begin, end = training.bos_and_eos(tokenizer)
    out = []
    for text in prompts:
        ids = torch.tensor([[begin, *tokenizer(text)["input_ids"]]], device=device_of(lm))
        start = ids.shape[1]
        while ids.shape[1] - start < longest:
            made = lm(input_ids=ids, output_hidden_states=True, use_cache=False)
            mixed = knn_log_probs(
                keys, values, made.hidden_states[-1][:, -1:], made.logits[:, -1:],
                top_k=NEAREST, temperature=TEMPERATURE, weight=WEIGHT,
            )  # fmt: skip
            token = int(mixed[0, -1].argmax())
            if token == end:
                break
            ids = torch.cat([ids, torch.tensor([[token]], device=ids.device)], 1)
        out.append(tokenizer.decode(ids[0, start:]).strip())
    return out
