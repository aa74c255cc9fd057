"""What passages before a text must amount to: one call of the host alone, with masks and positions of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import mmattn
from tests import tiny

PASSAGES = ((5, 9, 40, 33, 12, 77, 8), (60, 61, 3, 9, 18, 24, 90, 91, 7, 5, 44), (70, 21, 22, 23, 31))
TEXT = (80, 14, 15, 99, 6, 71, 35, 52, 20, 11, 88, 64, 13)


def reader(family: str, prefix: Sequence[int] = (), **changes: Any) -> tuple[Any, mmattn.hosts.PassageCache]:
    """A tiny host with a passage adapter, which has read the passages, after a prefix if there is one."""
    model = mmattn.attach(tiny.make(family, **changes), mmattn.adapters.PassageAdapter())
    passages = mmattn.hosts.PassageCache(model, prefix=prefix)
    assert passages.add(PASSAGES, progress=False) == [0, 1, 2]
    return model, passages


def blocks(host: Any, rows: Sequence[int], text: Sequence[int] = TEXT, parallel: bool = False) -> Tensor:
    """The answer to a text after passages that do not see each other, (1, l, vocabulary), in one call of the host.

    Args:
        host: without adapters.
        rows: numbers of the passages.
        text: ids.
        parallel: passages stand side by side at the first positions.
    """
    parts = [PASSAGES[number] for number in rows]
    before = sum(map(len, parts))
    ids = torch.tensor([[*(one for part in parts for one in part), *text]])
    owner = torch.tensor([*(n for n, part in enumerate(parts) for _ in part), *[-1] * len(text)])
    positions = torch.arange(ids.shape[1])
    if parallel:
        longest = max(map(len, parts), default=0)
        positions = torch.cat([*(torch.arange(len(part)) for part in parts), longest + torch.arange(len(text))])
    order = torch.arange(len(owner))
    seen = (order[:, None] >= order) & ((owner[:, None] == owner) | (owner[:, None] == -1))
    windowed = seen & (positions[:, None] - positions < (getattr(host.config, "sliding_window", None) or 1 << 30))
    plain, near = _as_mask(host, seen), _as_mask(host, windowed)
    kinds = set(getattr(host.config, "layer_types", None) or ())
    mask: Any = near if kinds <= {"sliding_attention"} else plain
    if "sliding_attention" in kinds and "full_attention" in kinds:
        mask = {"full_attention": plain, "sliding_attention": near}
    if host.config.model_type == "mistral":
        mask = near
    with torch.no_grad():
        answer: Tensor = host(ids, attention_mask=mask, position_ids=positions[None], use_cache=False).logits
    return answer[:, before:]


def _as_mask(host: Any, seen: Tensor) -> Tensor:
    least = torch.finfo(torch.float32).min
    return torch.zeros(1, 1, *seen.shape).masked_fill(~seen, least)


def text(rows: int = 1) -> Tensor:
    """The ids of the text, for several rows."""
    return torch.tensor([TEXT] * rows)
