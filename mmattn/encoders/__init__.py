"""Frozen encoders of images and texts into a `Memory`; nothing heavy is imported before an encoder is built."""

from __future__ import annotations

from mmattn.encoders.frozen import ImageEncoder
from mmattn.encoders.hybrid import HybridEncoder
from mmattn.encoders.images import load_image
from mmattn.encoders.multi_vector import MultiVectorEncoder
from mmattn.encoders.openclip import OpenCLIPEncoder, OpenCLIPTextEncoder
from mmattn.encoders.preprocessing import ImageProcessor, preprocess
from mmattn.encoders.style import StyleEncoder, StyleNetwork, away_from_paper
from mmattn.encoders.text import TextEncoder
from mmattn.encoders.torchvision import TorchvisionEncoder

__all__ = [
    "OpenCLIPEncoder",
    "OpenCLIPTextEncoder",
    "HybridEncoder",
    "ImageEncoder",
    "ImageProcessor",
    "MultiVectorEncoder",
    "StyleEncoder",
    "StyleNetwork",
    "TextEncoder",
    "TorchvisionEncoder",
    "away_from_paper",
    "load_image",
    "preprocess",
]
