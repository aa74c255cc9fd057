"""Progress on stderr where there is no terminal: a line after each tenth, of rows and not of batches."""

from __future__ import annotations

import re

import pytest

from mmattn import progress
from mmattn.progress import counted, tracked


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [re.sub(r" \d+ s$", "", line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_after_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(tracked(37, "adapter", note=lambda: "loss 1.5")) == list(range(37))
    lines = shown(capsys)
    assert len(lines) == 10 and lines[0] == "adapter 4/37 loss 1.5" and lines[-1] == "adapter 37/37 loss 1.5"


def test_what_was_done_before_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Invariant 131."""
    assert list(tracked(6, "adapter", first=3)) == [3, 4, 5]
    assert shown(capsys) == ["adapter 4/6", "adapter 5/6", "adapter 6/6"]
    assert list(tracked(6, "adapter", first=6)) == [] and shown(capsys) == []


def test_batches_are_counted_in_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(tracked(7, "encoding", size=3)) == [0, 3, 6]
    assert shown(capsys) == ["encoding 3/7", "encoding 6/7", "encoding 7/7"]
    assert list(tracked(0, "encoding", size=3)) == [] and list(tracked(0, "adapter")) == [] and shown(capsys) == []


def test_long_tenths_are_not_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    with counted(1000, "embedding lines") as advance:
        advance(1)
        advance(2)
    assert shown(capsys) == ["embedding lines 1/1000", "embedding lines 3/1000"]


def test_nothing_is_shown_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(tracked(3, "adapter", progress=False)) == [0, 1, 2] and shown(capsys) == []
