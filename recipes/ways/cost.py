"""What each way costs for one request, all in turn in one run: bytes that are kept, first token, each further token."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .memories import Memories
from .ways import Way, cache_name


@torch.no_grad()
def costs(
    makers: dict[str, Callable[[Any], Way]], lm: Any, ids: Tensor, memories: Memories, rounds: int = 30
) -> dict[str, dict[str, float]]:
    """Milliseconds and kilobytes of each way, its memory being prepared; each on a copy of the language model."""
    ways = {name: make(copy.deepcopy(lm)) for name, make in makers.items()}
    prepared = {name: way.prepared(memories) for name, way in ways.items()}
    first: dict[str, list[float]] = {name: [] for name in ways}
    further: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            given = {} if prepared[name] is None else {"memory": prepared[name]}
            text = way.text(ids, memories)
            out, spent = _timed(lambda way=way, given=given, text=text: way.model(text, use_cache=True, **given))
            first[name].append(spent)
            kept = cache_name(out)
            given |= {"input_ids": out.logits[:, -1:].argmax(-1), kept: out[kept]}
            _, spent = _timed(lambda way=way, given=given: way.model(use_cache=True, **given))
            further[name].append(spent)
    return {
        name: {
            "first_ms": statistics.median(first[name][1:]),
            "token_ms": statistics.median(further[name][1:]),
            "kilobytes": way.nbytes(prepared[name], memories) / 1e3,
        }
        for name, way in ways.items()
    }


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call gives, and its milliseconds."""
    begin = time.perf_counter()
    found = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found, (time.perf_counter() - begin) * 1e3
