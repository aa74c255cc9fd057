"""What the tests of tensor and JSON files share: tensors of every dtype, their metadata, and a look for leftovers."""

from __future__ import annotations

import os
from pathlib import Path

import torch

META = {"format": "example", "format_version": 1, "note": 'grüße "\\ 🌷', "list": [1, 2.5, None, True, {"a": []}]}


def example() -> dict[str, torch.Tensor]:
    return {
        "gate": torch.tensor(0.25),
        "heads.weight": torch.randn(7, 11),
        "half": torch.randn(3, 5).half(),
        "brain": torch.randn(13).bfloat16(),
        "tiny": torch.randn(17).to(torch.float8_e4m3fn),
        "double": torch.randn(2, 3, 5, dtype=torch.float64),
        "ids": torch.arange(19),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 23),
    }


def litter(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if "tmp" in name or name.startswith(".")]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
    )
