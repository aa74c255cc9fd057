"""Conversions that need no published file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmattn.models.convert import convert_efficientnet

timm = pytest.importorskip("timm")


def test_efficientnet_keeps_its_values_and_draws_no_random_numbers(tmp_path: Path) -> None:
    """Under another default dtype, too: the cache is written once, for all that follows."""
    tensors = timm.create_model("tf_efficientnet_lite0").state_dict()
    torch.save({f"other.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "network.pth")
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.bfloat16)
    try:
        convert_efficientnet([tmp_path / "network.pth"], tmp_path / "folder")
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(load_file(tmp_path / "folder/model.safetensors"), dict(tensors), rtol=0, atol=0)
