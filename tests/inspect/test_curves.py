"""Curves have ticks that are numbers one reads."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from mmattn.inspect import plot_curves


def texts(plot: Path) -> list[str]:
    """The texts of a plot in SVG, which matplotlib notes beside the outlines of their letters."""
    return [text.strip() for text in re.findall(r"<!-- (.*?) -->", plot.read_text(encoding="utf-8"))]


def falling(first: float, last: float) -> list[float]:
    return [last + (first - last) * math.exp(-step / 50) for step in range(300)]


@pytest.mark.parametrize(("first", "last"), [(2.3, 0.2), (0.29, 0.21), (0.208, 0.203), (40.0, 0.04)])
def test_losses_have_ticks_that_one_reads(tmp_path: Path, first: float, last: float) -> None:
    losses = dict(enumerate(falling(first, last), start=1))
    plot_curves({"loss": {"adapter": losses}}, tmp_path / "loss.svg", log=True)
    labels = texts(tmp_path / "loss.svg")
    assert not [text for text in labels if "$" in text or "^" in text], "a power of ten"
    ticks = [float(text) for text in labels if re.fullmatch(r"0?\.\d+|\d\.\d+|\d\d?", text)]
    assert len([tick for tick in ticks if 0.9 * last <= tick <= 1.1 * first]) >= 2, labels
