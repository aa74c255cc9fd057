"""Encoders of images and of texts by the names that settings and files have for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmattn.encoders.frozen import ImageEncoder
from mmattn.encoders.hybrid import HybridEncoder
from mmattn.encoders.openclip import OpenCLIPEncoder
from mmattn.encoders.style import StyleEncoder
from mmattn.encoders.text import TextEncoder
from mmattn.encoders.torchvision import TorchvisionEncoder

#: What encodes the texts of an index.
AnyTextEncoder = TextEncoder | HybridEncoder


def load_image_encoder(name: str, device: Any = None) -> ImageEncoder:
    """The encoder of a name.

    Args:
        name: "torchvision:NAME[:WEIGHTS FILE]", a folder of open_clip, "NAME:TAG" of open_clip, or the .safetensors
            file of a `StyleEncoder`.
        device: where it runs.

    Raises:
        MissingExtraError: what loads it is not installed.
        AdapterFileError: there is none of this name.
    """
    if name.startswith("torchvision:"):
        _, network, *weights = name.split(":", 2)
        return TorchvisionEncoder(network, weights=weights[0] if weights else None, device=device)
    if name.endswith(".safetensors"):
        return StyleEncoder.load(name, device)
    return OpenCLIPEncoder(f"local-dir:{name}" if Path(name).is_dir() else name, device=device)


def load_text_encoder(name: str, pooling: str | None = None, device: Any = None) -> AnyTextEncoder:
    """The encoder of texts of a name.

    Args:
        name: any name or folder of a `TextEncoder`, or the .safetensors file of a `HybridEncoder`.
        pooling: of a `TextEncoder`; None for the mean.
        device: where it runs.

    Raises:
        MissingExtraError: what loads it is not installed.
        AdapterFileError: there is none of this name.
    """
    if name.endswith(".safetensors"):
        return HybridEncoder.load(name, device)
    return TextEncoder(name, pooling="mean" if pooling is None else pooling, device=device)
