"""A list of checks asked of one kind: every failure in one error, what does not apply said aloud."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest import SkipTest

Check = Callable[[Any], None]


def promise(check: Check) -> str:
    """What a check promises: the first line of its docstring."""
    return (check.__doc__ or "").strip().partition("\n")[0]


def run_checks(checks: Iterable[Check], case: Any) -> dict[str, str]:
    """Run every check.

    Args:
        checks: each is a function of the case that raises where its promise is not held.
        case: what they ask with.

    Returns:
        the checks that do not apply, with the reason.

    Raises:
        AssertionError: naming each check that failed, its promise and what happened instead.
    """
    failed: list[tuple[Check, Exception]] = []
    skipped = {}
    for check in checks:
        try:
            check(case)
        except SkipTest as reason:
            skipped[check.__name__] = str(reason)
        except Exception as error:
            failed.append((check, error))
    if failed:
        lines = [f"{check.__name__}: {promise(check)}\n  {type(error).__name__}: {error}" for check, error in failed]
        raise AssertionError(f"promises that are not held: {len(failed)}\n" + "\n".join(lines)) from failed[0][1]
    return skipped
