"""TorchvisionEncoder: any network, any layer, weights by file; nothing behind the layer is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mmattn.encoders import TorchvisionEncoder
from mmattn.errors import AdapterFileError, ConfigError, MmattnError
from mmattn.pipelines import EncoderReference


@pytest.mark.parametrize(
    ("name", "size", "layer", "dim", "grid"),
    [
        ("mobilenet_v2", 64, "features", 1280, (2, 2)),
        ("resnet18", 96, "layer4", 512, (3, 3)),
        ("squeezenet1_1", 64, "features", 512, (3, 3)),
        ("shufflenet_v2_x0_5", 64, "conv5", 1024, (2, 2)),
        ("mnasnet0_5", 64, "layers", 1280, (2, 2)),
        ("googlenet", 64, "inception5b", 1024, (2, 2)),
        ("regnet_y_400mf", 64, "trunk_output", 440, (2, 2)),
    ],
)
def test_the_last_layer_before_the_pooling(name: str, size: int, layer: str, dim: int, grid: tuple[int, int]) -> None:
    eye = TorchvisionEncoder(name, size=size)
    assert (eye.layer, eye.dim, eye.grid) == (layer, dim, grid)
    memory = eye(torch.rand(3, 3, 71, 83))
    assert memory.tokens.shape == (3, grid[0] * grid[1], dim)
    assert torch.isfinite(memory.tokens).all()
    assert not any(parameter.requires_grad for parameter in eye.parameters())


def test_slots_are_the_layers_output_in_order(picture: Image.Image) -> None:
    eye = TorchvisionEncoder("resnet18", layer="layer2.1", size=64)
    model, pixels = eye.model, eye.image_processor([picture])
    want = model.layer2(model.layer1(model.maxpool(model.relu(model.bn1(model.conv1(pixels))))))
    memory = eye(picture)
    assert eye.grid == (8, 8)
    assert memory.sources is not None
    row, column = memory.sources[0][19]["patch"]
    torch.testing.assert_close(memory.tokens[0, 19], want[0, :, row, column])
    pooled = TorchvisionEncoder("resnet18", layer="layer2.1", size=64, pooled=True)
    pooled.model.load_state_dict(model.state_dict())
    torch.testing.assert_close(pooled(picture).tokens[0, 0], want.mean((0, 2, 3)))


def test_a_vision_transformer_gives_patches_and_pools_to_its_class_token(picture: Image.Image) -> None:
    eye = TorchvisionEncoder("vit_b_16", size=32)
    model, pixels = eye.model, eye.image_processor([picture])
    tokens = model.encoder(torch.cat([model.class_token, model._process_input(pixels)], 1))
    assert (eye.dim, eye.grid) == (768, (2, 2))
    torch.testing.assert_close(eye(picture).tokens, tokens[:, 1:])
    eye.pooled = True
    torch.testing.assert_close(eye(picture).tokens, tokens[:, :1])


@pytest.mark.parametrize("layer", [None, "features.1"])
def test_channels_last_networks_keep_their_width(layer: str | None) -> None:
    eye = TorchvisionEncoder("swin_t", layer=layer, size=64)
    assert (eye.layer, eye.dim, eye.grid) == (("permute", 768, (2, 2)) if layer is None else (layer, 96, (16, 16)))


def test_no_layer_of_that_name() -> None:
    with pytest.raises(ConfigError, match=r"no layer 'feature'; its parts are features, classifier"):
        TorchvisionEncoder("mobilenet_v2", layer="feature", size=32)
    with pytest.raises(ConfigError, match=r"gives \(1, 1000\); slots need"):
        TorchvisionEncoder("mobilenet_v2", layer="classifier", size=32)
    with pytest.raises(ConfigError, match="takes no part in the forward pass"):
        TorchvisionEncoder("googlenet", layer="aux1", size=64)


@pytest.mark.parametrize(
    ("name", "weights", "error", "words"),
    [
        ("mobilenet2", None, ConfigError, "did you mean mobilenet_v2"),
        ("fcn_resnet50", None, ConfigError, "no classification network"),
        (None, None, ConfigError, "no classification network None"),
        ("mobilenet_v2", "IMAGENET", ConfigError, "choose IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT"),
        ("mobilenet_v2", 7, ConfigError, "a name or a path, got int"),
        ("mobilenet_v2", "weights.pth", AdapterFileError, "pickle"),
        ("mobilenet_v2", "nowhere/weights.safetensors", AdapterFileError, "no weights file"),
    ],
)
def test_names_that_lead_nowhere(name: str, weights: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        TorchvisionEncoder(name, weights)


def test_released_weights_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for proxy in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    for direct in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(direct, raising=False)
    with pytest.raises(AdapterFileError, match="could not be fetched.*path of a file"):
        TorchvisionEncoder("squeezenet1_1", "DEFAULT")


def test_a_file_of_any_dtype_with_any_classifier(picture: Image.Image, tmp_path: Path) -> None:
    one = TorchvisionEncoder("squeezenet1_1", size=64)
    state = {name: tensor.half().contiguous() for name, tensor in one.model.state_dict().items()}
    one.model.load_state_dict(state)
    paths = [tmp_path / "whole.safetensors", tmp_path / "partial.safetensors", tmp_path / "other.safetensors"]
    save_file(state, paths[0])
    save_file({name: tensor for name, tensor in state.items() if name.startswith("features")}, paths[1])
    save_file(state | {"classifier.1.weight": torch.zeros(12, 512, 1, 1)}, paths[2])
    for path in paths:
        two = TorchvisionEncoder("squeezenet1_1", path, size=64)
        assert two.dtype == torch.float32
        assert torch.equal(one(picture).tokens, two(picture).tokens)
        assert one.fingerprint == two.fingerprint
    assert two.image_processor.mean == two.image_processor.std == (0.5, 0.5, 0.5)
    other = TorchvisionEncoder("squeezenet1_1", paths[0], size=64, mean=(0.485, 0.456, 0.406))
    assert other.fingerprint != one.fingerprint


def test_a_file_of_another_network(tmp_path: Path) -> None:
    state = TorchvisionEncoder("squeezenet1_1", size=64).model.state_dict()
    path = tmp_path / "weights.safetensors"

    def refused(tensors: dict[str, torch.Tensor], words: str, name: str = "squeezenet1_1") -> None:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
        with pytest.raises(MmattnError, match=words):
            TorchvisionEncoder(name, path, size=64)

    first = "features.0.weight"
    refused({name: state[name] for name in state if name != first}, f"1 missing: {first}")
    refused(state | {"features.99.weight": torch.zeros(3)}, "1 unexpected: features.99.weight")
    refused(state | {first: torch.zeros(2, 3)}, f"(?s)does not fit torchvision.*size mismatch for {first}")
    refused(state | {first: torch.full_like(state[first], torch.inf)}, f"{first}.* NaN or infinite")
    refused(state, r"missing: (\S+, ){5}….*unexpected: (\S+, ){5}…", name="mobilenet_v2")
    refused({}, "tensors by name")
    path.write_bytes(b"\x08\0\0\0\0\0\0\0{}      rest")
    with pytest.raises(AdapterFileError, match="weights.safetensors"):
        TorchvisionEncoder("squeezenet1_1", path)


def test_a_reference_has_the_path_of_the_weights_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resnet18").mkdir()  # such as the run of a network
    (tmp_path / "a.safetensors").touch()
    names = ("torchvision:resnet18", "torchvision:resnet18:IMAGENET1K_V1")
    assert tuple(EncoderReference.of(name).name for name in names) == names
    weights = EncoderReference.of("torchvision:resnet18:a.safetensors")
    assert weights.name == f"torchvision:resnet18:{tmp_path / 'a.safetensors'}"


def test_progress_is_shown_only_if_asked(picture: Image.Image, capfd: pytest.CaptureFixture[str]) -> None:
    eye = TorchvisionEncoder("squeezenet1_1", size=64)
    eye([picture] * 3)
    assert capfd.readouterr().err == ""
    eye([picture] * 3, batch_size=2, progress=True)
    assert "3/3" in capfd.readouterr().err


def test_real_photographs_of_one_species_are_neighbours(shared_data: Path) -> None:
    eye = TorchvisionEncoder("mobilenet_v2", shared_data / "mobilenet_v2_imagenet.safetensors", pooled=True)
    folders = sorted((shared_data / "flowers12").iterdir())[:4]
    photographs = [path for folder in folders for path in sorted(folder.glob("*.jpg"))[:8]]
    rows = torch.nn.functional.normalize(eye(photographs).tokens[:, 0], dim=-1)
    likeness = (rows @ rows.T).fill_diagonal_(-1)
    right = (likeness.argmax(1) // 8 == torch.arange(32) // 8).float().mean()
    assert right > 0.75
