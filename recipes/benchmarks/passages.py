"""Passages that a host has read before, against the same passages in the prompt: time to the first token.

    python -m recipes.benchmarks passages [--dtype float32 bfloat16] [--quick]

Passages of 64 tokens and a question of 32, on hosts of random weights in the shapes of GPT-2 small and of a Llama of
twelve layers with 4 of 12 heads for keys and values. "Selected" puts keys and values together for the request, as a
search would; "the same again" is a later request for the same passages; "16 tokens again" reads the first tokens of
each passage again where they stand, which a host with learned positions cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import mmattn
from recipes.benchmarks.hosts import PASSAGE, PROMPT, make_host
from recipes.benchmarks.timing import Tables, interleaved, name_of, ratios

PASSAGES, QUICK_PASSAGES = 16, 3
RECOMPUTED = 16
WORDS = 30_000


def make_llama(dtype: torch.dtype, positions: int) -> Any:
    """Return a random Llama of 12 layers and width 768."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=positions,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


SHAPES: dict[str, Callable[[torch.dtype, int], Any]] = {"GPT-2 small": make_host, "Llama": make_llama}


@torch.no_grad()
def measure(shape: str, dtype: torch.dtype, passages: int = PASSAGES, seconds: float = 20.0) -> dict[str, float]:
    """Return the time to the first token for each unit of the prompt's, and MB of keys and values."""
    length = passages * PASSAGE
    host = SHAPES[shape](dtype, length + PROMPT + 1)
    model = mmattn.attach(host, mmattn.adapters.PassageAdapter())
    texts, question = torch.randint(1, WORDS, (passages, PASSAGE)), torch.randint(1, WORDS, (1, PROMPT))
    cache = mmattn.hosts.PassageCache(model)
    cache.add(list(texts), progress=False)
    row, prompt = list(range(passages)), torch.cat([texts.reshape(1, -1), question], 1)
    prepared = cache.select([row])
    options = {"use_cache": True, "logits_to_keep": 1}
    candidates = {
        "prompt": lambda: host(prompt, **options),
        "selected": lambda: model(question, memory=cache.select([row]), **options),
        "the same again": lambda: model(question, memory=prepared, **options),
        "the question alone": lambda: host(question, **options),
    }
    if shape == "Llama":
        candidates[f"{RECOMPUTED} tokens again"] = lambda: model(
            question, memory=cache.select([row], recomputed_tokens=RECOMPUTED), **options
        )
    times = interleaved(candidates, seconds=seconds)
    return {"MB": cache.nbytes() / 1e6} | ratios(times, "prompt")


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield passages that the host has read before, for each unit of the same passages in the prompt."""
    options: dict[str, Any] = {"passages": QUICK_PASSAGES, "seconds": 1.0} if quick else {}
    rows = {f"{shape}, {name_of(dtype)}": measure(shape, dtype, **options) for shape in SHAPES for dtype in dtypes}
    yield "Passages read before: time to the first token for each unit of reading them in the prompt", "host", rows
