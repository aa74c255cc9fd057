"""Frozen encoders of images, texts, sounds and series; an encoder imports its library when it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmattn.lazy import lazy_exports

if TYPE_CHECKING:
    from mmattn.encoders.audio import AudioEncoder, LogMelEncoder, load_audio
    from mmattn.encoders.base import register_encoder
    from mmattn.encoders.images import ImageEncoder, ImageProcessor, load_image, load_image_encoder
    from mmattn.encoders.names import NameEncoder
    from mmattn.encoders.openclip import OpenCLIPEncoder, OpenCLIPTextEncoder
    from mmattn.encoders.series import SeriesEncoder
    from mmattn.encoders.style import StyleEncoder, StyleNetwork
    from mmattn.encoders.text import TextEncoder, load_text_encoder
    from mmattn.encoders.timm import TimmEncoder
    from mmattn.encoders.torchvision import TorchvisionEncoder
    from mmattn.encoders.video import VideoEncoder

__all__ = [
    "AudioEncoder",
    "OpenCLIPEncoder",
    "OpenCLIPTextEncoder",
    "ImageEncoder",
    "ImageProcessor",
    "LogMelEncoder",
    "NameEncoder",
    "SeriesEncoder",
    "StyleEncoder",
    "StyleNetwork",
    "TextEncoder",
    "TimmEncoder",
    "TorchvisionEncoder",
    "VideoEncoder",
    "load_audio",
    "load_image",
    "load_image_encoder",
    "load_text_encoder",
    "register_encoder",
]

__getattr__, __dir__ = lazy_exports(__name__)
