"""TimmEncoder: any network of timm, at any of its stages, by name or by folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from mmattn.encoders import TimmEncoder, load_image_encoder
from mmattn.errors import AdapterFileError, ConfigError
from mmattn.pipelines import EncoderReference

timm = pytest.importorskip("timm")


@pytest.mark.parametrize(
    ("name", "stage", "dim", "grid"),
    [
        ("tf_efficientnet_lite0", 4, 112, (4, 4)),
        ("resnet18", None, 512, (2, 2)),
        ("resnet18", 1, 64, (32, 32)),
        ("vit_tiny_patch16_224", 3, 192, (14, 14)),
        ("swin_tiny_patch4_window7_224", None, 768, (7, 7)),  # channels last
    ],
)
def test_a_stage_gives_its_places(name: str, stage: int | None, dim: int, grid: tuple[int, int]) -> None:
    encoder = TimmEncoder(name, stage, pretrained=False, size=None if grid in ((14, 14), (7, 7)) else 64)
    assert (encoder.dim, encoder.grid) == (dim, grid)
    memory = encoder(torch.rand(2, 3, 71, 83))
    assert memory.tokens.shape == (2, grid[0] * grid[1], dim) and torch.isfinite(memory.tokens).all()
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


def test_slots_are_the_feature_map_in_order(picture: Image.Image) -> None:
    encoder = TimmEncoder("resnet18", 3, pretrained=False, size=64)
    (features,) = encoder.model(encoder.image_processor([picture]))
    memory = encoder(picture)
    assert memory.sources is not None
    row, column = memory.sources[0][5]["patch"]
    torch.testing.assert_close(memory.tokens[0, 5], features[0, :, row, column])


def test_a_folder_is_named_with_its_stage_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timm.models.save_for_hf(timm.create_model("resnet18"), str(tmp_path / "net"), safe_serialization=True)
    monkeypatch.chdir(tmp_path)
    whole, small = load_image_encoder("net"), load_image_encoder("timm:net:stage=2:size=96")
    assert (whole.dim, whole.grid, small.dim, small.grid) == (512, (7, 7), 64, (24, 24))
    assert whole.fingerprint != small.fingerprint
    reference = EncoderReference.of("timm:net:stage=2:size=96")
    assert reference.name == f"timm:{tmp_path}/net:stage=2:size=96"
    assert load_image_encoder(reference.name).fingerprint == small.fingerprint
    (tmp_path / "net/model.safetensors").write_bytes(b"")
    with pytest.raises(AdapterFileError, match=r"timm cannot load net .*give the name of a model, or its folder"):
        load_image_encoder("timm:net")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm:resnet81", r"timm has no model 'resnet81'; did you mean resnet"),
        ("timm:resnet18:stage=five", r"stage= of an encoder must be a number, got 'five'"),
        ("nosuchencoder", r"encoders of images are efficientnet-lite0, timm:NAME, torchvision:NAME"),
    ],
)
def test_other_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_image_encoder(name)


def test_what_the_network_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="resnet18 has no stage 9; the first is 1"):
        TimmEncoder("resnet18", 9, pretrained=False)
    with pytest.raises(ConfigError, match="cannot take pictures of"):
        TimmEncoder("vit_tiny_patch16_224", pretrained=False, size=64)
