"""How many answers a reader writes rightly, and what a token costs it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch

from .expressions import World
from .readers import Alone

#: Tokens that are written to be timed.
TOKENS = 24


def measure(reader: Alone, world: World, task: str, count: int, seed: int, filled: bool = False) -> dict[str, float]:
    """Shares of answers that are right, written and teacher-forced, over expressions of held-out keys.

    Args:
        filled: the values stand there instead of the keys.
    """
    pairs = [one.pair("arithmetic" if filled else task) for one in world.asked(task, count, seed)]
    longest = max(len(right) for _, right in pairs) + 1
    right = forced = 0
    for start in range(0, count, 100):
        part = pairs[start : start + 100]
        said = reader.write(world.prompts(part), longest).tolist()
        right += sum(world.said(ids) == answer for ids, (_, answer) in zip(said, part, strict=True))
        forced += sum(reader.forced(world.batch([[pair] for pair in part])))
    return {"written": right / count, "forced": forced / count}


def token_times(readers: Mapping[str, Alone], world: World, rounds: int = 20) -> dict[str, float]:
    """Milliseconds of each further token that a reader writes, all in turn: medians over the rounds.

    Args:
        readers: by name, each on a model of its own.
        world: asks.
        rounds: how often.
    """
    prompts = world.prompts([world.asked("KV-arithmetic", 1, 0)[0].pair("KV-arithmetic")])
    spent: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(rounds + 1):
        for name, reader in readers.items():
            few, many = (_timed(reader, prompts, tokens) for tokens in (1, TOKENS))
            spent[name].append((many - few) / (TOKENS - 1))
    return {name: statistics.median(times[1:]) for name, times in spent.items()}


@torch.no_grad()
def _timed(reader: Alone, prompts: dict[str, torch.Tensor], tokens: int) -> float:
    """Milliseconds of writing so many tokens."""
    begin = time.perf_counter()
    given = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    reader.model.generate(**prompts, **reader.beside(prompts), **given)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3
