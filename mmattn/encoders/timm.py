"""Networks of timm as encoders of images: the memory is one of their feature maps."""

from __future__ import annotations

import logging
import os
import re
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mmattn.encoders.base import register_encoder
from mmattn.encoders.images import ImageEncoder, ImageProcessor, unknown_network
from mmattn.errors import AdapterFileError, ConfigError, check_int, import_extra
from mmattn.models.cache import resolve
from mmattn.storage.safetensors import check_values


@register_encoder("timm")
class TimmEncoder(ImageEncoder):
    """Features (b, m, e) of images at one stage of a frozen network of timm; later stages are not built.

    Args:
        name: a name of `timm.list_models()`, "hf-hub:org/repo", a folder of timm (config.json and safetensors), or a
            short name of `mmattn.models`.
        stage: number of the feature map, from 1 (the finest); by default the last stage.
        pretrained: load the released weights; False for random ones.
        size: side of the square input in pixels; by default that of the released weights.
        pooled: one token per image, the mean over patches (m = 1).
        device: device of the network, by default the CPU.

    Attributes:
        stage: number of the feature map.

    Raises:
        ConfigError: an unknown name, or a stage that the network does not have.
        AdapterFileError: weights that cannot be loaded.
        NonFiniteError: NaN or infinity in the weights.
        MissingExtraError: timm is not installed.

    >>> encoder = TimmEncoder("tf_efficientnet_lite0", stage=4, pretrained=False, size=112)
    >>> encoder(torch.rand(2, 3, 80, 96)).tokens.shape, encoder.dim, encoder.grid
    (torch.Size([2, 49, 112]), 112, (7, 7))
    """

    def __init__(
        self,
        name: str | os.PathLike[str],
        stage: int | None = None,
        *,
        pretrained: bool = True,
        size: int | None = None,
        pooled: bool = False,
        device: str | torch.device | None = None,
    ) -> None:
        timm = import_extra("timm", "models")
        model = _load(timm, name, stage, pretrained)
        config = timm.data.resolve_model_data_config(model)
        self.stage = len(model.feature_info) if stage is None else stage
        image_processor = ImageProcessor(
            size=config["input_size"][-1] if size is None else size,
            mean=config["mean"],
            std=config["std"],
            interpolation="bilinear" if config["interpolation"] == "bilinear" else "bicubic",
        )
        settings = {"encoder": "timm", "name": model.default_cfg["architecture"], "stage": self.stage}
        try:
            super().__init__(model, image_processor, pooled=pooled, settings=settings, device=device)
        except AssertionError as error:  # transformers of timm are built for one size
            raise ConfigError(f"{name} cannot take pictures of {image_processor.size}: {error}") from error

    @classmethod
    def from_name(cls, name: str, device: str | torch.device | None = None, pooled: bool = False) -> TimmEncoder:
        """Build the encoder of "NAME[:stage=4][:size=112]" for `load_image_encoder`."""
        network, *settings = re.split(":(?=stage=|size=)", name)
        options: dict[str, int] = {}
        for setting in settings:
            key, _, value = setting.partition("=")
            if not value.isdecimal():
                raise ConfigError(f"{key}= of an encoder must be a number, got {value!r}")
            options[key] = int(value)
        return cls(network, options.get("stage"), size=options.get("size"), pooled=pooled, device=device)

    def features(self, pixels: Tensor) -> Tensor:
        """Return the feature map (b, e, height, width) of the stage."""
        (features,) = self.model(pixels)
        last = str(getattr(self.model, "output_fmt", "")).upper().endswith("NHWC")
        return features.permute(0, 3, 1, 2) if last else features


def _load(timm: ModuleType, name: str | os.PathLike[str], stage: int | None, pretrained: bool) -> Any:
    place = os.fspath(resolve(name))
    if os.path.isdir(place):
        place = f"local-dir:{place}"
    elif ":" not in place and not timm.is_model(place):
        raise unknown_network("timm has no model", place, timm.list_models())
    index = -1 if stage is None else check_int("stage", stage) - 1
    logger = logging.getLogger("timm.models._builder")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of the weights behind the last stage
    try:
        model = timm.create_model(place, pretrained=pretrained, features_only=True, out_indices=(index,))
    except (IndexError, AssertionError) as error:
        raise ConfigError(f"{name} has no stage {stage}; the first is 1, and without stage it is the last") from error
    except Exception as error:  # what timm, huggingface_hub, torch and safetensors find wrong
        raise AdapterFileError(f"timm cannot load {name} ({error}); give the name of a model, or its folder") from error
    finally:
        logger.setLevel(level)
    for key, tensor in model.state_dict().items():
        check_values(key, tensor)
    return model
