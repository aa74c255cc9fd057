"""Docstrings keep to their form: one argument and one exception per entry, and each of them is a real one."""

from __future__ import annotations

from pathlib import Path

from tests.docstrings import faults


def test_docstrings_of_the_package() -> None:
    assert faults(Path(__file__).resolve().parent.parent / "mmattn") == []
