"""Pairs of a check and a case for the suites of `mmattn.testing`: those that apply, and those that say they do not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any
from unittest import SkipTest

import pytest

from mmattn.testing.case import Check


def applying(
    checks: Iterable[Check],
    cases: Iterable[str],
    exceptions: Mapping[str, Collection[str]],
    slow: Collection[str] = (),
) -> list[Any]:
    """Every check with every case, but for the exceptions."""
    return [
        pair(check, case, *[pytest.mark.slow] * (case in slow))
        for check in checks
        for case in cases
        if case not in exceptions.get(check.__name__, ())
    ]


def holds(check: Check, case: Any) -> None:
    """Run a check that applies: where it says that it does not, something is refused that was not before."""
    try:
        check(case)
    except SkipTest as reason:
        pytest.fail(f"{check.__name__} no longer applies: {reason}")


def not_applying(checks: Iterable[Check], exceptions: Mapping[str, Collection[str]]) -> list[Any]:
    """The exceptions, each of which must raise `unittest.SkipTest`."""
    return [pair(check, case) for check in checks for case in exceptions.get(check.__name__, ())]


def pair(check: Check, case: str, *marks: Any) -> Any:
    """A parameter of a test."""
    return pytest.param(check, case, marks=marks, id=f"{check.__name__.removeprefix('check_')}-{case}")
