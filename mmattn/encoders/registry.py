"""Encoders of images and of texts by name, as settings and files have them, and kinds of your own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from mmattn.encoders.base import ImageEncoder, TextEncoderBase
from mmattn.errors import ConfigError
from mmattn.lazy import Registry

EncoderClass = TypeVar("EncoderClass", bound=type)

_ENCODERS = Registry(
    "the encoder",
    {
        "hybrid": "mmattn.encoders.hybrid",
        "openclip": "mmattn.encoders.openclip",
        "openclip-text": "mmattn.encoders.openclip",
        "style": "mmattn.encoders.style",
        "text": "mmattn.encoders.text",
        "torchvision": "mmattn.encoders.torchvision",
    },
)


def register_encoder(kind: str) -> Callable[[EncoderClass], EncoderClass]:
    """Return a class decorator that registers an encoder, which is then loaded by the name "KIND:NAME".

    Loading calls the class method `from_name(NAME, device, **options)` of the class; the options are `pooled` for
    images and `pooling` for texts.

    Args:
        kind: begin of the names.

    Raises:
        ConfigError: the class has no `from_name`, or another class has this kind.
    """

    def register(cls: EncoderClass) -> EncoderClass:
        if not hasattr(cls, "from_name"):
            raise ConfigError(f"{cls.__name__} cannot be registered as an encoder: it lacks the class method from_name")
        _ENCODERS.add(kind, cls)
        return cls

    return register


def load_image_encoder(name: str, device: str | torch.device | None = None, *, pooled: bool = False) -> ImageEncoder:
    """Load an encoder of images by its name.

    Args:
        name: "torchvision:NAME[:WEIGHTS FILE]", a folder of open_clip, "NAME:TAG" of open_clip, the .safetensors
            file of a `StyleEncoder`, or "KIND:NAME" of a registered encoder.
        device: where it runs.
        pooled: one slot for each image.

    Raises:
        ConfigError: `pooled` for a `StyleEncoder`, or the name of an encoder of other data.
        MissingExtraError: its library is not installed.
        AdapterFileError: there is none of this name.
    """
    kind, rest = _split(name, "style" if name.endswith(".safetensors") else "openclip")
    return _load(kind, rest, ImageEncoder, device, pooled=pooled)


def load_text_encoder(
    name: str, pooling: str | None = None, device: str | torch.device | None = None
) -> TextEncoderBase:
    """Load an encoder of texts by its name.

    Args:
        name: any name or folder of a `TextEncoder`, a folder of open_clip, the .safetensors file of a
            `HybridEncoder`, or "KIND:NAME" of a registered encoder.
        pooling: of a `TextEncoder`; None for the mean. The others give one slot, and take None or "none".
        device: where it runs.

    Raises:
        ConfigError: a pooling for one of the others, or the name of an encoder of other data.
        MissingExtraError: its library is not installed.
        AdapterFileError: there is none of this name.
    """
    is_clip = (Path(name) / "open_clip_config.json").is_file()
    default = "openclip-text" if is_clip else "hybrid" if name.endswith(".safetensors") else "text"
    kind, rest = _split(name, default)
    if default != "text" and kind == default and pooling not in (None, "none"):
        raise ConfigError(f"{name} gives one slot for each text: leave pooling={pooling!r} out")
    return _load(kind, rest, TextEncoderBase, device, pooling=pooling)


def _split(name: str, default: str) -> tuple[str, str]:
    kind, colon, rest = name.partition(":")
    return (kind, rest) if colon and kind in _ENCODERS else (default, name)


def _load(kind: str, name: str, base: type, device: str | torch.device | None, **options: Any) -> Any:
    cls = _ENCODERS[kind]
    if not issubclass(cls, base):
        raise ConfigError(f"{kind}:{name} names a {cls.__name__}, which is not a subclass of {base.__name__}")
    return cls.from_name(name, device, **options)
