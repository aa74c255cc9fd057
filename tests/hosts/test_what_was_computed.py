"""What was computed before is used only where it would be computed now: every cache, every change, one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.computed import Cache, Change, outcome
from tests.hosts.host_caches import BY_NAME, CACHES, unet
from tests.hosts.host_changes import (
    ADAPTER,
    ADAPTER_AND_BACK,
    CALL,
    DIFFUSERS,
    HOST,
    IN_BLOCK,
    LORA,
    OF_LM,
    PEFT,
)

#: What stands for the rest of the host where a cache does not follow it.
_FEW = ("host: add_", "host: AdamW fused", "LoRA: scaling[…] =", "LoRA: set_adapter")


def changes_of(cache: Cache) -> list[tuple[Change, dict[str, Any]]]:
    """Return the changes that can meet a cache, with the options of its host."""
    is_unet = cache.make is unet
    lora = [*LORA, *(DIFFUSERS if is_unet else PEFT)]
    plain = [*HOST, *CALL, *([] if is_unet else OF_LM)]
    if "adapter" in cache.follows:
        plain += [*ADAPTER, ADAPTER_AND_BACK]
    if cache.name.startswith(("block", "stream")):
        plain += IN_BLOCK
    found = [(change, {}) for change in plain] + [(change, {"lora": {}}) for change in lora]
    if "host" not in cache.follows:
        found = [one for one in found if one[0].name in _FEW or not one[0].name.startswith(("host", "LoRA"))]
    return found


PAIRS = [(cache, change, options) for cache in CACHES for change, options in changes_of(cache)]
_QUICK_CACHES = ("prepared gated", "block inserted", "bank", "passages, block", "passage folder", "hidden states")
_QUICK_CHANGES = ("adapter: AdamW fused", "host: AdamW fused", "LoRA: scaling[…] =", "call: autocast bfloat16")
"""Pairs that run with every test; all others are marked slow."""


def is_quick(cache: Cache, change: Change) -> bool:
    return cache.name in _QUICK_CACHES and change.name in _QUICK_CHANGES


def cases() -> list[Any]:
    return [
        pytest.param(*pair, id=f"{pair[0].name}-{pair[1].name}", marks=() if is_quick(*pair[:2]) else pytest.mark.slow)
        for pair in PAIRS
    ]


@pytest.mark.parametrize(("cache", "change", "options"), cases())
def test_after_a_change_a_cache_answers_as_if_all_was_computed_anew_or_raises(
    cache: Cache, change: Change, options: dict[str, Any], tmp_path: Path
) -> None:
    """Invariant 7001."""
    outcome(cache, change, tmp_path, **options)
