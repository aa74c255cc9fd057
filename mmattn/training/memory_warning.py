"""An early warning: the adapter ignores its memory, since another row's memory does as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PATIENCE = 3
"""Evaluations in a row that must agree."""
ERRORS = 2.0
"""Standard errors that a gain must exceed to be one."""


def memory_warning(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """What to say after the last evaluation of a run: that its memory does nothing, or that it does at last.

    A memory does nothing where the loss on held-out rows is no higher with the memories of other rows, by more than two
    standard errors, in three evaluations in a row. That is said once; and once more when it is no longer so.

    Args:
        lines: of metrics, as `read_metrics` returns them; evaluations have "eval_loss", "eval_loss_shuffled" and
            "memory_gain_stderr".

    >>> noise = [{"step": n, "eval_loss": 2.5, "eval_loss_shuffled": 2.5, "memory_gain_stderr": 0.1} for n in (1, 2, 3)]
    >>> memory_warning(noise[:2]) is None
    True
    >>> print(memory_warning(noise)[:55])
    the adapter ignores its memory so far: in 3 evaluations
    """
    if not lines or "eval_loss_shuffled" not in lines[-1]:
        return None
    ignored = [_is_ignored(line) for line in lines if "eval_loss_shuffled" in line]
    streak, before, last = _streak(ignored), _streak(ignored[:-1]), lines[-1]
    losses = f"{last['eval_loss']:.4f} with its own memory, {last['eval_loss_shuffled']:.4f} with another row's"
    if streak == PATIENCE:
        return (
            f"the adapter ignores its memory so far: in {PATIENCE} evaluations up to step {last['step']} the loss of "
            f"held-out rows was no higher with the memories of other rows ({losses}). See gate/ and memory_attention/ "
            "in the metrics; and whether the texts can be told from these memories at all, by a linear probe for "
            "instance"
        )
    if not streak and before >= PATIENCE:
        return f"the adapter uses its memory from step {last['step']} on ({losses})"
    return None


def _streak(flags: Sequence[bool]) -> int:
    """How many of the last ones are true, one after the other."""
    return next((count for count, one in enumerate(reversed(flags)) if not one), len(flags))


def _is_ignored(line: Mapping[str, Any]) -> bool:
    own, other, error = (line.get(name) for name in ("eval_loss", "eval_loss_shuffled", "memory_gain_stderr"))
    if own is None or other is None:
        return False
    # Of a single batch no error is known: then only what is equal to rounding is.
    return bool(other - own <= (1e-6 * abs(own) if error is None else ERRORS * error))
