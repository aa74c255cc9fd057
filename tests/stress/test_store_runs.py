"""The scripts of stores in training, in short: with every run of the tests."""

from __future__ import annotations

import pytest

from tests.stress import scripts, throttled_reading


def test_kills_in_encoding() -> None:
    """Invariant 109."""
    scripts.check("kills_in_encoding", "9")


def test_a_throttled_reader(capsys: pytest.CaptureFixture[str]) -> None:
    """So few steps, beside other tests, may wait a little longer; those that read nothing ahead wait much longer."""
    assert throttled_reading.main(30, 0.1) == 0, capsys.readouterr().out
