"""What every kind of adapter must do, on every kind of host."""

from __future__ import annotations

from typing import Any

from mmattn.testing import adapter_answers, adapter_calls, adapter_life, adapter_tools, adapter_training
from mmattn.testing.case import Case, MakeHost, MakeMemory
from mmattn.testing.running import Check, run_checks


def adapter_checks() -> list[Check]:
    """Every check of an adapter, for `pytest.mark.parametrize`: a function of a `Case`.

    A check that does not apply raises `unittest.SkipTest`, which pytest shows as skipped.

    >>> from mmattn.testing import promise
    >>> print(promise(adapter_checks()[0]))
    A fresh adapter with a memory leaves the host's answer bit for bit what it was.
    """
    groups = (adapter_answers, adapter_calls, adapter_training, adapter_life, adapter_tools)
    return [check for group in groups for check in group.CHECKS]


def check_adapter(
    adapter: Any, make_host: MakeHost, make_memory: MakeMemory | None = None, rows: int = 3, **options: Any
) -> dict[str, str]:
    """Run every check of an adapter on a kind of host.

    Args:
        adapter: settings of a registered kind. Choose them so that its blocks are at several layers.
        make_host: makes the frozen model: the same weights each time, in evaluation mode, small and on the CPU.
        make_memory: from a generator and a number of rows what the adapter reads; its `example_memory` by default.
        rows: b, at least 2.
        options: further arguments of `attach`.

    Returns:
        the checks that do not apply, with the reason.

    Raises:
        AssertionError: naming each check that failed, its promise and what happened instead.
    """
    return run_checks(adapter_checks(), Case(adapter, make_host, make_memory, rows, **options))
