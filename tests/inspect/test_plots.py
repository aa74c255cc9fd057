"""Plots: files that show something, and refusals that say what is asked for."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from mmattn import inspect, masks
from mmattn.errors import ConfigError, MaskError
from tests.inspect.test_trace import made


def shades(path: Path) -> int:
    with Image.open(path) as image:
        return len(image.convert("RGB").getcolors(1 << 24))


def test_heat_maps_lie_over_the_picture(tmp_path: Path) -> None:
    assert shades(inspect.plot_heat_maps(made(), tmp_path / "over.png")) > 100
    assert shades(inspect.plot_heat_maps(made(picture=None, words=("$a", "b", "c_$")), tmp_path / "bare.png")) > 100
    with pytest.raises(ConfigError, match="write_page"):
        inspect.plot_heat_maps(made(grid=None), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_masks(tmp_path: Path) -> None:
    inspect.plot_mask(masks.causal(7), tmp_path / "causal.png")
    with Image.open(tmp_path / "causal.png") as image:
        grey = torch.tensor(list(image.convert("L").tobytes())).view(image.height, image.width)
    corner = grey[image.height // 2 :, : image.width // 2], grey[: image.height // 2, image.width // 2 :]
    assert (corner[0] < 50).float().mean() > (corner[1] < 50).float().mean() + 0.3, "dark where a query may attend"
    inspect.plot_mask(masks.causal(5) & masks.padding([2, 5], 5), tmp_path / "rows.png")
    with pytest.raises(MaskError):
        inspect.plot_mask(torch.ones(3, 5), tmp_path / "none.png")


@pytest.mark.parametrize(("first", "last"), [(2.3, 0.2), (0.208, 0.203), (40.0, 0.04)])
def test_losses_have_ticks_that_one_reads(tmp_path: Path, first: float, last: float) -> None:
    """matplotlib notes the texts of a plot in SVG beside the outlines of their letters."""
    losses = {step: last + (first - last) * math.exp(-step / 50) for step in range(1, 300)}
    inspect.plot_curves({"loss": {"adapter": losses}}, tmp_path / "loss.svg", log=True)
    labels = re.findall(r"<!-- (.*?) -->", (tmp_path / "loss.svg").read_text(encoding="utf-8"))
    assert not [text for text in labels if "$" in text or "^" in text], "a power of ten"
    ticks = [float(text) for text in labels if re.fullmatch(r"0?\.\d+|\d\.\d+|\d\d?", text.strip())]
    assert len([tick for tick in ticks if 0.9 * last <= tick <= 1.1 * first]) >= 2, labels
