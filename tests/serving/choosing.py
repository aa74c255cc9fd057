"""Requests for texts, and the tokens that are to be chosen by the definition of each field."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

WIDTH = 13
VECTORS = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(3)).tolist()


def complete(client: Any, prompt: Any, memory: Any = VECTORS, **options: Any) -> Any:
    extra = {"memory": memory} | {name: options.pop(name) for name in ("top_k",) if name in options}
    return client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **{"max_tokens": 7} | options)


def ids_of(pipe: Any, question: str) -> list[int]:
    return list(pipe.make_prompt(question))


@torch.no_grad()
def by_definition(pipe: Any, ids: list[int], tokens: int, **settings: Any) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens chosen one by one from logits without a cache, as OpenAI describes its fields; and the logits."""
    generator = torch.Generator().manual_seed(settings.get("seed", 0))
    written: list[int] = []
    rows = []
    for _ in range(tokens):
        text = torch.tensor([[*ids, *written]])
        logits = pipe.model(text, memory=torch.tensor([VECTORS])).logits[0, -1]
        rows.append(logits)
        scores = logits.clone()
        for token, count in Counter(written).items():
            scores[token] -= settings.get("presence_penalty", 0) + count * settings.get("frequency_penalty", 0)
        if not settings.get("temperature"):
            token = int(scores.argmax())
        else:
            probability = (scores / settings["temperature"]).softmax(-1)
            order = probability.argsort(descending=True).tolist()
            kept, total = order[: settings.get("top_k") or len(order)], 0.0
            allowed = set()
            mass = sum(float(probability[one]) for one in kept)
            for one in kept:
                if total / mass < settings.get("top_p", 1):
                    allowed.add(one)
                total += float(probability[one])
            probability[[one for one in order if one not in allowed]] = 0
            token = int(torch.multinomial(probability / probability.sum(), 1, generator=generator))
        written.append(token)
        if token == pipe.tokenizer.eos_token_id:
            break
    return written, rows


def text_of(pipe: Any, tokens: list[int]) -> str:
    return str(pipe.tokenizer.decode(tokens, skip_special_tokens=True)).strip()
