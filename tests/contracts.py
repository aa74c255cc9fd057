"""Pairs of a check and a case for the suites of `mmattn.testing`: those that apply, and those that say they do not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest

from mmattn.testing.running import Check


def applying(checks: Iterable[Check], cases: Iterable[str], exceptions: Mapping[str, Collection[str]]) -> list[Any]:
    """Every check with every case, but for the exceptions.

    Args:
        checks: of a suite.
        cases: names of what it asks.
        exceptions: by name of a check, the cases to which it does not apply.
    """
    return [pair(check, case) for check in checks for case in cases if case not in exceptions.get(check.__name__, ())]


def not_applying(checks: Iterable[Check], exceptions: Mapping[str, Collection[str]]) -> list[Any]:
    """The exceptions, each of which must raise `unittest.SkipTest`."""
    return [pair(check, case) for check in checks for case in exceptions.get(check.__name__, ())]


def pair(check: Check, case: str) -> Any:
    return pytest.param(check, case, id=f"{check.__name__.removeprefix('check_')}-{case}")
