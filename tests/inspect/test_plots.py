"""Plots: files that show something, and refusals that say what is asked for."""

from __future__ import annotations

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
