"""Classification networks of torchvision as encoders: the memory is the output of one of their layers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmattn.encoders.base import register_encoder
from mmattn.encoders.images import ImageEncoder, ImageProcessor, unknown_network
from mmattn.errors import AdapterFileError, ConfigError, import_extra
from mmattn.models.loading import is_weights_path, read_weights, refuse_keys

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum

# Last layer before the pooling, by the names torchvision gives it; Swin's `permute` puts channels first again.
_LAST = [
    "permute",
    "features",
    "layer4",
    "encoder",
    "trunk_output",
    "conv5",
    "inception5b",
    "Mixed_7c",
    "layers",
    "blocks",
]
_HEADS = ("classifier", "fc", "head", "heads", "AuxLogits", "aux1", "aux2")


class _Reached(Exception):
    """Carries a layer's output out of a forward pass whose rest is not needed."""

    def __init__(self, output: object) -> None:
        self.output = output


def _leave(layer: nn.Module, inputs: object, output: object) -> None:
    raise _Reached(output)


@register_encoder("torchvision")
class TorchvisionEncoder(ImageEncoder):
    """Features (b, m, e) of images at one layer of a frozen torchvision network; later layers are not computed.

    Args:
        name: any name of `torchvision.models.list_models(module=torchvision.models)`.
        weights: "DEFAULT" or another name of released weights (downloaded by torchvision), the path of a
            .safetensors file (any float dtype; the classifier may be missing or of another size), None for random.
        layer: submodule, such as "features.14", whose output (b, e, height, width) or (b, m, e) becomes the memory; by
            default the last layer before the pooling.
        size: side of the square input in pixels; by default that of the named weights, otherwise 224.
        mean: of each channel of the input, in 0..1; by default that of the named weights, otherwise 0.5.
        std: of each channel of the input, in 0..1; by default that of the named weights, otherwise 0.5.
        pooled: one token per image: the mean over patches, or the class token of a vision transformer (m = 1).
        device: device of the network, by default the CPU.

    Attributes:
        layer: the name of the submodule that is read.

    Raises:
        ConfigError: unknown name, weights or layer.
        AdapterFileError: a weights file that is damaged, not safetensors, or of another network.
        NonFiniteError: NaN or infinity in the weights.
        MissingExtraError: torchvision is not installed.

    >>> encoder = TorchvisionEncoder("squeezenet1_1", size=64)
    >>> encoder(torch.rand(2, 3, 80, 96)).tokens.shape, encoder.dim, encoder.grid
    (torch.Size([2, 9, 512]), 512, (3, 3))
    """

    def __init__(
        self,
        name: str = "mobilenet_v2",
        weights: str | os.PathLike[str] | None = None,
        layer: str | None = None,
        *,
        size: int | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        pooled: bool = False,
        device: str | torch.device | None = None,
    ) -> None:
        models = import_extra("torchvision.models", "vision")
        names = models.list_models(module=models)
        if name not in names:
            raise unknown_network("torchvision has no classification network", name, names)
        usual: tuple[int, float | Sequence[float], float | Sequence[float]] = (224, 0.5, 0.5)
        released = None
        if weights is not None and not is_weights_path(weights):
            choices = models.get_model_weights(name).__members__
            if weights not in choices:
                raise ConfigError(
                    f"{name} has no weights {weights!r}; choose {', '.join(choices)}, or give the path of a file"
                )
            released = choices[weights]
            transforms = released.transforms()
            usual = (transforms.crop_size[0], transforms.mean, transforms.std)
        size = usual[0] if size is None else size
        mean, std = usual[1] if mean is None else mean, usual[2] if std is None else std
        image_processor = ImageProcessor(size, mean, std, interpolation="bilinear")
        model = _built(models, name, released, size)
        if weights is not None and released is None:
            _load(model, weights, name)
        self.layer = _default_layer(model) if layer is None else layer
        target = dict(model.named_modules()).get(self.layer)
        if target is None or not self.layer:
            children = ", ".join(child for child, _ in model.named_children())
            raise ConfigError(
                f"{name} has no layer {layer!r}; its parts are {children}, and theirs as in 'features.3' "
                "(all: dict(torchvision.models.get_model(name).named_modules()))"
            )
        super().__init__(
            # Convolutions on a CPU are up to twice as fast with channels last.
            model.to(memory_format=torch.channels_last),
            image_processor,
            pooled=pooled,
            settings={"encoder": "torchvision", "name": name, "layer": self.layer},
            device=device,
        )

    @classmethod
    def from_name(cls, name: str, device: str | torch.device | None = None, pooled: bool = False) -> TorchvisionEncoder:
        """Build the encoder of "NAME[:WEIGHTS]" for `load_image_encoder`."""
        network, _, weights = name.partition(":")
        return cls(network, weights=weights or None, pooled=pooled, device=device)

    def features(self, pixels: Tensor) -> Tensor:
        """Return the output of `layer`: (b, e, height, width), (b, m, e), or (b, e) of a pooled class token."""
        model = self.model
        hook = model.get_submodule(self.layer).register_forward_hook(_leave)
        try:
            model(pixels.contiguous(memory_format=torch.channels_last))
        except _Reached as reached:
            output = reached.output
        else:
            raise ConfigError(f"layer {self.layer!r} takes no part in the forward pass of {type(model).__name__}")
        finally:
            hook.remove()
        if not isinstance(output, Tensor) or output.dim() not in (3, 4):
            kind = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ConfigError(f"layer {self.layer!r} gives {kind}; slots need (b, e, h, w) or (b, m, e)")
        if output.dim() == 4 and hasattr(model, "permute") and self.layer.split(".")[0] in ("features", "norm"):
            return output.permute(0, 3, 1, 2)
        if output.dim() == 3 and hasattr(model, "class_token"):
            return output[:, 0] if self.pooled else output[:, 1:]
        return output

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.model.state_dict().items() if not _is_head(name)}


def _built(models: ModuleType, name: str, released: WeightsEnum | None, size: int) -> nn.Module:
    options: dict[str, object] = {}
    if released is None and name in ("googlenet", "inception_v3"):
        options = {"init_weights": False}
    elif name.startswith("vit_"):
        options = {"image_size": size}
    elif name.startswith("maxvit"):
        options = {"input_size": (size, size)}
    try:
        model: nn.Module = models.get_model(name, weights=released, **options)
    except OSError as error:
        raise AdapterFileError(
            f"the released weights {released} of {name} could not be fetched ({error}); give the path of a file instead"
        ) from error
    except (ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"torchvision cannot build {name} for pictures of {size} x {size}: {error}") from error
    return model


def _default_layer(model: nn.Module) -> str:
    parts = dict(model.named_children())
    for name in _LAST:
        if name in parts:
            part = parts[name]
            return f"{name}.{len(part) - 1}" if isinstance(part, nn.ModuleList) else name
    raise ConfigError(f"no default layer is known for {type(model).__name__}; give layer=, one of {list(parts)}")


def _is_head(name: str) -> bool:
    return name.split(".")[0] in _HEADS


def _load(model: nn.Module, path: str | os.PathLike[str], name: str) -> None:
    # The head never runs, and may be missing or of another size.
    state = {key: tensor for key, tensor in read_weights(path).items() if not _is_head(key)}
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise AdapterFileError(f"{os.fspath(path)!r} does not fit torchvision's {name}: {error}") from error
    # Files older than torch 0.4.1 do not count batches.
    missing = [key for key in missing if not _is_head(key) and not key.endswith("num_batches_tracked")]
    refuse_keys(path, f"torchvision's {name}", missing, unexpected)
