"""The scripts of stores in training, in short: with every run of the tests."""

from __future__ import annotations

from tests.stress import scripts, throttled_reading


def test_kills_in_encoding() -> None:
    """Invariant 109."""
    scripts.check("kills_in_encoding", "9")


def test_a_slow_address_changes_nothing_of_the_training() -> None:
    """The share of the time spent waiting is for the script to judge, on a quiet machine."""
    *_, losses = throttled_reading.measure(30)
    assert len(losses) == 1
