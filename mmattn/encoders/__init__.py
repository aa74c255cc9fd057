"""Encoders: pictures and texts into memory. Nothing heavy is imported before an encoder is made."""

from __future__ import annotations

from mmattn.encoders.frozen import PictureEncoder
from mmattn.encoders.images import Preparation, load_image, preprocess
from mmattn.encoders.openclip import OpenCLIPEncoder, OpenCLIPTextEncoder
from mmattn.encoders.text import TextEncoder
from mmattn.encoders.torchvision import TorchvisionEncoder

__all__ = [
    "OpenCLIPEncoder",
    "OpenCLIPTextEncoder",
    "PictureEncoder",
    "Preparation",
    "TextEncoder",
    "TorchvisionEncoder",
    "load_image",
    "preprocess",
]
