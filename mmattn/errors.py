"""Exceptions of the package, and checks of arguments that raise them.

Every message says what was asked, what was given, why it fails and what to do. Each class also derives from the
standard exception of its kind, so that `except ValueError` catches it. What the operating system refuses (a full disk,
no right to write) is an OSError, and a row that a memory does not have an IndexError, as everywhere in Python.
"""

from __future__ import annotations

import importlib
import math
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AdapterFileError",
    "AttachError",
    "AudioError",
    "ConditionError",
    "ConfigError",
    "ImageError",
    "IndexFileError",
    "IndexMismatchError",
    "MaskError",
    "MissingExtraError",
    "MmattnError",
    "NonFiniteError",
    "ShapeError",
    "TextError",
    "VideoError",
]


class MmattnError(Exception):
    """Base class of every exception that this package raises on purpose."""


class MaskError(MmattnError, TypeError):
    """A mask is not boolean with True = may look; the message names the function of `mmattn.masks` that converts it."""


class ShapeError(MmattnError, ValueError):
    """Shapes do not fit together: batch sizes, widths, lengths, or the axes of a mask."""


class ConfigError(MmattnError, ValueError):
    """A setting is outside what is allowed, unknown, missing, or contradicts another one."""


class NonFiniteError(MmattnError, ValueError):
    """NaN or infinity in a memory, in weights, in vectors, or as the loss of a training step."""


class AttachError(MmattnError, ValueError):
    """An adapter cannot be attached to this host as asked: a name in use, layers it does not have, a kind it is not."""


class ConditionError(MmattnError, RuntimeError):
    """A memory cannot reach the host in its present state: compiled, without weights, packed rows, mid-generation."""


class AdapterFileError(MmattnError, ValueError):
    """A file of an adapter, memory, bank, model or settings is missing, damaged or of another kind; nothing changed."""


class IndexMismatchError(MmattnError, ValueError):
    """Queries, entries, ids, an index and an encoder do not belong together; nothing changed."""


class IndexFileError(MmattnError, ValueError):
    """A saved index is missing, damaged or of another kind; nothing changed."""


class ImageError(MmattnError, ValueError):
    """An image cannot be read: missing, damaged, too large, or no image."""


class AudioError(MmattnError, ValueError):
    """A sound cannot be read: missing, damaged, cut short, empty, too short or too long, or no sound."""


class VideoError(MmattnError, ValueError):
    """A video cannot be read: missing, damaged, without frames, or no video."""


class TextError(MmattnError, ValueError):
    """A text cannot be tokenised or embedded as asked: no string, empty, too long, or with half a surrogate pair."""


class MissingExtraError(MmattnError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


def import_extra(module: str, extra: str) -> ModuleType:
    """Import an optional dependency."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingExtraError(
            f"{module} is needed here and is not installed; install it with: pip install 'mmattn[{extra}]'"
        ) from error


def check_int(name: str, value: object, *, at_least: int = 1, at_most: int | None = None) -> int:
    """Return `value` if it is an int, not a bool, within a range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < at_least:
        raise ConfigError(f"{name} must be at least {at_least}, got {value}")
    if at_most is not None and value > at_most:
        raise ConfigError(f"{name} must be at most {at_most}, got {value}")
    return value


def check_float(name: str, value: object, *, at_least: float = -math.inf, below: float = math.inf) -> float:
    """Return `value` as a float if it is a finite number in [at_least, below)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -math.inf < value < math.inf:
        raise ConfigError(f"{name} must be a finite number, got {value!r}")
    if not at_least <= value < below:
        raise ConfigError(f"{name} must be in [{at_least}, {below}), got {value}")
    return float(value)


def check_bool(name: str, value: object) -> None:
    """Refuse what is not true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")
    return value


def check_bool_mask(name: str, mask: object) -> Tensor:
    """Return `mask` if it is a boolean tensor; the error names the converters otherwise."""
    import torch  # not at the top: the command line answers without it

    if not isinstance(mask, torch.Tensor):
        raise MaskError(f"{name} must be a bool tensor, True = attend; got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise MaskError(
            f"{name} must be bool, True = attend; got {str(mask.dtype).removeprefix('torch.')}. "
            "Convert it with mmattn.masks.from_huggingface, from_additive or from_key_padding"
        )
    return mask
