"""Encoders of images and of texts by the names that settings and files have for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmattn.encoders.base import ImageEncoder
from mmattn.encoders.hybrid import HybridEncoder
from mmattn.encoders.openclip import OpenCLIPEncoder, OpenCLIPTextEncoder
from mmattn.encoders.style import StyleEncoder
from mmattn.encoders.text import TextEncoder
from mmattn.encoders.torchvision import TorchvisionEncoder
from mmattn.errors import ConfigError

#: What encodes the texts of an index.
AnyTextEncoder = TextEncoder | HybridEncoder | OpenCLIPTextEncoder


def load_image_encoder(name: str, device: Any = None, *, pooled: bool = False) -> ImageEncoder:
    """The encoder of a name.

    Args:
        name: "torchvision:NAME[:WEIGHTS FILE]", a folder of open_clip, "NAME:TAG" of open_clip, or the .safetensors
            file of a `StyleEncoder`.
        device: where it runs.
        pooled: one slot for each picture.

    Raises:
        ConfigError: `pooled` for a `StyleEncoder`.
        MissingExtraError: what loads it is not installed.
        AdapterFileError: there is none of this name.
    """
    if name.startswith("torchvision:"):
        _, network, *weights = name.split(":", 2)
        return TorchvisionEncoder(network, weights=weights[0] if weights else None, pooled=pooled, device=device)
    if name.endswith(".safetensors"):
        if pooled:
            raise ConfigError(f"{name} is a StyleEncoder, which gives patches: leave pooled out")
        return StyleEncoder.load(name, device)
    return OpenCLIPEncoder(f"local-dir:{name}" if Path(name).is_dir() else name, pooled=pooled, device=device)


def load_text_encoder(name: str, pooling: str | None = None, device: Any = None) -> AnyTextEncoder:
    """The encoder of texts of a name.

    Args:
        name: any name or folder of a `TextEncoder`, a folder of open_clip, or the .safetensors file of a
            `HybridEncoder`.
        pooling: of a `TextEncoder`; None for the mean. The others give one slot, and take None or "none".
        device: where it runs.

    Raises:
        ConfigError: a pooling for one of the others.
        MissingExtraError: what loads it is not installed.
        AdapterFileError: there is none of this name.
    """
    is_clip = (Path(name) / "open_clip_config.json").is_file()
    if (is_clip or name.endswith(".safetensors")) and pooling not in (None, "none"):
        raise ConfigError(f"{name} gives one slot for each text: leave pooling={pooling!r} out")
    if is_clip:
        return OpenCLIPTextEncoder(f"local-dir:{name}", device=device)
    if name.endswith(".safetensors"):
        return HybridEncoder.load(name, device)
    return TextEncoder(name, pooling="mean" if pooling is None else pooling, device=device)
