"""Caches of hosts that were read with a memory: one that was read without is not continued with one in silence."""

from __future__ import annotations

from typing import Any

from mmattn.errors import ConditionError

#: Attribute of a cache that was read with a memory (True), or that goes on with and without one (False).
READ = "mmattn_read_with_memory"


def check_with_memory(cache: Any, past: int | None, declared: bool) -> None:
    """Refuse to go on with a memory after tokens that were read without one, unless `arrived` says so; note it."""
    if not declared and (past or (past is None and _has_state(cache))):
        raise ConditionError(
            "the cache holds tokens that were read without a memory: read them with memory=, or say by arrived= how "
            "many slots each token of this call sees"
        )
    setattr(cache, READ, True)


def check_without_memory(cache: Any, explicit: bool) -> None:
    """Refuse to go on without a memory after tokens that were read with one, unless a block takes it away."""
    if not explicit:
        raise ConditionError(
            "the cache holds tokens that were read with a memory, and this call has none: give memory=, or call inside "
            "condition(None) or disable_adapter()"
        )
    delattr(cache, READ)


def _has_state(cache: Any) -> bool:
    state = getattr(cache, "has_previous_state", False)
    return bool(state() if callable(state) else state)
