"""Base classes of the encoders, their registry, and the files, bytes and lists that they read."""

from __future__ import annotations

import hashlib
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from mmattn.errors import ConfigError, MmattnError, check_int
from mmattn.lazy import Registry
from mmattn.memory import Memory
from mmattn.storage.tensor_cache import TensorCache
from mmattn.tokenization import check_text

if TYPE_CHECKING:
    from numpy import ndarray

EncoderClass = TypeVar("EncoderClass", bound=type)
#: Origin of a slot, as JSON values.
Source = dict[str, object]
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
#: Methods of the decoders of torchcodec, as which `datasets` hands out sounds and videos.
_DECODERS = ("get_all_samples", "get_frame_at")
_ADDRESSES = ("http://", "https://", "data:", "s3://", "gs://", "rtsp://", "rtmp://")


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
        self._fingerprints = TensorCache()
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
        described = json.dumps(self._described(), sort_keys=True)

        def compute() -> str:
            digest = hashlib.sha256(described.encode())
            for name in sorted(weights):
                tensor = weights[name].detach().cpu().contiguous()
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
            return digest.hexdigest()

        return self._fingerprints.get((described, *weights), list(weights.values()), compute)

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
            return Memory(self._any_tensor().new_zeros(0, 0, self.dim))
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
            ConfigError: `batch_size` is not a positive int.
        """
        return self._encode_as("", texts, batch_size, progress)

    encode = forward

    def encode_query(self, texts: str | Iterable[str], *, batch_size: int = 32, progress: bool = False) -> Memory:
        """Return the memory of b queries. Arguments and errors as for `encode`."""
        return self._encode_as("query", texts, batch_size, progress)

    def encode_document(self, texts: str | Iterable[str], *, batch_size: int = 32, progress: bool = False) -> Memory:
        """Return the memory of b documents. Arguments and errors as for `encode`."""
        return self._encode_as("document", texts, batch_size, progress)

    @classmethod
    def _refuse_pooling(cls, name: str, pooling: str | None) -> None:
        if pooling not in (None, "none"):
            raise ConfigError(f"{name} gives one slot for each text: leave pooling={pooling!r} out")

    @abstractmethod
    def _encode_texts(self, texts: list[str], kind: str, batch_size: int, progress: bool) -> Tensor | list[Tensor]:
        """Return vectors (b, e), or the states (m, e) of the tokens of each; `kind`: "query", "document" or ""."""

    def _encode_as(self, kind: str, texts: str | Iterable[str], batch_size: int, progress: bool) -> Memory:
        check_int("batch_size", batch_size)
        texts = check_text(texts)
        # no_grad and not inference_mode: an adapter's backward may keep these tensors.
        with torch.no_grad():
            empty = self._any_tensor().new_zeros(0, self.dim)
            rows = self._encode_texts(texts, kind, batch_size, progress) if texts else empty
        if isinstance(rows, Tensor):
            return Memory(rows[:, None], sources=[[{"text": text}] for text in range(len(rows))])
        tokens = [range(len(row)) for row in rows]
        return self._padded(rows, [[{"text": n, "token": token} for token in row] for n, row in enumerate(tokens)])


def register_encoder(kind: str) -> Callable[[EncoderClass], EncoderClass]:
    """Return a class decorator that registers an encoder, to load it by the name "KIND:NAME".

    Loading calls the class method `from_name(NAME, device, **options)` of the class; the options are `pooled` for
    images and `pooling` for texts.

    Args:
        kind: the prefix of the names.

    Raises:
        ConfigError: the class has no `from_name`, or another class has this kind.
    """

    def register(cls: EncoderClass) -> EncoderClass:
        if not hasattr(cls, "from_name"):
            raise ConfigError(f"{cls.__name__} cannot be registered as an encoder: it lacks the class method from_name")
        _ENCODERS.add(kind, cls)
        return cls

    return register


def load_encoder(name: str, default: str, base: type, device: str | torch.device | None, **options: object) -> Any:
    """Load the encoder "KIND:NAME", or NAME of the default kind, as a subclass of `base`."""
    kind, colon, rest = name.partition(":")
    if not colon or kind not in _ENCODERS:
        kind, rest = default, name
    cls = _ENCODERS[kind]
    if not issubclass(cls, base):
        raise ConfigError(f"{kind}:{rest} names a {cls.__name__}, which is not a subclass of {base.__name__}")
    return cls.from_name(rest, device, **options)


@contextmanager
def open_binary(source: object, kind: str, error: type[MmattnError]) -> Iterator[tuple[BinaryIO, str]]:
    """Yield the open file of a path, bytes or binary file, at its beginning, and its name in messages."""
    source = undecoded(source)
    if isinstance(source, (str, os.PathLike)):
        path = os.fsdecode(source)
        if path.lower().startswith(_ADDRESSES):
            raise error(f"{path[:80]!r} is an address, and nothing is downloaded here; give the path of a file")
        name = repr(path if len(path) <= 200 else path[:200] + "…")
        try:
            file: BinaryIO = open(path, "rb")  # noqa: SIM115 (closed below)
        except FileNotFoundError:
            raise error(f"there is no file {name}") from None
        except IsADirectoryError:
            raise error(f"{name} is a folder; give the paths of the files in it") from None
        except (OSError, ValueError) as cause:
            raise error(f"{name} cannot be read: {cause}") from cause
        with file:
            yield _not_empty(file, name, kind, error), name
    elif isinstance(source, (bytes, bytearray, memoryview)):
        yield _not_empty(io.BytesIO(source), "the bytes", kind, error), "the bytes"
    elif isinstance(source, io.TextIOBase):
        raise error(f"{type(source).__name__} reads as text; open it with mode 'rb'")
    elif hasattr(source, "read"):
        try:
            file = source if source.seekable() else io.BytesIO(source.read())  # type: ignore[assignment, attr-defined]
        except (OSError, ValueError, AttributeError) as cause:
            raise error(f"the file cannot be read: {cause}") from cause
        yield _not_empty(file, "the file", kind, error), "the file"
    else:
        raise error(f"a {kind} was expected, got {type(source).__name__}; give a path, bytes or an open binary file")


def _not_empty(file: BinaryIO, name: str, kind: str, error: type[MmattnError]) -> BinaryIO:
    file.seek(0)
    if not file.read(1):
        raise error(f"{name} is empty (0 bytes), no {kind}")
    file.seek(0)
    return file


def undecoded(source: object) -> object:
    """Return the bytes or path of {"bytes": …, "path": …}, as `datasets` has undecoded files; others as they are."""
    if not (isinstance(source, Mapping) and set(source) == {"bytes", "path"}):
        return source
    return source["path"] if source["bytes"] is None else source["bytes"]


def is_array(source: object) -> TypeGuard[Tensor | ndarray]:
    """Tell tensors and numpy arrays from other objects."""
    return isinstance(source, Tensor) or hasattr(source, "__array_interface__")


def as_list(
    values: object, kind: str, error: type[MmattnError], *, batch_dims: int, single: tuple[type, ...] = ()
) -> list[object]:
    """Return one medium, an iterable of several, or an array of `batch_dims` dimensions of them, as a list."""
    values = undecoded(values)
    if isinstance(values, (str, bytes, bytearray, memoryview, os.PathLike, *single)):
        return [values]
    if any(hasattr(values, name) for name in ("read", *_DECODERS)):
        return [values]
    if is_array(values):
        return list(values) if len(values.shape) == batch_dims else [values]
    if isinstance(values, Iterable) and not isinstance(values, (Mapping, set, frozenset)):
        return list(values)
    raise error(f"one {kind} or several were expected, got {type(values).__name__}; give one, or a list")
