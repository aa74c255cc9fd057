"""Base classes of the encoders, and encoders of images and texts by name."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from mmattn.encoders.images import MAX_PIXELS, PixelProcessor, image_list
from mmattn.errors import ConfigError, check_int
from mmattn.lazy import Registry
from mmattn.memory import Memory
from mmattn.models.catalogue import find_asset
from mmattn.progress import batches
from mmattn.storage.tensor_cache import TensorVersion
from mmattn.tokenization import check_text

EncoderClass = TypeVar("EncoderClass", bound=type)
#: Origin of a slot, as JSON values.
Source = dict[str, object]


class FrozenEncoder(nn.Module, ABC):
    """A frozen network, always in evaluation mode, identified by a fingerprint; `model` is None without weights."""

    dim: int
    #: Attributes that its `repr` has.
    _shown: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        model: nn.Module | None,
        settings: Mapping[str, object] | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        # For the device and dtype of encoders without weights.
        self.register_buffer("_place", torch.zeros(0), persistent=False)
        self.model = (nn.Module() if model is None else model).requires_grad_(False)
        self.to(device or "cpu")
        self.settings = dict(settings or {})
        self._hashed: tuple[str, TensorVersion, str] | None = None
        self.eval()

    def train(self, mode: bool = True) -> FrozenEncoder:
        """Stay in evaluation mode, also as part of a model that trains; `mode` changes nothing."""
        super().train(False)
        return self

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return self._any_tensor().device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the network, and of the memory."""
        return self._any_tensor().dtype

    @property
    def fingerprint(self) -> str:
        """sha256 of the settings and weights that the memory depends on: equal for equal encoders on any machine."""
        weights = {name: tensor for name, tensor in self._weights().items() if isinstance(tensor, Tensor)}
        described, tensors = json.dumps([self._described(), list(weights)], sort_keys=True), list(weights.values())
        if self._hashed is None or self._hashed[0] != described or not self._hashed[1].holds(tensors):
            version = TensorVersion(tensors)
            digest = hashlib.sha256(json.dumps(self._described(), sort_keys=True).encode())
            for name in sorted(weights):
                tensor = weights[name].detach().cpu().contiguous()
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
            self._hashed = (described, version, digest.hexdigest())
        return self._hashed[2]

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self._shown)

    def _any_tensor(self) -> Tensor:
        return next(chain(self.parameters(), self.buffers()))

    def _described(self) -> dict[str, object]:
        return self.settings

    def _weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def _padded(self, rows: Sequence[Tensor], sources: Sequence[list[Source]]) -> Memory:
        """Return rows (m, e) of different lengths with their sources as one padded memory."""
        if not rows:
            return Memory(torch.zeros(0, 0, self.dim, dtype=self.dtype, device=self.device))
        memory = Memory.pad(rows)
        padded = [[*row, *[None] * (memory.length - len(row))] for row in sources]
        return Memory(memory.tokens, memory.mask, sources=padded)


class TextEncoderBase(FrozenEncoder):
    """Base class of text encoders, which implement `_encode_texts`."""

    def forward(self, texts: str | Iterable[str], *, batch_size: int = 32, progress: bool = False) -> Memory:
        """Return the memory (b, m, e) of b texts, computed without gradients; `encode` is the same.

        `sources` names the text of each slot, and its token where a text has several slots: {"text": 0, "token": 3}. A
        UserWarning names the texts that were truncated.

        Args:
            texts: one text or several.
            batch_size: texts that pass the network at once.
            progress: show the progress on stderr.

        Raises:
            TextError: an entry is no text, or is empty and has nothing to pool; the message says which one.
            ConfigError: `batch_size` is no positive int.
        """
        check_int("batch_size", batch_size)
        return self._encode_texts(check_text(texts), batch_size, progress)

    encode = forward

    @abstractmethod
    def _encode_texts(self, texts: list[str], batch_size: int, progress: bool) -> Memory:
        """Encode checked texts."""


class ImageEncoder(FrozenEncoder):
    """Features of images by a frozen network as a memory (b, m, e): one row per image, one token per patch.

    A network of your own becomes an encoder through a subclass that overrides `features`. `encoder(images).save(path)`
    writes the memory to a file, and `Memory.load(path)` reads it without the network.

    Args:
        model: the network.
        image_processor: from images to the pixels that the network was trained on.
        pooled: one token per image, the mean over its patches (m = 1).
        settings: further content of the fingerprint, besides the image processor and `pooled`.
        device: where the network runs, by default the CPU.

    Attributes:
        dim: width e of the memory.
        length: tokens m of each image.
        grid: (height, width) of the patches, or None if they are not laid out in rows and columns.
    """

    grid: tuple[int, int] | None
    _shown = ("dim", "grid", "pooled")

    def __init__(
        self,
        model: nn.Module,
        image_processor: PixelProcessor,
        *,
        pooled: bool = False,
        settings: Mapping[str, object] | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__(model, settings, device)
        self.image_processor = image_processor
        self.pooled = pooled
        with torch.no_grad():
            tokens, self.grid = self._tokens(self._example_pixels())
        self.length, self.dim = tokens.shape[1:]

    def features(self, pixels: Tensor) -> Tensor:
        """Return the features of pixels, by default the output of the network; subclasses override this method.

        Args:
            pixels: (b, 3, height, width), on the device and in the dtype of the network.

        Returns:
            (b, e, height, width) or (b, m, e), or (b, e) of a pooled network.
        """
        return self.model(pixels)

    def forward(
        self, images: object, *, batch_size: int = 32, progress: bool = False, max_pixels: int = MAX_PIXELS
    ) -> Memory:
        """Return the memory (b, m, e) of b images, computed without gradients.

        `sources` of the memory names the image and the patch of each token: {"image": 0, "patch": [row, column]}.

        Args:
            images: one image or a list of them, of any kind that `load_image` reads.
            batch_size: images that pass the network at once.
            progress: show the progress on stderr.
            max_pixels: larger images are refused before they are decoded.

        Raises:
            ImageError: an image cannot be read; the message says which one.
            ConfigError: `batch_size` is no positive int.
        """
        check_int("batch_size", batch_size)
        pictures, process = image_list(images), self.image_processor
        # no_grad and not inference_mode: an adapter's backward may keep these tensors.
        with torch.no_grad():
            parts = [
                self._tokens(process(pictures[start : start + batch_size], first=start, max_pixels=max_pixels))[0]
                for start in batches(len(pictures), batch_size, "encoding", progress)
            ]
        tokens = torch.cat(parts) if parts else torch.zeros(0, self.length, self.dim, dtype=self.dtype)
        return Memory(tokens.to(self.device), sources=[self._origin(image) for image in range(len(pictures))])

    def _example_pixels(self) -> Tensor:
        """Return pixels of one image, from which the shape of the features is read."""
        return self.image_processor([torch.zeros(3, 1, 1)])

    def _described(self) -> dict[str, object]:
        return {**self.settings, "preparation": self.image_processor.as_dict(), "pooled": self.pooled}

    def _tokens(self, pixels: Tensor) -> tuple[Tensor, tuple[int, int] | None]:
        features = self.features(pixels.to(self.device, self.dtype))
        grid: tuple[int, int] | None
        if features.dim() == 4:
            grid = (features.shape[2], features.shape[3])
            tokens = features.flatten(2).transpose(1, 2)
        else:
            tokens = features[:, None] if features.dim() == 2 else features
            side = round(tokens.shape[1] ** 0.5)
            grid = (side, side) if side * side == tokens.shape[1] else None
        if self.pooled:
            return tokens.mean(1, keepdim=True), (1, 1)
        return tokens.contiguous(), grid

    def _origin(self, image: int) -> list[Source]:
        if self.pooled:
            return [{"image": image}]
        if self.grid is None:
            return [{"image": image, "slot": slot} for slot in range(self.length)]
        return [{"image": image, "patch": list(divmod(slot, self.grid[1]))} for slot in range(self.length)]


_ENCODERS = Registry(
    "the encoder",
    {
        "names": "mmattn.encoders.names",
        "openclip": "mmattn.encoders.openclip",
        "openclip-text": "mmattn.encoders.openclip",
        "style": "mmattn.encoders.style",
        "text": "mmattn.encoders.text",
        "timm": "mmattn.encoders.timm",
        "torchvision": "mmattn.encoders.torchvision",
    },
)
#: The names of image encoders, for messages.
IMAGE_NAMES = "efficientnet-lite0, timm:NAME, torchvision:NAME, NAME:TAG of open_clip, or a folder of open_clip or timm"
#: Of the short names, that of an image encoder: the stage and the size at which it is small and quick.
_SHORT_NAMES = {"efficientnet-lite0": "timm:efficientnet-lite0:stage=4:size=112"}


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
        name: "efficientnet-lite0", "timm:NAME[:stage=4][:size=112]", "torchvision:NAME[:WEIGHTS FILE]", "NAME:TAG" of
            open_clip, a folder of open_clip or timm, the .safetensors file of a `StyleEncoder`, or "KIND:NAME" of a
            registered encoder.
        device: where it runs.
        pooled: one slot for each image.

    Raises:
        ConfigError: `pooled` for a `StyleEncoder`, or the name of an encoder of other data.
        MissingExtraError: its library is not installed.
        AdapterFileError: there is none of this name.
    """
    name = find_asset(name if os.path.exists(name) else _SHORT_NAMES.get(name, name))
    default = "style" if name.endswith(".safetensors") else "timm" if _is_timm_folder(name) else "openclip"
    kind, rest = _split(name, default)
    return _load(kind, rest, ImageEncoder, device, pooled=pooled)


def load_text_encoder(
    name: str, pooling: str | None = None, device: str | torch.device | None = None
) -> TextEncoderBase:
    """Load an encoder of texts by its name.

    Args:
        name: "minilm", any other name or folder of a `TextEncoder`, a folder of open_clip, the .safetensors file of a
            `NameEncoder`, or "KIND:NAME" of a registered encoder.
        pooling: of a `TextEncoder`; None for that of its folder, otherwise the mean. The others give one slot, and take
            None or "none".
        device: where it runs.

    Raises:
        ConfigError: a pooling for one of the others, or the name of an encoder of other data.
        MissingExtraError: its library is not installed.
        AdapterFileError: there is none of this name.
    """
    name = find_asset(name)
    is_clip = (Path(name) / "open_clip_config.json").is_file()
    default = "openclip-text" if is_clip else "names" if name.endswith(".safetensors") else "text"
    kind, rest = _split(name, default)
    if default != "text" and kind == default and pooling not in (None, "none"):
        raise ConfigError(f"{name} gives one slot for each text: leave pooling={pooling!r} out")
    return _load(kind, rest, TextEncoderBase, device, pooling=pooling)


def _is_timm_folder(name: str) -> bool:
    """Return True for a folder that timm wrote."""
    try:
        return "architecture" in json.loads((Path(name) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False


def _split(name: str, default: str) -> tuple[str, str]:
    kind, colon, rest = name.partition(":")
    return (kind, rest) if colon and kind in _ENCODERS else (default, name)


def _load(kind: str, name: str, base: type, device: str | torch.device | None, **options: object) -> Any:
    cls = _ENCODERS[kind]
    if not issubclass(cls, base):
        raise ConfigError(f"{kind}:{name} names a {cls.__name__}, which is not a subclass of {base.__name__}")
    return cls.from_name(name, device, **options)
