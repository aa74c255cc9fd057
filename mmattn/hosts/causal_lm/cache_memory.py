"""Caches of hosts that were read with a memory: one that was read without is not continued with one in silence."""

from __future__ import annotations

import torch
from torch import nn

from mmattn.adapters.text_state import TextState
from mmattn.errors import ConditionError
from mmattn.hosts.causal_lm.continuous_batching import PAGED_CACHE
from mmattn.hosts.context import Call

#: Attribute of a cache that was read with a memory (True), or that goes on with and without one (False).
READ = "mmattn_read_with_memory"


def check_with_memory(host: nn.Module, call: Call, text: TextState) -> None:
    """Refuse to go on with a memory after tokens that were read without one, unless `arrived` says so; note it."""
    cache = text.cache
    # Each request of continuous batching has its own.
    if call.reads_memory or type(cache).__name__ == PAGED_CACHE or torch.compiler.is_compiling():
        return
    # Prompts of peft are in the cache before the text.
    peft = getattr(host, "active_peft_config", None)
    declared = call.arrivals is not None or getattr(peft, "is_prompt_learning", False)
    if not declared and (text.past or (text.past is None and _has_state(cache))):
        raise ConditionError(
            "the cache holds tokens that were read without a memory: read them with memory=, or say by arrived= how "
            "many slots each token of this call sees"
        )
    setattr(cache, READ, True)


def check_without_memory(cache: object, explicit: bool) -> None:
    """Refuse to go on without a memory after tokens that were read with one, unless a block takes it away."""
    if not explicit:
        raise ConditionError(
            "the cache holds tokens that were read with a memory, and this call has none: give memory=, or call inside "
            "condition(None) or disable_adapter()"
        )
    delattr(cache, READ)


def _has_state(cache: object) -> bool:
    state: object = getattr(cache, "has_previous_state", False)
    return bool(state() if callable(state) else state)
